"""What a loaded model needs of its device's memory, measured or computed: the input of `sizing.py`. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..model.cache import KVCache
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.footprint import step_bytes, tables_bytes, weights_bytes
from ..model.weights import expected_shapes
from .config import EngineConfig
from .errors import ConfigError
from .logits import WHOLE_SIZE
from .memory import Machine
from .params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from .sizing import CPU_SHARE, Needs, Sizing, check_weights, free_host_bytes, total_host_bytes

# A logit while tokens are chosen, as the model gives it and its copies. On a CPU, by torch's profiler, where each row
# asks for logprobs: float32 from the model, a copy, their log-softmax, and a flag that is summed as an i64.
CPU_LOGIT_BYTES = 4 + 4 + 4 + 9
GPU_LOGIT_BYTES = 14  # in half precision, and up to three copies in float32
SORTED_BYTES = 40 * WHOLE_SIZE  # on the host, where rows are sorted whole
COLUMN_BYTES = 128  # of a slot: the sampler's columns of one number each


def check_room_for_weights(shape: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises `ConfigError` if the weights are larger than what is free: before they are loaded, not in the middle."""
    num_bytes = sum(math.prod(sizes) for sizes in expected_shapes(shape).values()) * dtype.itemsize
    free = free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    check_weights(num_bytes, free, str(device), str(dtype).removeprefix("torch."))


def sizing_of(
    config: EngineConfig,
    shape: ModelConfig,
    decoder: Decoder,
    max_model_len: int,
    measure_step: Callable[[], int],
    host_blocks: int = 0,
) -> Sizing:
    """Everything that sizes depend on. `decoder` holds tables for `max_model_len` positions, and no cache is there yet.

    `measure_step` runs the largest step on a GPU and gives the bytes it took; a CPU's is computed.
    """
    weights = weights_bytes(decoder.weights)
    loaded = weights + tables_bytes(shape, max_model_len)
    of_device = _on_cpu if decoder.device.type == "cpu" else _on_gpu
    machine, needs_of = of_device(config, shape, decoder, weights, loaded, measure_step)
    bytes_per_block = KVCache.bytes_per_block(shape, config.block_size, decoder.dtype)
    return Sizing(
        config=config, machine=machine, needs_of=needs_of, bytes_per_block=bytes_per_block, host_blocks=host_blocks
    )


Measured = tuple[Machine, Callable[[int], Needs]]


def _on_cpu(
    config: EngineConfig, shape: ModelConfig, decoder: Decoder, weights: int, loaded: int, _: Callable[[], int]
) -> Measured:
    free = free_host_bytes()
    logits = config.max_num_seqs * shape.vocab_size * CPU_LOGIT_BYTES + SORTED_BYTES

    def needs_of(length: int) -> Needs:
        return Needs(
            weights=weights,
            state=tables_bytes(shape, length)
            + _slot_bytes(config, shape, length)
            + _sampler_bytes(config, shape, length),
            activations=step_bytes(shape, decoder.weights, config.max_num_batched_tokens, length),
            logits=logits,
        )

    machine = Machine(
        device="cpu",
        total_bytes=total_host_bytes(),
        limit_bytes=loaded + free,
        budget_bytes=loaded + free,
        cache_cap_bytes=int(free * CPU_SHARE),
    )
    return machine, needs_of


def _on_gpu(
    config: EngineConfig, shape: ModelConfig, decoder: Decoder, weights: int, loaded: int, measure: Callable[[], int]
) -> Measured:
    try:
        activations = measure()
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"max_num_batched_tokens = {config.max_num_batched_tokens}: such a step does not fit what the weights "
            f"leave of {decoder.device}; lower it, or choose a smaller model"
        ) from None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(decoder.device)

    def needs_of(length: int) -> Needs:
        return Needs(
            weights=weights,
            state=tables_bytes(shape, length) + _slot_bytes(config, shape, length),
            activations=activations,
            logits=config.max_num_seqs * shape.vocab_size * GPU_LOGIT_BYTES,
            other=max(0, total - free - loaded),
            sampler=_sampler_bytes(config, shape, length) + SORTED_BYTES,
        )

    machine = Machine(
        device=str(decoder.device),
        total_bytes=total,
        limit_bytes=total,
        budget_bytes=int(total * config.gpu_memory_utilization),
        host_free_bytes=free_host_bytes(),
    )
    return machine, needs_of


def _slot_bytes(config: EngineConfig, shape: ModelConfig, max_model_len: int) -> int:
    """The runner's block tables, the newest token of each slot, and what the pooler sums up for it."""
    return config.max_num_seqs * (4 * -(-max_model_len // config.block_size) + 8 + 4 * shape.hidden_size)


def _sampler_bytes(config: EngineConfig, shape: ModelConfig, max_model_len: int) -> int:
    """The sampler's table, once every row has had tokens, a bias and stop ids."""
    row = 4 * (max_model_len + 2 * MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS) + COLUMN_BYTES
    return config.max_num_seqs * row + shape.vocab_size

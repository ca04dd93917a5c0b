"""What a loaded model needs of a CPU's memory, and of the host's beside a GPU, computed: the input of `sizing.py`."""

from __future__ import annotations

import math
from collections.abc import Callable

from ..kernels.sampling_rows import WIDTH
from ..model.config import ModelConfig
from ..model.expected import expected_shapes
from ..model.rope import tables_bytes
from .config import EngineConfig
from .logits import WHOLE_SIZE
from .memory import Machine
from .params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from .sizing import CPU_SHARE, Needs, Sizing, check_weights, free_host_bytes, total_host_bytes

# A logit while tokens are chosen, as the model gives it and its copies. On a CPU, by torch's profiler, where each row
# asks for logprobs: float32 from the model, a copy, and flags of what is likelier, which are summed as i64.
CPU_LOGIT_BYTES = 4 + 4 + 9
SORTED_BYTES = 40 * WHOLE_SIZE  # on the host, where rows are sorted whole
COLUMN_BYTES = 128  # of a slot: the sampler's columns of one number each


def check_room_for_weights(
    shape: ModelConfig, dtype: str, item_size: Callable[[str], float], device: str, free_bytes: int
) -> None:
    """Raises `ConfigError` if the weights are larger than what is free: before they are loaded, not in the middle.
    `item_size(name)`: bytes of one number of that tensor."""
    num_bytes = sum(math.prod(sizes) * item_size(name) for name, sizes in expected_shapes(shape).items())
    check_weights(int(num_bytes), free_bytes, device, dtype)


def sizing_on_cpu(
    config: EngineConfig,
    shape: ModelConfig,
    max_model_len: int,
    *,
    weights: int,
    activations: Callable[[int], int],
    bytes_per_block: int,
    host_blocks: int = 0,
) -> Sizing:
    """Everything that sizes depend on, in bytes. `weights` and tables for `max_model_len` positions are in memory, and
    no cache is there yet. `activations(length)` is what the largest step takes in sequences of up to that length."""
    loaded, free = weights + tables_bytes(shape.rope, max_model_len), free_host_bytes()
    logits = config.max_num_seqs * shape.vocab_size * CPU_LOGIT_BYTES + SORTED_BYTES

    def needs_of(length: int) -> Needs:
        return Needs(
            weights=weights,
            state=tables_bytes(shape.rope, length)
            + slot_bytes(config, shape, length)
            + sampler_bytes(config, shape, length),
            activations=activations(length),
            logits=logits,
        )

    machine = Machine(
        device="cpu",
        total_bytes=total_host_bytes(),
        limit_bytes=loaded + free,
        budget_bytes=loaded + free,
        cache_cap_bytes=int(free * CPU_SHARE),
    )
    return Sizing(
        config=config, machine=machine, needs_of=needs_of, bytes_per_block=bytes_per_block, host_blocks=host_blocks
    )


def slot_bytes(config: EngineConfig, shape: ModelConfig, max_model_len: int) -> int:
    """The runner's block tables, the newest token of each slot, and what the pooler sums up for it."""
    return config.max_num_seqs * (4 * -(-max_model_len // config.block_size) + 8 + 4 * shape.hidden_size)


def sampler_bytes(config: EngineConfig, shape: ModelConfig, max_model_len: int) -> int:
    """The sampler's table, once every row has had tokens, a bias and stop ids."""
    row = 4 * (max_model_len + 2 * MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS) + COLUMN_BYTES
    return config.max_num_seqs * row + shape.vocab_size


def device_sampler_bytes(num_slots: int, vocab_size: int) -> int:
    """What slots asked for, and the counts of their tokens, on a GPU whose kernels choose; but for the EOS tokens."""
    lists = 4 * (2 * MAX_LOGIT_BIAS + MAX_STOP_TOKEN_IDS)
    return num_slots * (4 * WIDTH + 2 * vocab_size + lists)

"""A runner whose KV cache fits the memory: what a step needs, and what is left for blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ....kernels import kernel_set
from ....kernels.layout.kv_layout import KVLayout
from ....kernels.layout.state_layout import StateLayout
from ....model.backend_gaps import missing
from ....model.decoder.decoder import Decoder
from ....model.decoder.kv_cache import KVCache
from ....model.decoder.lora_slots import LoraSlots, SlotLayout
from ....model.decoder.memory_estimate import recurrent_copies
from ....model.decoder.recurrent import RecurrentStates
from ....model.decoder.rope import short_length, tables_bytes
from ....model.spec import DecoderSpec
from ....runtime.env.log import get_logger
from ...config import EngineConfig
from ...device.pooler import Pooler
from ...device.scored_prompts import rows_of_a_piece
from ...errors import ConfigError
from ...execute.model_runner import ModelRunner
from ...memory_table import MachineMemory, MemoryTable
from ...messages import StepGrant
from ..cache_size import CacheSizing, MemoryNeeds, free_host_share, host_blocks_by_kind, num_host_blocks
from ..cuda.cuda_graphs import most_rows
from ..memory_needs import (
    SORTED_BYTES,
    about_masks,
    async_bytes,
    device_sampler_bytes,
    graphs_bytes,
    layouts,
    positions_that_fit,
    sampler_bytes,
    sizing_on_cpu,
    slot_bytes,
)
from ..rates import largest_grant, with_tables
from ..recurrent_settings import state_layout
from .kv_dtype import kv_dtype_of, kv_scales_of
from .layer_leader import LastLayers
from .leading import LeadingDecoder
from .pipeline_runner import PipelineRunner
from .share_leader import FirstShare, LeadingAdapters

if TYPE_CHECKING:
    from ....model.fallback.transformers_decoder import TransformersDecoder  # which imports transformers

    TorchDecoder = Decoder | TransformersDecoder

log = get_logger("millrace.stages")

LOGIT_COPIES_BYTES = 12  # per logit during sampling: up to three copies in float32


def fit_runner(
    config: EngineConfig,
    shape: DecoderSpec,
    make_decoder: Callable[..., TorchDecoder],
    max_model_len: int,
    device: torch.device,
    *,
    is_async: bool,
) -> tuple[ModelRunner, MemoryTable, tuple[int, ...]]:
    """A runner with a KV cache that fits the memory, the memory table, and the host blocks of each kind.

    With `max_model_len = auto`, the table's `max_model_len` may be shorter than the argument.
    """
    max_model_len = positions_that_fit(config, shape, max_model_len, device.type)
    decoder = make_decoder(max_positions=max_model_len)
    bytes_per_block = KVCache.bytes_per_block(shape, config.block_size, kv_dtype_of(config, decoder.dtype))
    bytes_per_block *= config.tensor_parallel_size  # ranks share the host's memory
    host_blocks = num_host_blocks(config, bytes_per_block, max_model_len, decoder.device.type)
    item_size, pool_blocks = decoder.dtype.itemsize, host_blocks  # as many as the memory of the host pool holds
    left = _device_bytes(config, decoder.device)
    states, host_blocks = state_layout(config, shape, item_size, bytes_per_block, pool_blocks, max_model_len, left)
    pool_blocks = pool_blocks if host_blocks else 0
    memory = _sizing(config, shape, decoder, max_model_len, pool_blocks, states, is_async=is_async).plan(max_model_len)
    if memory.max_model_len < max_model_len:
        decoder = make_decoder(max_positions=memory.max_model_len)
    sizes = (memory.num_blocks, memory.max_model_len, by_kind := host_blocks_by_kind(memory, host_blocks))
    options: dict[str, Any] = {"is_block_major": is_async or None, "layout": memory.layout, "states": states}
    runner = make_runner(config, shape, decoder, *sizes, **options)
    return runner, memory, by_kind


def make_runner(
    config: EngineConfig,
    shape: DecoderSpec,
    decoder: TorchDecoder,
    blocks: int,
    max_model_len: int,
    host_blocks: Sequence[int] = (),
    *,
    is_block_major: bool | None = None,
    layout: KVLayout | None = None,
    states: StateLayout | None = None,
) -> ModelRunner:
    """A runner of the decoder with `blocks` KV blocks, and `host_blocks` of each kind on the host.

    `states`: of a decoder with recurrent layers.
    """
    dtype = kv_dtype_of(config, decoder.dtype)
    sharing = decoder.sharing if isinstance(decoder, FirstShare) else None
    measure = partial(kv_scales_of, config, decoder)
    scales = measure() if sharing is None or config.kv_cache_dtype != "fp8" else sharing.measure_scales(measure)
    sizes = (shape, blocks, config.block_size)
    make_cache = decoder.leader.make_cache if isinstance(decoder, LeadingDecoder) else KVCache
    options: dict[str, Any] = {"is_block_major": is_block_major, "layout": layout}
    held = decoder.spec if isinstance(decoder, LastLayers) else shape  # the layers that are here
    found = None if states is None else RecurrentStates(held, states, decoder.dtype, decoder.device, decoder.kernels)
    if found is not None:
        options["states"] = found
    cache = make_cache(*sizes, dtype, decoder.device, decoder.kernels, scales, **options)
    last_tokens = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=decoder.device)
    pooler = Pooler(torch.zeros(config.max_num_seqs, shape.hidden_size, device=decoder.device))
    width, num_short = -(-max_model_len // config.block_size), short_length(shape.ropes, max_model_len)
    adapters = getattr(decoder, "adapters", None)  # none of a decoder through transformers
    if sharing is not None and adapters is not None:
        adapters = LeadingAdapters(sharing, adapters)
    if isinstance(decoder, LastLayers):
        return PipelineRunner(decoder, cache, last_tokens, width, host_blocks, pooler, num_short, adapters, found)
    return ModelRunner(decoder, cache, last_tokens, width, host_blocks, pooler, num_short, adapters, found)


def free_bytes(config: EngineConfig, device: torch.device) -> int:
    """Free memory of the device; of a CPU, that all engines of a fleet share, the part of one."""
    return free_host_share(config) if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def _device_bytes(config: EngineConfig, device: torch.device) -> int | None:
    """What states and the cache may take of a GPU beside what is in use, steps included; None on a CPU."""
    if device.type == "cpu":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return free - int(total * (1 - config.gpu_memory_utilization))


def backend_name(config: EngineConfig, device: torch.device, shape: DecoderSpec) -> kernel_set.BackendName:
    """The kernels that compute the decoder on the device: if nothing is set, torch's for what Triton's lack."""
    if config.attention_backend == "auto":
        return "triton" if device.type == "cuda" and not missing(shape, "triton") else "torch"
    assert config.attention_backend != "native"
    return config.attention_backend


def most_rows_of(config: EngineConfig) -> int:
    """The most rows, or rows of logits, of any step."""
    return most_rows(config.max_num_seqs, config.num_verified_tokens)


def _sizing(
    config: EngineConfig,
    shape: DecoderSpec,
    decoder: TorchDecoder,
    max_model_len: int,
    host_blocks: int,
    states: StateLayout | None,
    *,
    is_async: bool,
) -> CacheSizing:
    """The `CacheSizing` of a model.

    The needs of the largest step are measured on a GPU, and computed on a CPU. Called when `decoder` holds tables for
    `max_model_len` positions, and there is no KV cache yet.
    """
    bytes_per_block = KVCache.bytes_per_block(shape, config.block_size, kv_dtype_of(config, decoder.dtype))
    weights = decoder.weights_bytes()
    if decoder.device.type == "cpu":
        size = config.tensor_parallel_size  # ranks, which share the memory
        step_bytes = partial(decoder.step_bytes, config.num_step_tokens, is_kv_fp8=config.kv_cache_dtype == "fp8")
        return sizing_on_cpu(
            config,
            shape,
            weights=weights * size,
            num_positions=max_model_len,
            activations=lambda length: (
                step_bytes(length) * size + config.num_ranks * recurrent_copies(shape, config.max_num_seqs)
            ),
            bytes_per_block=bytes_per_block * size,
            host_blocks=host_blocks,
            adapters=_adapter_bytes(config, shape, decoder) * size,
            runs_kinds=decoder.runs_kinds,
            states=states,
        )
    return _sizing_on_gpu(
        config, shape, decoder, max_model_len, weights, bytes_per_block, host_blocks, states, is_async
    )


def _sizing_on_gpu(
    config: EngineConfig,
    shape: DecoderSpec,
    decoder: TorchDecoder,
    max_model_len: int,
    weights: int,
    bytes_per_block: int,
    host_blocks: int,
    states: StateLayout | None,
    is_async: bool,
) -> CacheSizing:
    try:
        activations = _peak_step_bytes(config, shape, decoder, max_model_len)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"max_num_batched_tokens = {config.num_step_tokens}: such a step does not fit the memory that the weights "
            f"leave of {decoder.device}; lower it, or choose a smaller model"
        ) from None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(decoder.device)
    if isinstance(decoder, FirstShare):
        free = min(free, decoder.sharing.free_bytes())
    adapters = getattr(decoder, "adapters", None)
    slots = adapters.num_bytes if isinstance(adapters, LoraSlots) else 0  # allocated already
    loaded = weights + tables_bytes(shape, max_model_len) + slots
    has_kernels = backend_name(config, decoder.device, shape) == "triton"
    rows = most_rows_of(config) if is_async else config.max_num_seqs
    chooser = device_sampler_bytes(config.max_num_seqs, shape.vocab_size, rows) if has_kernels else 0

    def needs_of(length: int) -> MemoryNeeds:
        return MemoryNeeds(
            weights=weights,
            state=tables_bytes(shape, length)
            + slot_bytes(config, shape, length)
            + chooser
            + (async_bytes(config, length) if is_async else 0),
            activations=activations,
            graphs=graphs_bytes(config, shape, activations) if is_async else 0,
            logits=_logits_bytes(config, shape.vocab_size, decoder.dtype, rows, is_async=is_async),
            other=max(0, total - free - loaded),
            sampler=sampler_bytes(config, shape, length) + SORTED_BYTES,
            adapters=_adapter_bytes(config, shape, decoder),
            recurrent=0 if states is None else states.num_slots * states.state_bytes,
            snapshots=0 if states is None else states.num_snapshots * states.state_bytes,
        )

    machine = MachineMemory(
        device=str(decoder.device),
        total_bytes=total,
        limit_bytes=total,
        budget_bytes=int(total * config.gpu_memory_utilization),
        host_free_bytes=free_host_share(config),
    )
    return CacheSizing(
        config=config,
        machine=machine,
        needs_of=needs_of,
        bytes_per_block=bytes_per_block,
        host_blocks=host_blocks,
        layout_of=layouts(config, shape, bytes_per_block, runs_kinds=decoder.runs_kinds),
        about_masks=partial(about_masks, shape, runs_kinds=decoder.runs_kinds),
    )


def _peak_step_bytes(config: EngineConfig, shape: DecoderSpec, decoder: TorchDecoder, max_model_len: int) -> int:
    """Runs the largest step on a cache of its own, and measures the memory it takes besides."""
    runner, grant = largest_step(config, shape, decoder, max_model_len)
    torch.cuda.synchronize(decoder.device)
    torch.cuda.reset_peak_memory_stats(decoder.device)
    before = torch.cuda.memory_allocated(decoder.device)
    runner.forward(grant)
    torch.cuda.synchronize(decoder.device)
    return torch.cuda.max_memory_allocated(decoder.device) - before


def largest_step(
    config: EngineConfig, shape: DecoderSpec, decoder: TorchDecoder, max_model_len: int
) -> tuple[ModelRunner, StepGrant]:
    """The largest step, and a runner with a cache for it; of layers of several sizes the kinds share its blocks."""
    grant = largest_grant(config, max_model_len)
    num_blocks, layout = len(grant.table_blocks), None
    if not shape.has_one_shape:
        by_block = KVCache.bytes_per_block(shape, config.block_size, kv_dtype_of(config, decoder.dtype))
        layout = layouts(config, shape, by_block, runs_kinds=True)(2 * num_blocks * by_block, max_model_len)
        assert layout is not None, "missing() refuses others"
        num_blocks = layout.num_blocks[0]
    each = shape.state_bytes(decoder.dtype.itemsize)
    states = StateLayout(each, config.max_num_seqs) if each else None
    runner = make_runner(config, shape, decoder, num_blocks, max_model_len, layout=layout, states=states)
    return runner, with_tables(runner, grant)


def _adapter_bytes(config: EngineConfig, shape: DecoderSpec, decoder: TorchDecoder) -> int:
    """Bytes of the device slots of LoRA adapters; at most, where each takes what its rank needs."""
    adapters = getattr(decoder, "adapters", None)  # none of a decoder through transformers
    if adapters is None:
        return 0
    if isinstance(adapters, LoraSlots):
        return adapters.num_bytes
    return SlotLayout(shape, config.max_lora_rank).num_bytes(config.max_loras, torch.float32.itemsize)


def _logits_bytes(config: EngineConfig, vocab_size: int, dtype: torch.dtype, rows: int, *, is_async: bool) -> int:
    """Bytes of a step's logits at most: of its rows and their drafts, and a piece of its scored prompts beside them."""
    num_sampled = max(rows, config.max_num_seqs + config.num_verified_tokens)
    num_scored = rows_of_a_piece(config.max_num_seqs, vocab_size)
    scored = num_scored * vocab_size * _logit_bytes(dtype, is_async=False)
    return num_sampled * vocab_size * _logit_bytes(dtype, is_async) + scored


def _logit_bytes(dtype: torch.dtype, is_async: bool) -> int:
    """Bytes of one logit: the model's, its copy on an asynchronous device, and others."""
    return dtype.itemsize * (2 if is_async else 1) + LOGIT_COPIES_BYTES

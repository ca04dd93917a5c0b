"""Loads the native backend of a model with packed weights. No torch.

Makes the KV cache and the runner, and measures rates.
"""

from __future__ import annotations

import os
from functools import partial

import numpy as np

from ....kernels.layout.state_layout import StateLayout
from ....kernels.native.cache import NativeCache, NativeStates
from ....kernels.native.model import NativeModel
from ....model.decoder.native_decoder import NativeDecoder, NativeLoraTable, block_bytes
from ....model.decoder.rope import GrowingTables, short_length
from ....model.families.names import EMBEDDING
from ....model.spec import DecoderSpec
from ....runtime.env.cpus import ComputeThreads
from ....runtime.env.log import get_logger
from ....runtime.startup.phases import Phases
from ...config import EngineConfig
from ...device.pooler import Pooler
from ...memory_table import MemoryTable
from ..backend import Backend
from ..cache_size import free_host_bytes, free_host_share, host_blocks_by_kind, num_host_blocks
from ..memory_needs import sizing_on_cpu
from ..rates import measure_rates, measure_token_s, target_ms_for
from ..recurrent_settings import state_layout, within_state_memory
from ..weight_use import weight_use
from .runner import NativeRunner, NativeTokenChooser

log = get_logger("millrace.stages")

# Tokens of KV cache whose memory is touched before its use, where the size of the cache is not configured. Most bursts
# of requests need less, and the margin is refilled after them: 32 requests of 148 to 332 tokens start 41 runs of 256.
# With 8,192, such a burst took 0.03 s longer, of 4.7 s (two cores of a Zen 4 class EPYC, SmolLM2-135M's shape, whose
# 12,288 tokens are 270 MiB; of Qwen3-0.6B's shape they are 1.3 GiB).
TOKENS_AHEAD = 12288


def load_natively(
    config: EngineConfig,
    model: NativeModel,
    shape: DecoderSpec,
    max_model_len: int,
    phases: Phases,
    threads: ComputeThreads,
    packing: str = "",
) -> Backend:
    """Makes the backend of a model that has its weights, in `packing` if it keeps their codes.

    Raises `ConfigError` if the KV cache does not fit.
    """
    sizes, cache_dtype = model.shape, model.cache_dtype
    item_size = 4 if model.dtype == "float32" else 2
    config = within_state_memory(config, shape, item_size, free_host_share(config))
    weights = model.weights
    adapters = NativeLoraTable(model, config.max_loras, config.max_lora_rank) if config.enable_lora else None
    with phases("cache"):
        bytes_per_block = sizes.bytes_per_block(config.block_size, cache_dtype)
        pool_blocks = num_host_blocks(config, bytes_per_block, max_model_len, "cpu")
        states, host_blocks = state_layout(config, shape, item_size, bytes_per_block, pool_blocks, max_model_len)
        most_logits = config.max_num_seqs * (1 + config.num_speculative_tokens)
        most_tokens = config.num_step_tokens
        # a step of which every token has logits needs other buffers than one of which only some have
        logits_counts = (min(most_tokens - 1, most_logits), min(most_tokens, most_logits))
        activations = max(model.step_bytes(most_tokens, num_logits) for num_logits in logits_counts)
        is_chained = config.async_scheduling and model.step_thread_id > 0
        of_chain = config.max_num_seqs * shape.vocab_size * 4 if is_chained else 0  # its own logits
        sizing = sizing_on_cpu(
            config,
            shape,
            weights=weights.num_bytes + weights.screen_bytes,
            num_positions=model.max_positions,
            activations=lambda _: activations + of_chain,
            bytes_per_block=bytes_per_block,
            host_blocks=pool_blocks if host_blocks else 0,
            runs_kinds=NativeDecoder.runs_kinds,
            states=states,
            of_layer=block_bytes(config.block_size, cache_dtype),
        )
        memory = sizing.plan(max_model_len)
        num_short = short_length(shape.ropes, memory.max_model_len)
        positions = GrowingTables(shape.ropes, memory.max_model_len)
        model.set_positions(positions.tables, num_short + memory.max_model_len)
        runner = NativeRunner(
            model,
            cache := _make_cache(config, model, memory, states),
            np.zeros(config.max_num_seqs, np.int64),
            -(-memory.max_model_len // config.block_size),
            by_kind := host_blocks_by_kind(memory, host_blocks),
            Pooler(np.zeros((config.max_num_seqs, shape.hidden_size), np.float32)),
            num_short,
            adapters,
            positions,
        )
    phases.progress.begin("probe")
    with phases("rates"):
        rates = measure_rates(runner, config, memory.max_model_len, by_kind[0], phases.clock) if by_kind[0] else None
        target_ms = config.itl_target_ms
        if target_ms is None:
            token_s = rates.compute_s if rates else measure_token_s(runner, config, memory.max_model_len, phases.clock)
            target_ms = target_ms_for(token_s)
            log.info("itl_target.chosen", ms=round(target_ms, 1), us_a_prompt_token=round(1e6 * token_s, 1))
    own_cpu = threads.pinned[0] if threads.pinned else None
    return Backend(
        runner=runner,
        backend="native",
        device="cpu",
        dtype=model.dtype,
        quantization=config.quantized_to or (packing if weights.formats else None),
        weights=weight_use(
            shape, weights.num_bytes, _embedding_bytes(model), weights.num_bytes - weights.num_token_bytes
        ),
        kv_cache_dtype=cache_dtype,
        max_model_len=memory.max_model_len,
        memory=memory,
        num_host_blocks=by_kind[0],
        num_more_host_blocks=by_kind[1:],
        max_num_batched_tokens=config.num_step_tokens,
        itl_target_ms=target_ms,
        rates=rates,
        states=states,
        chooser=partial(NativeTokenChooser, model=model, runner=runner if config.async_scheduling else None),
        call_before_computing=model.call_before_steps,
        enter=partial(_enter, cache, None if model.step_thread_id else own_cpu),
        own_cpu=own_cpu,
        adapter_dtypes=("bfloat16",) if model.dtype == "float32" else (),
        prepare_adapter=None if adapters is None else adapters.prepare,
    )


def _make_cache(
    config: EngineConfig, model: NativeModel, memory: MemoryTable, layout: StateLayout | None
) -> NativeCache:
    states = None if layout is None else NativeStates(model.shape, layout, model.dtype)
    ahead = (_blocks_ahead(config, memory), free_host_bytes, states)
    if memory.layout is not None:
        return NativeCache(model.shape, memory.layout, model.cache_dtype, *ahead)
    return NativeCache.uniform(model.shape, memory.num_blocks, config.block_size, model.cache_dtype, *ahead)


def _embedding_bytes(model: NativeModel) -> float:
    name, shape, weights = f"{EMBEDDING}.weight", model.shape, model.weights
    if name in weights.formats:
        bits = weights.formats[name].bits_per_weight(shape.hidden_size)
    else:
        bits = {"float32": 32, "bfloat16": 16, "int8": 8}[weights.type_of(name)]
    return shape.vocab_size * shape.hidden_size * bits / 8


def _blocks_ahead(config: EngineConfig, memory: MemoryTable) -> int:
    """Blocks to touch in advance: all of a cache of configured size, else at most a quarter."""
    if config.kv_cache_bytes is not None or config.num_gpu_blocks is not None:
        return memory.num_blocks
    return min(-(-TOKENS_AHEAD // config.block_size), memory.num_blocks // 4)


def _enter(cache: NativeCache, own_cpu: int | None) -> None:
    """The first call on the device thread, when everything is loaded.

    Without a step thread in the library, the device thread computes, and is pinned to its own CPU. Otherwise it is not
    pinned: keeping it off the step thread's core made steps slower.
    """
    cache.ahead.start()
    if own_cpu is not None:
        os.sched_setaffinity(0, {own_cpu})

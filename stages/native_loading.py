"""The steps of a model by the native library: weights packed from the mapped file, cache and runner. No torch."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from ..kernels.native.cache import NativeCache
from ..kernels.native.errors import NonFiniteError
from ..kernels.native.machine import instruction_sets
from ..kernels.native.model import GROUP_SIZE, NativeModel
from ..kernels.native.neighbours import Neighbours
from ..kernels.native.shape import CacheDType, DType
from ..model.config import ModelConfig
from ..model.errors import CheckpointError
from ..model.expected import expected_shapes, open_source
from ..model.native_decoder import native_shape
from ..model.rope import rope_tables
from ..runtime.cpus import ComputeThreads, idle_ns
from ..runtime.log import get_logger
from .computing import Computing
from .config import EngineConfig
from .measuring import check_room_for_weights, sizing_on_cpu
from .memory import MemoryTable
from .native_stepping import NativeChoosing, NativeRunner
from .phases import Phases
from .pooler import Pooler
from .sizing import free_host_bytes, num_host_blocks
from .step_size import target_ms_for
from .trials import measure_rates, measure_token_s

log = get_logger("millrace.stages")

# Whose memory is taken before it is used, where the cache is as large as what is free allows. A burst of requests is
# shorter, most often, and what it takes is made up for after it: 32 at once, with 148 to 332 tokens each, begin 41 runs
# of 256. With 8,192 taken, a burst of these took 0.03 s more of 4.7 (two cores of a Zen 4 class EPYC, SmolLM2-135M's
# shape, whose 12,288 tokens are 270 MiB; of Qwen3-0.6B's shape they are 1.3 GiB).
TOKENS_AHEAD = 12288

# bytes of a number, in int4 with its share of a scale
ITEM_SIZES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / GROUP_SIZE}


def load_natively(
    config: EngineConfig, root: Path, shape: ModelConfig, max_model_len: int, phases: Phases, threads: ComputeThreads
) -> Computing:
    """Loads the checkpoint in `root`. Raises as `load_model` does, `NativeUnavailableError` where the library can not
    be had, and `UnsupportedModelError` for a model that it does not compute."""
    dtype = cast(DType, config.dtype_of(shape.dtype))
    assert config.kv_cache_dtype != "fp8", "whoever chose the native step saw that"
    cache_dtype: CacheDType = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    sizes = native_shape(shape)
    with phases("library"):
        cos, sin = rope_tables(shape.rope, max_model_len)
        model = NativeModel(
            sizes,
            dtype,
            cos,
            sin,
            quantization=config.quantization,
            cache_dtype=cache_dtype,
            num_threads=threads.count,
            cpus=threads.pinned,
            neighbours=Neighbours(
                threads.count,
                partial(_log_threads, threads.count),
                idle_ns=partial(idle_ns, threads.pinned) if threads.pinned else lambda: None,
            ),
        )
    log.info("instructions.chosen", name=model.instruction_set, machine_has=list(instruction_sets()))
    with phases("weights"):
        check_room_for_weights(
            shape, config.quantization or dtype, partial(_item_size, model), "cpu", free_host_bytes()
        )
        _fill(model, root, shape, config.load_format)
        _code(model)
    with phases("cache"):
        bytes_per_block = sizes.bytes_per_block(config.block_size, cache_dtype)
        host_blocks = num_host_blocks(config, bytes_per_block, max_model_len, "cpu")
        most_logits = config.max_num_seqs * (1 + config.num_speculative_tokens)
        most_tokens = config.num_step_tokens
        asked = (min(most_tokens - 1, most_logits), min(most_tokens, most_logits))  # not all of them, or perhaps all
        activations = max(model.step_bytes(most_tokens, num_asked) for num_asked in asked)
        is_chained = config.async_scheduling and model.line_thread > 0
        of_chain = config.max_num_seqs * shape.vocab_size * 4 if is_chained else 0  # its logits, beside those of others
        sizing = sizing_on_cpu(
            config,
            shape,
            max_model_len,
            weights=model.weights_bytes + model.screen_bytes,
            activations=lambda _: activations + of_chain,
            bytes_per_block=bytes_per_block,
            host_blocks=host_blocks,
        )
        memory = sizing.plan(max_model_len)
        if memory.max_model_len < max_model_len:  # auto
            model.set_positions(*rope_tables(shape.rope, memory.max_model_len))
        runner = NativeRunner(
            model,
            cache := NativeCache(
                sizes, memory.num_blocks, config.block_size, cache_dtype, _blocks_ahead(config, memory), free_host_bytes
            ),
            np.zeros(config.max_num_seqs, np.int64),
            -(-memory.max_model_len // config.block_size),
            host_blocks,
            Pooler(np.zeros((config.max_num_seqs, shape.hidden_size), np.float32)),
        )
    with phases("rates"):
        rates = measure_rates(runner, config, memory.max_model_len, host_blocks, phases.clock) if host_blocks else None
        target_ms = config.itl_target_ms
        if target_ms is None:
            token_s = rates.compute_s if rates else measure_token_s(runner, config, memory.max_model_len, phases.clock)
            target_ms = target_ms_for(token_s)
            log.info("itl_target.chosen", ms=round(target_ms, 1), us_a_prompt_token=round(1e6 * token_s, 1))
    own_cpu = threads.pinned[0] if threads.pinned else None
    return Computing(
        runner=runner,
        backend="native",
        device="cpu",
        dtype=dtype,
        quantization=config.quantization,
        kv_cache_dtype=cache_dtype,
        max_model_len=memory.max_model_len,
        memory=memory,
        num_host_blocks=host_blocks,
        max_num_batched_tokens=config.num_step_tokens,
        itl_target_ms=target_ms,
        rates=rates,
        choosing=partial(NativeChoosing, model=model, runner=runner if config.async_scheduling else None),
        call_before_computing=model.call_before_steps,
        enter=partial(_enter, cache, None if model.line_thread else own_cpu),
        own_cpu=own_cpu,
    )


def _item_size(model: NativeModel, name: str) -> float:
    """Bytes of a number of that tensor."""
    return ITEM_SIZES[model.type_of(name)] + ITEM_SIZES["int8"] * model.has_screen(name)


def _blocks_ahead(config: EngineConfig, memory: MemoryTable) -> int:
    """All that somebody has set aside for the cache; of one that takes its share of what is free, a quarter at most."""
    if config.kv_cache_bytes is not None or config.num_gpu_blocks is not None:
        return memory.num_blocks
    return min(-(-TOKENS_AHEAD // config.block_size), memory.num_blocks // 4)


def _enter(cache: NativeCache, own_cpu: int | None) -> None:
    """What the device thread does first: all is loaded. Where the model has no thread of its own it computes, on its
    own CPU; else it is wherever there is room: kept off that one's core, W3 took 4 % longer."""
    cache.ahead.start()
    if own_cpu is not None:
        os.sched_setaffinity(0, {own_cpu})


def _log_threads(num_threads: int, limit: int, num_lost: float) -> None:
    log.info("threads.changed", threads=limit, of=num_threads, cores_others_had=round(num_lost, 2))


def _fill(model: NativeModel, root: Path, shape: ModelConfig, load_format: str) -> None:
    """Packs each tensor from the map, and lets its pages go: at no time are there two copies of the model."""
    source = open_source(root, shape, load_format)
    for name in expected_shapes(shape):
        try:
            model.set_tensor(name, source.array(name))
        except NonFiniteError as error:
            raise CheckpointError(str(error)) from None
        source.forget(name)


def _code(model: NativeModel) -> None:
    """Makes the weights smaller, where that loses nothing; what there is no memory for stays as it is."""
    before = model.weights_bytes
    try:
        model.code_weights()
    except MemoryError as error:
        log.warning("weights.not_coded", reason=str(error))
    if model.weights_bytes < before:
        log.info("weights.coded", weights_mib=round(model.weights_bytes / 2**20, 1), of_mib=round(before / 2**20, 1))

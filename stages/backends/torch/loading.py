"""Loads the torch backend: weights, KV cache, runner, measured rates. Imports torch.

It computes on a GPU, or on a CPU if the native backend does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ....kernels import kernel_set
from ....model.backend_gaps import missing
from ....model.checkpoint.tensor_shapes import expected_shapes, open_source
from ....model.decoder.decoder import Decoder
from ....model.decoder.emulated_shards import emulated
from ....model.decoder.experts import coded_item_sizes
from ....model.decoder.lora_linear import LoraTable
from ....model.decoder.lora_slots import LoraSlots
from ....model.decoder.weights import DecoderWeights, load_weights
from ....model.sharding.layer_split import split_layers
from ....model.sharding.rank_grid import RankGrid
from ....model.sharding.shard import RankShare, spec_of
from ....model.spec import DecoderSpec
from ....runtime.device_streams.interface import DeviceStreams
from ....runtime.env.cpus import ComputeThreads
from ....runtime.env.log import get_logger
from ....runtime.processes.order_line import LineEnded
from ....runtime.startup.load_progress import LoadProgress
from ....runtime.startup.phases import Phases
from ...config import EngineConfig
from ...device.device_guard import first_line, is_out_of_memory
from ...engine_settings import ModelImpl
from ...errors import ConfigError
from ...execute.model_runner import ModelRunner
from ...outputs import WeightUse
from ...sample.sampler import Sampler
from ...sample.token_chooser import MakeTokenChooser, TokenChooser
from ..backend import Backend
from ..cuda.step_update import EndRules
from ..memory_needs import layouts
from ..merged_adapters import merging_of
from ..rates import measure_rates, measure_token_s
from ..recurrent_settings import within_state_memory
from ..weight_use import num_idle_weights, weight_use
from ..weights_fit import WeightsFit, bytes_kept, least_cache_bytes, smaller_forms
from .fitted_runner import backend_name, fit_runner, free_bytes, most_rows_of
from .kv_dtype import check_kv_dtype
from .layer_leader import LayerLeader
from .leading import Leader
from .ranks import StartingRanks, check_ranks, probe_ranks, ranks_not_started
from .share import load_share, with_adapter_places
from .share_leader import ShareLeader
from .tilings import log_products, tilings_of

if TYPE_CHECKING:
    from ....model.fallback.transformers_decoder import TransformersDecoder  # which imports transformers
    from ..cuda.build import AsyncRuntime

    TorchDecoder = Decoder | TransformersDecoder

log = get_logger("millrace.stages")


def load_on_torch(
    config: EngineConfig,
    root: Path,
    shape: DecoderSpec,
    max_model_len: int,
    phases: Phases,
    threads: ComputeThreads,
    streams: DeviceStreams | None = None,
) -> Backend:
    """Loads the checkpoint in `root`. Raises as `load_model` does.

    `streams` replace the device's own, in tests.
    """
    device = choose_device(config, threads)
    kernels = _load_kernels(config, device, shape)
    _check_backend(config, device, kernels.name)
    check_gaps(shape, kernels.name)
    if config.num_ranks > 1:
        return _load_over_ranks(config, root, shape, max_model_len, phases, threads, device, kernels)
    if shape.recurrent_layers:
        config = _for_states(config, shape, device)
    streams = _streams(config, streams, device, kernels.name)
    tilings = tilings_of(config, device, kernels.name)
    phases.progress.begin("read")
    with phases("weights"):
        make_decoder = partial(
            _load_weights(
                config, root, shape, device, kernels, phases.progress, max_model_len, is_async=streams is not None
            ),
            tilings=tilings,
        )
    backend = make_backend(config, shape, make_decoder, max_model_len, device, kernels, phases, streams)
    log_products(tilings, backend.runner.decoder)
    return backend


def check_gaps(shape: DecoderSpec, backend: kernel_set.BackendName) -> None:
    """Raises `ConfigError` for a model that these kernels lack something of, with the setting that serves it."""
    if gaps := missing(shape, backend):
        others = "" if backend == "torch" or missing(shape, "torch") else "; use attention_backend = torch"
        raise ConfigError(f"{shape.family}: attention_backend = {backend} lacks {', '.join(gaps)}{others}")


def _for_states(config: EngineConfig, shape: DecoderSpec, device: torch.device) -> EngineConfig:
    """The settings of a model with recurrent layers, with as many sequences as their states leave room for."""
    item_size = torch_dtype(config, shape.dtype).itemsize
    left = free_bytes(config, device) - bytes_kept(shape, lambda _: item_size)
    return within_state_memory(config, shape, item_size, max(0, left), device.type)


def _load_over_ranks(
    config: EngineConfig,
    root: Path,
    shape: DecoderSpec,
    max_model_len: int,
    phases: Phases,
    threads: ComputeThreads,
    device: torch.device,
    kernels: kernel_set.KernelSet,
) -> Backend:
    """As `load_on_torch`, with a share of the model here and the others on other ranks. Steps are waited for."""
    check_ranks(config, shape, device)
    if shape.recurrent_layers:
        config = _for_states(config, shape, device)
    grid = RankGrid(config.pipeline_parallel_size, config.tensor_parallel_size)
    ranges = split_layers(shape, grid.num_ranges) if grid.num_ranges > 1 else None
    own = None if ranges is None else ranges[-1]
    lead: Callable[..., Leader] = ShareLeader if ranges is None else partial(LayerLeader, ranges, grid)
    _check_fit(config, shape, torch_dtype(config, shape.dtype), max_model_len, device, free_bytes(config, device))
    tilings = tilings_of(config, device, kernels.name)
    phases.progress.begin("read")
    with phases("weights"):
        starting = StartingRanks(config, root, shape, device, threads, ranges)
        try:
            share = grid.share_of(0)
            spec, parts, options = load_share(config, root, shape, share, device, kernels, phases.progress, own)
        except BaseException:
            starting.close()
            raise
    phases.progress.begin("join")
    with phases("ranks"):
        try:
            leader = starting.join(lead)
        except BaseException:
            starting.close()
            raise
    try:
        make_decoder = partial(leader.make_decoder, spec, *parts, tilings=tilings, **options)
        sized = shape if share.size == 1 else spec_of(shape, share)  # blocks are of all layers
        backend = make_backend(config, sized, make_decoder, max_model_len, device, kernels, phases)
        log_products(tilings, backend.runner.decoder)
        if backend.rates is None:  # from which the time of a step is expected
            measure_token_s(backend.runner, config, backend.max_model_len, phases.clock)
    except LineEnded as error:
        leader.close()
        raise ranks_not_started(config, error) from None
    except BaseException:
        leader.close()
        raise
    leader.line.serving()
    return replace(
        backend,
        weights=_weight_use(shape, torch_dtype(config, shape.dtype)),
        probe=probe_ranks(leader.line, backend.probe),
        watch=lambda call_back: leader.line.on_end.append(lambda cause: call_back()),
        prepare_adapter=None,  # each rank packs its own share
        close=leader.close,
    )


def make_backend(
    config: EngineConfig,
    shape: DecoderSpec,
    make_decoder: Callable[..., TorchDecoder],
    max_model_len: int,
    device: torch.device,
    kernels: kernel_set.KernelSet,
    phases: Phases,
    streams: DeviceStreams | None = None,
    model_impl: ModelImpl = "millrace",
) -> Backend:
    """A backend whose weights are loaded: sizes the cache, and measures.

    `make_decoder(max_positions=...)` makes a decoder with these weights.
    """
    phases.progress.begin("probe")
    with phases("cache"):
        is_async = streams is not None
        runner, memory, host_blocks = fit_runner(config, shape, make_decoder, max_model_len, device, is_async=is_async)
        max_model_len = memory.max_model_len
    with phases("rates"):
        rates = measure_rates(runner, config, max_model_len, host_blocks[0], phases.clock) if host_blocks[0] else None
    dtype = name_of(torch_dtype(config, shape.dtype))
    adapters = getattr(runner.decoder, "adapters", None)  # none of a decoder through transformers
    return Backend(
        runner=runner,
        backend=kernels.name,
        model_impl=model_impl,
        device=str(device),
        dtype=dtype,
        quantization=None,
        weights=_weight_use(shape, torch_dtype(config, shape.dtype)) if model_impl == "millrace" else None,
        kv_cache_dtype=dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        max_model_len=max_model_len,
        memory=memory,
        num_host_blocks=host_blocks[0],
        num_more_host_blocks=host_blocks[1:],
        max_num_batched_tokens=config.num_step_tokens,
        itl_target_ms=config.itl_target_ms or 0.0,
        rates=rates,
        states=None if runner.states is None else runner.states.layout,
        chooser=_choosing(config, kernels.name, is_async=is_async),
        probe=probe_of(device),
        enter=partial(torch.cuda.set_device, device) if device.type == "cuda" else None,
        adapter_dtypes=("float32", "bfloat16", "float16") if isinstance(adapters, LoraTable) else (),
        prepare_adapter=adapters.prepare if isinstance(adapters, LoraSlots) else None,
        assemble=None if streams is None else partial(_assemble, streams, runner, config, phases.clock),
    )


def _load_kernels(config: EngineConfig, device: torch.device, shape: DecoderSpec) -> kernel_set.KernelSet:
    """The kernels of the configured backend. Raises `ConfigError` where they cannot run."""
    try:
        kernels = kernel_set.load(backend_name(config, device, shape))
    except kernel_set.BackendUnavailableError as error:
        raise ConfigError(str(error)) from None
    if kernels.name == "triton" and device.type == "cpu":
        from ....kernels.triton.launch import IS_INTERPRETED

        if not IS_INTERPRETED:
            message = "its kernels run on a GPU; use device = cuda, or attention_backend = auto"
            raise ConfigError(f"attention_backend = triton with device = cpu: {message}")
    return kernels


def _check_backend(config: EngineConfig, device: torch.device, kernels: kernel_set.BackendName) -> None:
    """Raises `ConfigError` for settings that these kernels do not support."""
    check_kv_dtype(config, device, kernels)
    if config.deterministic and kernels != "triton":
        raise ConfigError(
            f"deterministic = True: attention_backend = {kernels} may sum in another order in another batch; use "
            "triton, on a GPU"
        )


def _load_weights(
    config: EngineConfig,
    root: Path,
    shape: DecoderSpec,
    device: torch.device,
    kernels: kernel_set.KernelSet,
    progress: LoadProgress | None = None,
    max_model_len: int = 1,
    *,
    is_async: bool = False,
) -> Callable[..., Decoder]:
    """Loads the checkpoint's weights. Returns a function that makes decoders with them."""
    dtype = torch_dtype(config, shape.dtype)
    free = free_bytes(config, device)
    item_size = _item_size(config, root, shape, dtype, kernels.name)
    _check_fit(config, shape, dtype, max_model_len, device, free, item_size)
    load = partial(
        load_weights,
        root,
        shape,
        device,
        dtype,
        load_format=config.load_format,
        progress=progress,
        is_batch_invariant=config.deterministic,
        stacks_experts=kernels.name == "triton",
        free_bytes=free,
        change=merging_of(config),
    )
    weights = load() if config.emulate_tp == 1 else _emulated(config, shape, load, device)
    parts, options = with_adapter_places(config, shape, weights, kernels, is_async=is_async)
    return partial(Decoder, shape, *parts, **options)


def _emulated(
    config: EngineConfig, shape: DecoderSpec, load: Callable[..., DecoderWeights], device: torch.device
) -> DecoderWeights:
    """The weights in the pieces of the ranks that `emulate_tp` counts."""
    size = config.emulate_tp
    check_ranks(replace(config, emulate_tp=1, tensor_parallel_size=size), shape, torch.device("cpu"))
    log.warning("ranks.emulated", size=size, device=str(device))
    return emulated(shape, [load(shard=RankShare(rank, size)) for rank in range(size)])


def _item_size(
    config: EngineConfig, root: Path, shape: DecoderSpec, dtype: torch.dtype, kernels: kernel_set.BackendName
) -> Callable[[str], float]:
    """Bytes of a number of a tensor on the device: experts stay in the codes of their file where kernels take them."""
    coded = dict[str, float]()
    if kernels == "triton" and shape.mixtures and config.load_format != "dummy":
        source, spec = open_source(root, shape, config.load_format, merging_of(config))
        coded = coded_item_sizes(source, spec)
    return lambda name: coded.get(name, dtype.itemsize)


def _check_fit(
    config: EngineConfig,
    shape: DecoderSpec,
    dtype: torch.dtype,
    max_model_len: int,
    device: torch.device,
    free: int,
    item_size: Callable[[str], float] | None = None,
) -> None:
    """Raises `ConfigError`, before loading, if weights and the least cache are larger than the free memory.

    `item_size`: bytes of a number of a tensor; None: the same of all. On a CPU these are of all ranks, which share its
    memory; on a GPU of the first.
    """
    shards = [RankShare(rank, config.tensor_parallel_size) for rank in range(config.tensor_parallel_size)]
    shards = shards if device.type == "cpu" else shards[:1]
    item_size = item_size or (lambda _: dtype.itemsize)
    weights, form = sum(bytes_kept(shape, item_size, shard) for shard in shards), name_of(dtype)
    if config.pipeline_parallel_size > 1 and shape.head.is_tied:  # the first and the last rank have it
        weights += shape.vocab_size * shape.hidden_size * dtype.itemsize
    of_rank = shape if config.tensor_parallel_size == 1 else spec_of(shape, shards[0])
    cached = len(shards) * of_rank.cached_numbers  # bytes of a token
    cached *= 1 if config.kv_cache_dtype == "fp8" else dtype.itemsize
    by_block, runs_kinds = cached * config.block_size, Decoder.runs_kinds and config.num_ranks == 1
    fit = WeightsFit(
        name="",
        device=str(device),
        form=form,
        weights=weights,
        cache=least_cache_bytes(
            config, by_block, max_model_len, layouts(config, shape, by_block, runs_kinds=runs_kinds)
        ),
        free=free,
        others=smaller_forms(form, weights, "", dtype.itemsize),
        num_engines=config.data_parallel_size if device.type == "cpu" else 1,
    )
    fit.check()
    log.info("memory.fit", **fit.to_event())


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype in settings."""
    return str(dtype).removeprefix("torch.")


def _streams(
    config: EngineConfig, given: DeviceStreams | None, device: torch.device, kernels: kernel_set.BackendName
) -> DeviceStreams | None:
    """The streams of an asynchronous device; None: the device thread waits for each step."""
    if not config.async_scheduling or given is not None or device.type != "cuda" or kernels != "triton":
        return given if config.async_scheduling else None
    from ..cuda.cuda_streams import CudaStreams

    return CudaStreams(device)


def _assemble(
    streams: DeviceStreams,
    runner: ModelRunner,
    config: EngineConfig,
    clock: Callable[[], float],
    sampler: Sampler,
    ends: EndRules,
) -> AsyncRuntime:
    from ..cuda.build import assemble

    try:
        return assemble(streams, runner, sampler, config, ends, clock)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"gpu_memory_utilization = {config.gpu_memory_utilization}: the memory of {runner.last_tokens.device} ran "
            f"out for the buffers of steps ({first_line(error)}); lower it, or kv_cache_bytes or num_gpu_blocks if set"
        ) from None


def _choosing(config: EngineConfig, kernels: kernel_set.BackendName, *, is_async: bool) -> MakeTokenChooser:
    if kernels != "triton" and not is_async:
        return TokenChooser
    from ..cuda.triton_chooser import TritonTokenChooser

    num_rows = most_rows_of(config) if is_async else config.max_num_seqs
    return partial(TritonTokenChooser, kernels=kernel_set.load_sampling(kernels), num_rows=num_rows)


def choose_device(config: EngineConfig, threads: ComputeThreads) -> torch.device:
    """The configured GPU or the first, unless there is none or the CPU is configured.

    It becomes the calling thread's current GPU; other threads choose it themselves. Raises `ConfigError` for a missing
    GPU.
    """
    has_cuda = torch.cuda.is_available()
    if config.gpu is not None and not has_cuda:
        raise ConfigError(
            f"device = {config.device}: torch sees no CUDA device; use device = cpu, or install a driver and torch+cu"
        )
    if config.threads is not None or threads.count < torch.get_num_threads():
        torch.set_num_threads(threads.count)  # NOTE: for the whole process; torch has no other setting
    if not has_cuda or config.device == "cpu":
        return torch.device("cpu")
    index, num_gpus = config.gpu or 0, torch.cuda.device_count()
    if index >= num_gpus:
        raise ConfigError(
            f"device = {config.device}: torch sees {num_gpus} CUDA device(s), the last is cuda:{num_gpus - 1}"
        )
    torch.cuda.set_device(index)  # kernels are launched on the current one
    return torch.device("cuda", index)


def probe_of(device: torch.device) -> Callable[[], object] | None:
    """Finds out whether a device is lost, see `DeviceGuard`; None for a CPU, which cannot be."""
    if device.type != "cuda":
        return None
    from ..cuda.cuda_probe import CudaProbe

    return CudaProbe(device)


def torch_dtype(config: EngineConfig, own: str) -> torch.dtype:
    """The dtype of the weights; `own` is the checkpoint's."""
    dtype = getattr(torch, config.dtype_of(own))
    assert isinstance(dtype, torch.dtype)
    return dtype


def _weight_use(shape: DecoderSpec, dtype: torch.dtype) -> WeightUse:
    """Of numbers in one dtype."""
    num_weights = sum(map(math.prod, expected_shapes(shape).values()))
    embedding, size = shape.vocab_size * shape.hidden_size, dtype.itemsize
    return weight_use(shape, num_weights * size, embedding * size, num_idle_weights(shape) * size)

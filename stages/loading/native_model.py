"""The weights of the native library: whether they fit the memory, and packing them. Does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from ...kernels.native import build
from ...kernels.native.errors import NativeUnavailableError, NonFiniteError, UnsupportedModelError
from ...kernels.native.loading import choose_instruction_set
from ...kernels.native.machine import instruction_sets
from ...kernels.native.model import GROUP_SIZE, NativeModel
from ...kernels.native.shape import CacheDType, DType
from ...kernels.native.thread_throttle import ThreadThrottle
from ...kernels.native.weights import NativeWeights
from ...model.checkpoint.counted_tensors import CountedTensors
from ...model.checkpoint.tensor_shapes import TensorSource, expected_shapes
from ...model.decoder.native_decoder import NativeDecoder, block_bytes, native_shape
from ...model.decoder.rope import rope_tables
from ...model.errors import CheckpointError
from ...model.gguf.siblings import local_siblings
from ...model.grouped_matrix import UNPACKED_AT_ONCE
from ...model.spec import DecoderSpec
from ...runtime.env.cpus import ComputeThreads, idle_ns
from ...runtime.env.log import get_logger
from ...runtime.startup.phases import Phases
from ..backends.cache_size import free_host_share, total_host_bytes
from ..backends.memory_needs import layouts
from ..backends.weights_fit import WeightsFit, bytes_kept, least_cache_bytes, smaller_forms
from ..config import EngineConfig
from .packed_weights import PackedWeights, packed_weights

log = get_logger("millrace.stages")

COPY_BYTES = 8  # of a number of a tensor that is unpacked or changed before the library takes it: two forms of it
ROW_COPY_BYTES = 16  # of a number of rows that are unpacked: four forms of it
MOST_GROWTH = 1.5  # of a packed file's weights in memory, for files of other sizes to make a difference
PACKED_AT_ONCE = 8 << 20  # codes
CALL_BYTES = 256 << 20  # that are packed in one call of the library; progress is told after each

# Bytes of a number; for int4 including its share of a scale.
ITEM_SIZES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / GROUP_SIZE}


def load_native_model(
    config: EngineConfig,
    root: Path,
    source: TensorSource,
    shape: DecoderSpec,
    max_model_len: int,
    threads: ComputeThreads,
    phases: Phases,
    when_packing: Callable[[], None],
) -> NativeModel | str:
    """The native model with its weights, or the reason why it cannot run on this machine.

    Calls `when_packing` before the weights are packed. Raises `ConfigError` if they do not fit the memory, and
    `CheckpointError`.
    """
    try:
        if config.load_format == "dummy":  # no file has limited the sizes
            _check_least_memory(config, shape)
        with phases("library"):
            _tell_compilation(phases)
            packed = packed_weights(source, expected_shapes(shape), native_shape(shape), config.quantization)
            model = _make_native_model(config, shape, threads, packed)
            packed.tell(model.weights.quantization or model.dtype)
        log.info("instructions.chosen", name=model.instruction_set, machine_has=list(instruction_sets()))
        with phases("weights"):
            _check_fit(config, root, source, model, shape, max_model_len, packed)
            when_packing()
            phases.progress.begin("read")
            counted = CountedTensors(source, expected_shapes(shape), phases.progress)
            _fill(model.weights, counted, expected_shapes(shape), packed)
            phases.progress.begin("pack")
            _code(model.weights)
        return model
    except (NativeUnavailableError, UnsupportedModelError) as error:
        return str(error)


def _tell_compilation(phases: Phases) -> None:
    """Tells that the native library is about to be compiled, if it is: that takes a minute on few cores."""
    name = choose_instruction_set()
    if not build.is_ready(name):
        phases.progress.begin("compile")
        log.info("native_library.compiling", instruction_set=name)


def native_fit(
    config: EngineConfig,
    root: Path,
    source: TensorSource,
    shape: DecoderSpec,
    max_model_len: int,
    threads: ComputeThreads,
) -> WeightsFit | str:
    """What loading the model would need of the memory, or the reason why it cannot run on this machine.

    Reads no weights. Raises as `load_native_model` does.
    """
    try:
        packed = packed_weights(source, expected_shapes(shape), native_shape(shape), config.quantization)
        model = _make_native_model(config, shape, threads, packed)
    except (NativeUnavailableError, UnsupportedModelError) as error:
        return str(error)
    return _check_fit(config, root, source, model, shape, max_model_len, packed)


def _make_native_model(
    config: EngineConfig, shape: DecoderSpec, threads: ComputeThreads, packed: PackedWeights
) -> NativeModel:
    """A native model without weights, and with rotary tables for one position until its length is known.

    Raises `NativeUnavailableError` and `UnsupportedModelError`.
    """
    return NativeModel(
        native_shape(shape),
        cast(DType, config.dtype_of(shape.dtype)),
        [rope_tables(rope, 1) for rope in shape.ropes],
        1,
        quantization=config.quantized_to,
        formats=packed.formats,
        cache_dtype=_native_cache_dtype(config, shape),
        num_threads=threads.count,
        cpus=threads.pinned,
        thread_throttle=ThreadThrottle(
            threads.count,
            partial(_log_threads, threads.count),
            idle_ns=partial(idle_ns, threads.pinned) if threads.pinned else lambda: None,
        ),
    )


def _native_cache_dtype(config: EngineConfig, shape: DecoderSpec) -> CacheDType:
    """The dtype of keys and values."""
    assert config.kv_cache_dtype != "fp8", "the native backend is not chosen for an fp8 cache"
    return cast(DType, config.dtype_of(shape.dtype)) if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def _log_threads(num_threads: int, limit: int, num_lost: float) -> None:
    log.info("threads.changed", threads=limit, of=num_threads, cores_others_had=round(num_lost, 2))


def _check_least_memory(config: EngineConfig, shape: DecoderSpec) -> None:
    """Raises `ConfigError` if the weights cannot fit the free memory, whatever the library adds to them."""
    form = config.quantized_to or config.dtype_of(shape.dtype)
    weights = bytes_kept(shape, lambda _: ITEM_SIZES[form])
    others = smaller_forms(form, weights, "cpu", ITEM_SIZES[form])
    fit = WeightsFit(
        name="",
        device="cpu",
        form=form,
        weights=weights,
        free=free_host_share(config),
        others=others,
        num_engines=config.data_parallel_size,
    )
    fit.check()


def _check_fit(
    config: EngineConfig,
    root: Path,
    source: TensorSource,
    model: NativeModel,
    shape: DecoderSpec,
    max_model_len: int,
    packed: PackedWeights,
) -> WeightsFit:
    """Raises `ConfigError`, before loading, for a model that does not fit the free memory. Logs what would."""

    def item_size(name: str) -> float:
        if matrix := packed.matrices.get(name):
            return matrix.format.bits_per_weight(matrix.num_columns) / 8
        return ITEM_SIZES[model.weights.type_of(name)] + ITEM_SIZES["int8"] * model.weights.has_screen(name)

    form = packed.packing if packed.matrices else model.weights.quantization or model.dtype
    weights = bytes_kept(shape, item_size)
    is_plain = config.load_format == "stream" and not source.packing and not config.merge_adapter

    def copied(name: str, num_numbers: int) -> int:
        if source.is_mapped(name) or name in packed.matrices:
            return 0
        if name in packed.by_rows:
            return ROW_COPY_BYTES * min(num_numbers, UNPACKED_AT_ONCE)
        return _streamed_bytes(source, name) if is_plain else COPY_BYTES * num_numbers

    by_block = model.shape.bytes_per_block(config.block_size, model.cache_dtype)
    own, siblings = local_siblings(root)
    others = smaller_forms(form, weights, "cpu", weights / bytes_kept(shape, lambda _: 1.0))
    if own and weights < MOST_GROWTH * siblings[own]:
        others |= {name: weights * size // siblings[own] for name, size in siblings.items() if name != own}
    fit = WeightsFit(
        name=own,
        device="cpu",
        form=form,
        weights=weights,
        packing=max(copied(name, math.prod(sizes)) for name, sizes in expected_shapes(shape).items()),
        cache=least_cache_bytes(
            config,
            by_block,
            max_model_len,
            layouts(
                config,
                shape,
                by_block,
                runs_kinds=NativeDecoder.runs_kinds,
                of_layer=block_bytes(config.block_size, model.cache_dtype),
            ),
        ),
        free=free_host_share(config),
        total=total_host_bytes(),
        others=others,
        num_engines=config.data_parallel_size,
    )
    fit.check()
    log.info("memory.fit", **fit.to_event())
    return fit


def _streamed_bytes(source: TensorSource, name: str) -> int:
    """Bytes of a tensor that the library takes as it is read from elsewhere; its parts are put together before."""
    sizes = [piece.num_bytes for piece in source.pieces(name)]
    return sum(sizes) * (2 if len(sizes) > 1 else 1)


def _fill(weights: NativeWeights, source: CountedTensors, names: Iterable[str], packed: PackedWeights) -> None:
    """Packs the tensors. There are never two copies of the whole model in memory."""
    mapped = {name: source.array(name) for name in names if source.is_mapped(name)}
    try:
        for some in _in_calls(mapped):
            weights.set_mapped_tensors(some)
            source.note_read(some)
        for name in names:
            if matrix := packed.matrices.get(name):
                for first, codes in matrix.portions(PACKED_AT_ONCE):
                    weights.set_rows(name, first, codes)
                source.forget(name)
            elif matrix := packed.by_rows.get(name):
                for first, numbers in matrix.unpacked():
                    weights.set_tensor_rows(name, first, numbers)
                source.forget(name)
            elif name not in mapped:  # copied or random tensors, one at a time
                weights.set_tensor(name, source.array(name))
                source.forget(name)
    except NonFiniteError as error:
        raise CheckpointError(str(error)) from None


def _in_calls(mapped: Mapping[str, NDArray[Any]]) -> Iterator[dict[str, NDArray[Any]]]:
    """The tensors in portions of at least `CALL_BYTES`, each of which is one library call."""
    some: dict[str, NDArray[Any]] = {}
    for name, array in mapped.items():
        some[name] = array
        if sum(one.nbytes for one in some.values()) >= CALL_BYTES:
            yield some
            some = {}
    if some:
        yield some


def _code(weights: NativeWeights) -> None:
    """Compresses weights without loss.

    Tensors for which there is not enough memory stay as they are.
    """
    before = weights.num_bytes
    try:
        weights.encode_bf16_12bit()
    except MemoryError as error:
        log.warning("weights.not_coded", reason=str(error))
    if weights.num_bytes < before:
        log.info("weights.coded", weights_mib=round(weights.num_bytes / 2**20, 1), of_mib=round(before / 2**20, 1))

"""The first part of model loading: files, sizes, choice of the backend, native weights.

Packing weights takes most of the start-up time and needs no Python. So this runs on a thread of its own, before most
modules are imported, and imports little itself. On a CPU it chooses the native library, unless a setting needs more
than it supports; otherwise torch, which `model.py` imports only then.
"""

from __future__ import annotations

import contextvars
import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar, TypeVarTuple, cast

from ...kernels.native.errors import NativeUnavailableError, NonFiniteError, UnsupportedModelError
from ...kernels.native.machine import instruction_sets
from ...kernels.native.model import GROUP_SIZE, NativeModel
from ...kernels.native.shape import CacheDType, DType
from ...kernels.native.thread_throttle import ThreadThrottle
from ...model.backend_gaps import missing
from ...model.checkpoint import hub
from ...model.checkpoint.model_kind import is_bidirectional
from ...model.checkpoint.tensor_shapes import TensorSource, expected_shapes, open_source
from ...model.decoder.native_decoder import native_shape
from ...model.decoder.rope import rope_tables
from ...model.errors import CheckpointError, UnbuiltError
from ...model.families.registry import read_spec
from ...model.files import LinkedFolder
from ...model.spec import DecoderSpec
from ...runtime.env.cpus import ComputeThreads, Cpus, idle_ns
from ...runtime.env.log import get_logger
from ...runtime.phases import Phases
from ...runtime.workers.side_thread import LiveSideThread, Pending
from ..backends.cache_size import check_weights_fit, free_host_bytes
from ..config import EngineConfig, resolve_step_size
from ..errors import ConfigError
from .model_impl import check_settings, why_not_here, why_through_transformers

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = get_logger("millrace.stages")

# Bytes of a number; for int4 including its share of a scale.
ITEM_SIZES = {"float32": 4.0, "bfloat16": 2.0, "int8": 1.0, "int4": 0.5 + 2 / GROUP_SIZE}


@dataclass(frozen=True, slots=True, eq=False)
class OpenedModel:
    """A model whose files are present."""

    root: Path
    threads: ComputeThreads
    shape: DecoderSpec | None  # None: an encoder model, or one that runs through transformers
    max_model_len: int = 0  # as configured; for "auto" the upper bound, before memory is considered
    native_model: Pending[NativeModel | str] | None = None  # see `_load_native_model`
    why_not_native: str = ""  # without a native model: the setting that the library does not support
    why_through_transformers: str = ""  # for a model that runs through transformers


class EarlyLoading:
    """Starts opening a model when constructed, on a thread of its own, which `close` ends."""

    def __init__(self, config: EngineConfig, phases: Phases) -> None:
        self.config, self.phases = config, phases
        self._is_packing = threading.Event()  # set when packing starts, or will not happen
        self._thread = LiveSideThread("opening")
        self._opened = self._submit(self._open)

    def result(self) -> OpenedModel:
        """Blocks until the files are present; they may have to be downloaded.

        Raises `ConfigError` for invalid settings, and `ModelError` for a model that cannot be loaded with them.
        """
        return self._opened.result()

    def wait_until_packing(self, timeout_s: float) -> None:
        """Blocks for at most `timeout_s`, until the library packs weights or is known not to.

        Import large modules after this call. Before, the importing thread and this one compete for the interpreter
        lock, 5 ms at a time, at every file read. With the files present, the wait is about 50 ms.
        """
        self._is_packing.wait(timeout_s)

    def close(self) -> None:
        """Waits for the running job and ends the thread. Idempotent."""
        self._thread.close()

    def _submit(self, job: Callable[[*Ts], T], *args: *Ts) -> Pending[T]:
        """Runs a job in a copy of the caller's contextvars, which mark its log lines."""
        context = contextvars.copy_context()
        return self._thread.submit(lambda: context.run(job, *args))

    def _open(self) -> OpenedModel:
        opened = None
        try:
            opened = self._open_files(self.config)
        finally:
            if opened is None or opened.native_model is None:
                self._is_packing.set()
        return opened

    def _open_files(self, config: EngineConfig) -> OpenedModel:
        if config.chat_template is not None:  # before a model is downloaded, or its weights are read
            from ...model.text.chat_template import check_chat_template

            check_chat_template(None, config.chat_template)
        with self.phases("resolve"):
            root = resolve(config)
        if config.chat_template is not None:
            check_chat_template(root, config.chat_template)
        threads = ComputeThreads.choose(config.threads, Cpus.of_this_process(), os.environ)
        if is_bidirectional(root):
            return OpenedModel(root, threads, None)
        reason = why_through_transformers(config, root)
        shape = None
        if reason is None:
            try:
                reason = why_not_here(config, shape := read_spec(root))
            except UnbuiltError as error:
                if config.model_impl != "auto":
                    raise
                reason = str(error)
        if shape is None or reason is not None:
            check_settings(config, str(reason))
            return OpenedModel(root, threads, None, why_through_transformers=str(reason))
        source, shape = open_source(root, shape, config.load_format)
        for warning in source.warnings:
            log.warning("checkpoint.unusual", what=warning)
        max_model_len = max_model_len_of(config, shape)
        for rope in shape.ropes:
            if rope.kind == "longrope" and max_model_len > rope.original_max_position:
                log.info("rope.long", max_model_len=max_model_len, original_context=rope.original_max_position)
        reason = _why_not_native(config, shape)
        if reason is not None:
            return OpenedModel(root, threads, shape, max_model_len, why_not_native=reason)
        log.info("threads.chosen", count=threads.count, cpus=list(threads.pinned), reason=threads.reason)
        native_model = self._submit(self._load_native_model, source, shape, threads)
        return OpenedModel(root, threads, shape, max_model_len, native_model)

    def _load_native_model(
        self, source: TensorSource, shape: DecoderSpec, threads: ComputeThreads
    ) -> NativeModel | str:
        """The native model with its weights, or the reason why it cannot run on this machine.

        Raises `ConfigError` if the weights do not fit the memory, and `CheckpointError`.
        """
        try:
            if self.config.load_format == "dummy":  # no file has limited the sizes
                _check_least_memory(self.config, shape)
            with self.phases("library"):
                model = _make_native_model(self.config, shape, threads)
            log.info("instructions.chosen", name=model.instruction_set, machine_has=list(instruction_sets()))
            with self.phases("weights"):
                _check_memory(model, shape)
                self._is_packing.set()
                _fill(model, source, expected_shapes(shape))
                _code(model)
            return model
        except (NativeUnavailableError, UnsupportedModelError) as error:
            return str(error)
        finally:
            self._is_packing.set()


def resolve(config: EngineConfig) -> Path:
    """The folder of the model's files. Downloads them first if necessary."""
    root = hub.resolve(
        config.model,
        revision=config.revision,
        download_dir=Path(config.download_dir) if config.download_dir else None,
        offline=config.offline,
    )
    return LinkedFolder(root) if config.allow_links_outside else root


# -- choice of the backend


def _why_not_native(config: EngineConfig, shape: DecoderSpec) -> str | None:
    """The setting that the native library does not support, and why; None if it supports all."""
    if config.attention_backend not in ("auto", "native"):
        return f"attention_backend = {config.attention_backend}"
    if config.device == "cuda" or (config.device == "auto" and has_cuda_driver()):
        return f"device = {config.device}: the native backend computes on CPUs only"
    if config.kv_cache_dtype == "fp8":
        return "kv_cache_dtype = fp8: the native backend keeps keys and values in int8, or as dtype"
    if config.deterministic:
        return "deterministic = True: the native backend splits sums by the batch; this setting needs a GPU"
    if config.dtype_of(shape.dtype) == "float16":
        return "dtype = float16: the native backend computes in bfloat16 and float32"
    if gaps := missing(shape, "native"):
        return f"{shape.family}: the native backend lacks {', '.join(gaps)}"
    return None


def require_torch(config: EngineConfig, reason: str) -> None:
    """Raises `ConfigError` if torch does not support the settings either.

    `reason`: why the library does not run.
    """
    setting = _native_only(config)
    if setting is not None:
        raise ConfigError(f"{setting}: only the native backend supports that, and it does not run here: {reason}")
    if config.attention_backend == "native":
        raise ConfigError(f"attention_backend = native: {reason}; use auto, which then chooses torch")


def _native_only(config: EngineConfig) -> str | None:
    """The setting that only the native library supports, with the alternatives; or None."""
    if config.quantization is not None:
        return f"quantization = {config.quantization} (leave it out, or use device = cpu with attention_backend = auto)"
    if config.kv_cache_dtype == "int8":
        return "kv_cache_dtype = int8 (use auto or fp8, or device = cpu with attention_backend = auto)"
    return None


def has_cuda_driver() -> bool:
    """Whether this machine may have a GPU.

    Only then is torch imported to find out, which takes a second.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


# -- the native library


def _make_native_model(config: EngineConfig, shape: DecoderSpec, threads: ComputeThreads) -> NativeModel:
    """A native model without weights, and with rotary tables for one position until its length is known.

    Raises `NativeUnavailableError` and `UnsupportedModelError`.
    """
    return NativeModel(
        native_shape(shape),
        cast(DType, config.dtype_of(shape.dtype)),
        [rope_tables(rope, 1) for rope in shape.ropes],
        1,
        quantization=config.quantization,
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
    kept = config.quantization or config.dtype_of(shape.dtype)
    check_weights_fit(shape, kept, lambda _: ITEM_SIZES[kept], "cpu", free_host_bytes())


def _check_memory(model: NativeModel, shape: DecoderSpec) -> None:
    """Raises `ConfigError`, before loading, if the weights are larger than the free memory."""

    def item_size(name: str) -> float:
        return ITEM_SIZES[model.type_of(name)] + ITEM_SIZES["int8"] * model.has_screen(name)

    check_weights_fit(shape, model.quantization or model.dtype, item_size, "cpu", free_host_bytes())


def _fill(model: NativeModel, source: TensorSource, names: Iterable[str]) -> None:
    """Packs the tensors. There are never two copies of the whole model in memory."""
    mapped = {name: source.array(name) for name in names if source.is_mapped(name)}
    try:
        model.set_mapped_tensors(mapped)
        for name in names:
            if name not in mapped:  # copied or random tensors, one at a time
                model.set_tensor(name, source.array(name))
    except NonFiniteError as error:
        raise CheckpointError(str(error)) from None


def _code(model: NativeModel) -> None:
    """Compresses weights without loss.

    Tensors for which there is not enough memory stay as they are.
    """
    before = model.weights_bytes
    try:
        model.encode_bf16_12bit()
    except MemoryError as error:
        log.warning("weights.not_coded", reason=str(error))
    if model.weights_bytes < before:
        log.info("weights.coded", weights_mib=round(model.weights_bytes / 2**20, 1), of_mib=round(before / 2**20, 1))


# -- settings with defaults


def max_model_len_of(config: EngineConfig, shape: DecoderSpec) -> int:
    """The configured length; for "auto" the upper bound, before memory is considered."""
    longest, on_request = shape.max_position_embeddings, shape.longest_on_request
    most = resolve_step_size(config, is_native=False).num_step_tokens  # limit of unchunked prompts, for any backend
    if config.max_model_len == "auto":
        return longest if config.enable_chunked_prefill else min(longest, most)
    chosen = longest if config.max_model_len is None else config.max_model_len
    if chosen > on_request:
        raise ConfigError(f"max_model_len = {chosen}: must be at most {on_request}, the model's maximum")
    if chosen < 2:
        raise ConfigError(f"max_model_len = {chosen}: must be at least 2, a token of prompt and one of answer")
    if not config.enable_chunked_prefill and most < chosen:
        raise ConfigError(
            f"enable_chunked_prefill = False: a prompt of max_model_len = {chosen} tokens does not fit a step of "
            f"max_num_batched_tokens = {most}; raise max_num_batched_tokens or lower max_model_len"
        )
    return chosen

"""The first part of model loading: files, sizes, choice of the backend, native weights.

Packing weights takes most of the start-up time and needs no Python. So this runs on a thread of its own, before most
modules are imported, and imports little itself. On a CPU it chooses the native library, unless a setting needs more
than it supports; otherwise torch, which `model.py` imports only then.
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from ...model.checkpoint import hub
from ...model.checkpoint.model_kind import is_bidirectional
from ...model.checkpoint.tensor_shapes import TensorSource, open_source
from ...model.families.registry import read_spec
from ...model.files import LinkedFolder, read_json
from ...model.spec import DecoderSpec
from ...runtime.env.cpus import ComputeThreads, Cpus
from ...runtime.env.log import get_logger
from ...runtime.startup.load_progress import LoadProgress
from ...runtime.startup.phases import Phases
from ...runtime.workers.side_thread import LiveSideThread, Pending
from ..backends.cache_size import free_host_share, total_host_bytes
from ..backends.latent_settings import check_latents
from ..backends.merged_adapters import merging_of
from ..backends.recurrent_settings import check_recurrent
from ..backends.weights_fit import WeightsFit, bytes_kept, smaller_forms
from ..config import EngineConfig, resolve_step_size
from ..errors import ConfigError
from .model_impl import check_dtype, check_settings, check_uneven, choose_impl, why_through_transformers
from .native_choice import has_cuda_driver, why_not_native
from .native_model import ITEM_SIZES, load_native_model

if TYPE_CHECKING:
    from ...kernels.native.model import NativeModel

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

log = get_logger("millrace.stages")

SIZES = {**ITEM_SIZES, "float16": 2.0}  # bytes of a number


@dataclass(frozen=True, slots=True, eq=False)
class OpenedModel:
    """A model whose files are present."""

    root: Path
    threads: ComputeThreads
    shape: DecoderSpec | None  # None: an encoder model, or one that runs through transformers
    max_model_len: int = 0  # as configured; for "auto" the upper bound, before memory is considered
    native_model: Pending[NativeModel | str] | None = None  # see `load_native_model`
    why_not_native: str = ""  # without a native model: the setting that the library does not support
    why_through_transformers: str = ""  # for a model that runs through transformers
    packing: str = ""  # how the file packs its matrices, as users know it; empty: it does not


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
            root = resolve(config, self.phases.progress)
            self.phases.progress.begin("start")  # nothing is downloaded any more
        if config.chat_template is not None:
            check_chat_template(root, config.chat_template)
        threads = ComputeThreads.choose(config.threads, Cpus.of_this_process(), os.environ)
        if is_bidirectional(root):
            return OpenedModel(root, threads, None)
        shape, reason = choose_impl(config, root)
        if shape is None:
            check_settings(config, reason)
            return OpenedModel(root, threads, None, why_through_transformers=reason)
        source, shape = open_source(root, shape, config.load_format, merging_of(config))
        for warning in source.warnings:
            log.warning("checkpoint.unusual", what=warning)
        check_dtype(config, shape)
        check_recurrent(config, shape)
        check_uneven(config, shape)
        check_latents(config, shape)
        max_model_len = max_model_len_of(config, shape)
        why_not = why_not_native(config, shape)
        if why_not is not None:
            if source.packing:
                log.warning("weights.unpacked", packing=source.packing, reason=why_not)
            return OpenedModel(root, threads, shape, max_model_len, why_not_native=why_not)
        log.info("threads.chosen", count=threads.count, cpus=list(threads.pinned), reason=threads.reason)
        native_model = self._submit(self._load_native_model, root, source, shape, max_model_len, threads)
        return OpenedModel(root, threads, shape, max_model_len, native_model, packing=source.packing)

    def _load_native_model(
        self, root: Path, source: TensorSource, shape: DecoderSpec, max_model_len: int, threads: ComputeThreads
    ) -> NativeModel | str:
        """As `load_native_model`."""
        when_packing = self._is_packing.set
        try:
            return load_native_model(
                self.config, root, source, shape, max_model_len, threads, self.phases, when_packing
            )
        finally:
            self._is_packing.set()


def resolve(config: EngineConfig, progress: LoadProgress | None = None) -> Path:
    """The folder of the model's files. Downloads them first if necessary, and tells `progress` the bytes."""
    if progress is not None:
        progress.begin("download")
    root = hub.resolve(
        config.model,
        revision=config.revision,
        download_dir=Path(config.download_dir) if config.download_dir else None,
        offline=config.offline,
        streams=config.load_format == "stream",
        on_progress=None if progress is None else partial(progress.set, hub.model_name(config.model)),
        check_size=None if config.quantization not in (None, "auto") else partial(_check_file_fits, config),
        check_weights=partial(_check_weights_fit, config),
    )
    return LinkedFolder(root) if config.allow_links_outside else root


def resolve_text(config: EngineConfig) -> Path:
    """The folder of the model's files, perhaps without its weights. Downloads no weights where it can do without."""
    download_dir = Path(config.download_dir) if config.download_dir else None
    found = hub.resolve_text(config.model, revision=config.revision, download_dir=download_dir, offline=config.offline)
    if found is None:
        return resolve(config)
    return LinkedFolder(found) if config.allow_links_outside else found


def _check_file_fits(config: EngineConfig, name: str, num_bytes: int, others: Mapping[str, int]) -> None:
    """Raises `ConfigError` for a GGUF file that is larger than the free memory, before it is downloaded."""
    _check_on_cpu(config, name, "stored", num_bytes, others)


def _check_weights_fit(config: EngineConfig, root: Path, num_bytes: int) -> None:
    """Raises `ConfigError` for files of safetensors that become more than the free memory, before their download.

    `root` has the model's other files. A model that is not described here is counted as it is stored.
    """
    form, weights, others = "stored", num_bytes, {}
    if not is_bidirectional(root) and why_through_transformers(config, root) is None:
        values = read_json(root, "config.json") or {}
        spec = read_spec(root)
        dtype = config.quantized_to or config.dtype_of(spec.dtype)
        if dtype in SIZES and (config.quantized_to or "quantization_config" not in values):
            form, weights = dtype, bytes_kept(spec, lambda _: SIZES[dtype])
            others = smaller_forms(form, weights, "cpu", SIZES[form])
    _check_on_cpu(config, hub.model_name(config.model), form, weights, others)


def _check_on_cpu(config: EngineConfig, name: str, form: str, weights: int, others: Mapping[str, int]) -> None:
    if config.gpu is None and not (config.device == "auto" and has_cuda_driver()):
        fit = WeightsFit(
            name=name,
            device="cpu",
            form=form,
            weights=weights,
            free=free_host_share(config),
            total=total_host_bytes(),
            others=others,
            num_engines=config.data_parallel_size,
        )
        fit.check()


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

"""What would become of a model here: found out without reading weights, compiling anything or downloading.

All checks of a start that need neither are made: files, settings, sizes, tokenizer and chat template.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from ...kernels.native import build, loading
from ...model.checkpoint import hub
from ...model.checkpoint.model_kind import is_bidirectional
from ...model.checkpoint.tensor_shapes import open_source
from ...model.sharding.layer_split import why_not_split
from ...model.sharding.shard import why_not_cut
from ...runtime.env.cpus import ComputeThreads, Cpus
from ...runtime.startup.phases import Phases
from ..backends.merged_adapters import merging_of
from ..backends.weights_fit import WeightsFit
from ..config import EngineConfig
from ..errors import ConfigError
from .early import max_model_len_of, resolve
from .model_impl import check_dtype, check_settings, choose_impl
from .native_choice import require_torch, why_not_native
from .native_model import native_fit
from .text_parts import read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreview:
    """A model that would load."""

    model_id: str
    root: Path
    runs_on: str  # the native library, PyTorch, ...
    max_model_len: int = 0  # 0: not found out
    fit: WeightsFit | None = None  # None: found out while loading only


def preview_model(config: EngineConfig) -> ModelPreview:
    """The model of `config`, by its files on this machine.

    Raises `ConfigError` and `ModelError` as a start does; `DownloadError` for one that is not here.
    """
    config = replace(config, offline=True)
    root = resolve(config)
    name = hub.model_name(config.model)
    if is_bidirectional(root):
        _need("torch", f"{name} is an encoder, which runs on PyTorch")
        return ModelPreview(model_id=name, root=root, runs_on="PyTorch, an encoder")
    shape, reason = choose_impl(config, root)
    if shape is None:
        check_settings(config, reason)
        _need("transformers", f"{name} runs through transformers: {reason}")
        return ModelPreview(model_id=name, root=root, runs_on=f"transformers: {reason}")
    source, shape = open_source(root, shape, config.load_format, merging_of(config))
    check_dtype(config, shape)
    size = config.tensor_parallel_size
    if size > 1 and (why_not := why_not_cut(shape, size)) is not None:
        raise ConfigError(f"tensor_parallel_size = {size}: {why_not}")
    size = config.pipeline_parallel_size
    if size > 1 and (why_not := why_not_split(shape, size)) is not None:
        raise ConfigError(f"pipeline_parallel_size = {size}: {why_not}")
    longest = max_model_len_of(config, shape)
    read_text(config, root, shape, name, Phases(lambda: 0.0))
    preview = ModelPreview(model_id=name, root=root, runs_on="", max_model_len=longest)
    why_not = why_not_native(config, shape)
    if why_not is None and build.is_ready(loading.choose_instruction_set()):
        threads = ComputeThreads.choose(config.threads, Cpus.of_this_process(), os.environ)
        found = native_fit(config, root, source, shape, longest, threads)
        if isinstance(found, WeightsFit):
            return replace(preview, runs_on=f"the native library, as {found.form}", fit=found)
        why_not = found
    if why_not is None:
        return replace(preview, runs_on="the native library, once it is compiled")
    require_torch(config, shape, why_not)
    return replace(preview, runs_on=f"PyTorch: {why_not}")


def _need(package: str, why: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(f"{why}; {package} is not installed: pip install {package}")

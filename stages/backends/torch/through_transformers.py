"""Loads a model through transformers' modules, on the cache and the runner of the torch backend. Imports both."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from transformers import __version__

from ....kernels import kernel_set
from ....model.errors import CheckpointError
from ....model.fallback.checkpoint_loading import (
    load_model,
    num_weights,
    read_config,
    read_spec,
)
from ....model.fallback.errors import UnservableError
from ....model.fallback.probe import probe
from ....model.fallback.transformers_decoder import TransformersDecoder, TransformersModel
from ....model.families.registry import what_is_supported
from ....model.spec import DecoderSpec
from ....runtime.env.cpus import ComputeThreads
from ....runtime.env.log import get_logger
from ....runtime.startup.phases import Phases
from ...config import EngineConfig
from ..backend import Backend
from ..weights_fit import check_weights
from .fitted_runner import free_bytes
from .loading import choose_device, make_backend, name_of, torch_dtype

log = get_logger("millrace.stages")

UNEXPECTED = (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)


def read_spec_by_transformers(config: EngineConfig, root: Path) -> DecoderSpec:
    """The spec of the checkpoint in `root`, without layers. Raises `CheckpointError` for a model that is not served."""
    values = read_config(root)
    try:
        return read_spec(values, root, config.load_format)
    except UnservableError as error:
        _refuse(root, values.model_type, error)


def load_on_transformers(
    config: EngineConfig, root: Path, shape: DecoderSpec, max_model_len: int, phases: Phases, threads: ComputeThreads
) -> Backend:
    """Loads the checkpoint in `root`, whose spec is that of `read_spec_by_transformers`. Raises as `load_model` does.

    Attention runs on the PyTorch kernels, on a GPU too, and each step is waited for.
    """
    config = replace(config, attention_backend="torch", async_scheduling=False)
    device = choose_device(config, threads)
    kernels, dtype = kernel_set.load("torch"), torch_dtype(config, shape.dtype)
    values = read_config(root)
    phases.progress.begin("read")
    try:
        with phases("weights"):
            num_bytes = num_weights(root, values, config.load_format) * dtype.itemsize
            num_engines = config.data_parallel_size if device.type == "cpu" else 1
            check_weights(num_bytes, free_bytes(config, device), str(device), name_of(dtype), num_engines)
            model = load_model(root, values, device, dtype, config.load_format, config.seed)
        with phases("probe"):
            loaded = TransformersModel(model, shape)
            probe(loaded, kernels, max_model_len)
    except UnservableError as error:
        _refuse(root, shape.family, error)
    except (*UNEXPECTED, RuntimeError) as error:  # of modules that were written for other steps than these
        if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
            raise
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _refuse(
            root, shape.family, UnservableError(f"its modules do not run on the tokens of several sequences: {first}")
        )
    if loaded.used_share < 1.0:
        log.info("kv_cache.padded", used_share=round(loaded.used_share, 3))
    make_decoder = partial(TransformersDecoder, loaded, kernels)
    return make_backend(
        config, loaded.spec, make_decoder, max_model_len, device, kernels, phases, model_impl="transformers"
    )


def _refuse(root: Path, model_type: str, error: UnservableError) -> NoReturn:
    raise CheckpointError(
        f"config.json ({root}): model_type: {model_type!r} is not supported: {error}. Transformers {__version__} "
        f"serves models whose layers keep keys and values only; {what_is_supported(model_type)}"
    ) from None

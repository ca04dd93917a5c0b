"""Whether the native library computes a model, and what to do where only it could. Does not import torch."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

from ...model.backend_gaps import missing
from ...model.spec import DecoderSpec
from ..config import EngineConfig
from ..errors import ConfigError


def why_not_native(config: EngineConfig, shape: DecoderSpec) -> str | None:
    """The setting that the native library does not support, and why; None if it supports all."""
    if config.attention_backend not in ("auto", "native"):
        return f"attention_backend = {config.attention_backend}"
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "emulate_tp"):
        if getattr(config, name) == 1:
            continue
        return f"{name} = {getattr(config, name)}: the native backend computes in one process, with threads"
    if config.gpu is not None or (config.device == "auto" and has_cuda_driver()):
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


def require_torch(config: EngineConfig, shape: DecoderSpec, reason: str) -> None:
    """Raises `ConfigError` if torch does not support the settings either, or is not installed.

    `reason`: why the library does not run.
    """
    asked = _native_only(config)
    if asked is not None:
        setting, instead = asked
        helps = _what_helps(config, shape)
        raise ConfigError(
            f"{setting}: only the native backend supports that, and it does not run here: {reason}; {instead}"
            + (f", or use {helps}" if helps else "")
        )
    if config.attention_backend == "native":
        raise ConfigError(f"attention_backend = native: {reason}; use auto, which then chooses torch")
    if find_spec("torch") is None:
        raise ConfigError(f"PyTorch is not installed, which alone computes this: {reason}; pip install torch")


def _native_only(config: EngineConfig) -> tuple[str, str] | None:
    """The setting that only the native library supports, and what to set instead; or None."""
    if config.quantized_to is not None:
        return f"quantization = {config.quantization}", "leave it out"
    if config.kv_cache_dtype == "int8":
        return "kv_cache_dtype = int8", "use auto or fp8"
    return None


def _what_helps(config: EngineConfig, shape: DecoderSpec) -> str:
    """The settings with which the library would compute the model; empty where none would."""
    if missing(shape, "native"):
        return ""
    is_on_gpu = config.gpu is not None or (config.device == "auto" and has_cuda_driver())
    changes = {
        "tensor_parallel_size = 1": config.tensor_parallel_size > 1,
        "pipeline_parallel_size = 1": config.pipeline_parallel_size > 1,
        "attention_backend = auto": config.attention_backend not in ("auto", "native"),
        "device = cpu": is_on_gpu,
        "kv_cache_dtype = int8": config.kv_cache_dtype == "fp8",
        "deterministic = False": config.deterministic,
        "dtype = bfloat16": config.dtype_of(shape.dtype) == "float16",
    }
    return " and ".join(setting for setting, is_needed in changes.items() if is_needed)


def has_cuda_driver() -> bool:
    """Whether this machine may have a GPU.

    Only then is torch imported to find out, which takes a second.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True

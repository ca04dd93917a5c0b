"""The KV cache dtype on torch and Triton: that of the weights, or fp8. Imports torch."""

from __future__ import annotations

import torch

from ....model.decoder.decoder import Decoder
from ....model.decoder.kv_scales import measured_scales
from ...config import EngineConfig
from ...errors import ConfigError

FP8_CAPABILITY = (8, 9)  # the first compute capability whose compiler knows e4m3


def check_kv_dtype(config: EngineConfig, device: torch.device, backend: str) -> None:
    """Raises `ConfigError` for a cache dtype that the kernels cannot read on this device."""
    if config.kv_cache_dtype != "fp8" or device.type != "cuda" or backend != "triton":
        return
    found = torch.cuda.get_device_capability(device)
    if found < FP8_CAPABILITY:
        raise ConfigError(
            f"kv_cache_dtype = fp8: {torch.cuda.get_device_name(device)} has compute capability "
            f"{found[0]}.{found[1]}, and Triton needs 8.9 (Ada, Hopper) or later for it; use auto"
        )


def kv_dtype_of(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values; `dtype` is that of the weights."""
    assert config.kv_cache_dtype != "int8", "only the native backend has an int8 cache"
    return torch.float8_e4m3fn if config.kv_cache_dtype == "fp8" else dtype


def kv_scales_of(config: EngineConfig, decoder: object) -> torch.Tensor | None:
    """The scales of an fp8 cache, measured by running a step; None for any other dtype."""
    if config.kv_cache_dtype != "fp8":
        return None
    assert isinstance(decoder, Decoder), "transformers' modules run without an fp8 cache"
    return measured_scales(decoder)

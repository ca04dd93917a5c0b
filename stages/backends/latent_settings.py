"""What layers that keep latents instead of keys and values do not go with. Does not import torch."""

from __future__ import annotations

from ...model.spec import DecoderSpec
from ..config import EngineConfig
from ..errors import ConfigError


def check_latents(config: EngineConfig, shape: DecoderSpec) -> None:
    """Raises `ConfigError` for a setting that a model with latents does not support."""
    if not shape.latents:
        return
    kv_dtype = config.kv_cache_dtype
    unsupported = {
        f"kv_cache_dtype = {kv_dtype}": (kv_dtype != "auto", "auto"),
        "enable_lora = True": (config.enable_lora, "False"),
        "deterministic = True": (config.deterministic, "False"),
        f"merge_adapter = {', '.join(config.merge_adapter)}": (bool(config.merge_adapter), "none"),
    }
    for setting, (is_set, instead) in unsupported.items():
        if is_set:
            raise ConfigError(
                f"{setting}: is not supported for model = {config.model}, a {shape.family} whose cache keeps latents "
                f"instead of keys and values; use {instead}"
            )

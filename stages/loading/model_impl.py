"""Whose modules compute a model: those of its family here, or transformers'. Imports neither torch nor transformers."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from ...model.backend_gaps import missing
from ...model.errors import UnbuiltError
from ...model.families.registry import has_family, read_spec
from ...model.files import read_json
from ...model.spec import DecoderSpec
from ..backends.merged_adapters import refuse_merging
from ..config import EngineConfig
from ..errors import ConfigError

LARGE_ACTIVATIONS = ("gemma2", "gemma3", "gemma4")  # beginnings of families
AUTO_FILES = ("auto_mappings.py", "configuration_auto.py")  # of transformers, with a line for each model_type


def why_through_transformers(config: EngineConfig, root: Path) -> str | None:
    """Why the checkpoint in `root` runs through transformers, by its model_type; None if it does not."""
    if config.model_impl == "transformers":
        return "model_impl = transformers"
    values = read_json(root, "config.json") or {}
    model_type = values.get("model_type")
    if config.model_impl == "millrace" or has_family(values) or not isinstance(model_type, str):
        return None
    return f"model_type = {model_type}: no family here describes it" if _transformers_knows(model_type) else None


def why_not_here(config: EngineConfig, shape: DecoderSpec) -> str | None:
    """Why the decoder of a family does not compute the model, so that transformers does; None if it does.

    Raises `ConfigError` if `model_impl` rules transformers out.
    """
    gaps = missing(shape, "torch")
    if gaps and config.model_impl == "millrace":
        raise ConfigError(f"model_impl = millrace: {shape.family}: the decoder here lacks {', '.join(gaps)}; use auto")
    return f"{shape.family}: the decoder here lacks {', '.join(gaps)}" if gaps else None


def choose_impl(config: EngineConfig, root: Path) -> tuple[DecoderSpec | None, str]:
    """The shape of the decoder in `root` if a family here computes it; else None, and why transformers does.

    Raises `ConfigError` and `ModelError` if neither may or can.
    """
    reason = why_through_transformers(config, root)
    if reason is None:
        try:
            shape = read_spec(root)
            reason = why_not_here(config, shape)
        except UnbuiltError as error:
            if config.model_impl != "auto":
                raise
            reason = str(error)
        if reason is None:
            return shape, ""
    return None, reason


def check_settings(config: EngineConfig, reason: str) -> None:
    """Raises `ConfigError` for a setting that a model which runs through transformers does not support."""
    refuse_merging(config, f"is for decoders of the families here, and this model runs through transformers ({reason})")
    kv_dtype, backend = config.kv_cache_dtype, config.attention_backend
    unsupported = {
        f"quantization = {config.quantization}": config.quantized_to is not None,
        f"kv_cache_dtype = {kv_dtype}": kv_dtype != "auto",
        "deterministic = True": config.deterministic,
        "enable_lora = True": config.enable_lora,
        f"attention_backend = {backend}": backend not in ("auto", "torch"),
        "pooling = yes_no": config.pooling == "yes_no",
    }
    for setting, is_set in unsupported.items():
        if is_set:
            raise ConfigError(
                f"{setting}: is for decoders of the families here, and this model runs through transformers "
                f"({reason}); leave it out"
            )


def _transformers_knows(model_type: str) -> bool:
    """Whether transformers has a configuration of this type. Reads its files, as importing it takes a second."""
    found = find_spec("transformers")
    if found is None or found.origin is None or not model_type.replace("-", "_").replace(".", "_").isidentifier():
        return False
    folder = Path(found.origin).parent / "models" / "auto"
    files = [folder / name for name in AUTO_FILES if (folder / name).is_file()]
    line = re.compile(rf'"{re.escape(model_type)}"[,:] "')
    return any(line.search(file.read_text("utf-8")) for file in files)


def check_uneven(config: EngineConfig, shape: DecoderSpec) -> None:
    """Raises `ConfigError` for a setting that takes all layers to have keys and values of one size, each its own."""
    if shape.has_one_shape and not shape.donors and not any(one.is_k_v for one in shape.attentions):
        return
    unsupported = {
        "enable_lora = True": (config.enable_lora, "merge_adapter"),
        "kv_cache_dtype = fp8": (config.kv_cache_dtype == "fp8", "auto"),
    }
    for setting, (is_set, instead) in unsupported.items():
        if is_set:
            raise ConfigError(
                f"{setting}: is not supported for model = {config.model}, a {shape.family} whose layers differ in keys "
                f"and values; use {instead}"
            )


def check_dtype(config: EngineConfig, shape: DecoderSpec) -> None:
    """Raises `ConfigError` for a model in float16 whose activations do not fit it."""
    if config.dtype_of(shape.dtype) == "float16" and shape.family.startswith(LARGE_ACTIVATIONS):
        source = "config.json says dtype = float16" if config.dtype == "auto" else f"dtype = {config.dtype}"
        raise ConfigError(
            f"{source}: activations of {shape.family} exceed 65504, the largest number of float16; "
            "use dtype = bfloat16 or float32"
        )

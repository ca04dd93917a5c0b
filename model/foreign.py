"""Says what a file or folder is that holds no whole, unquantized checkpoint: its kind, its base model, the way out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from .errors import CheckpointError, quoted, shown
from .files import read_json, read_text

BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?['\"]?([\w.-]+/[\w.-]+)", re.MULTILINE)  # of a model card
MXFP4 = "mxfp4"  # a quant_method
SMALLER = "quantization = int4 or int8 makes its weights smaller on a CPU"


def describe_folder(root: Path) -> str | None:
    """The error text of a folder without a checkpoint of its own; None if it is of no known kind."""
    adapter = read_json(root, "adapter_config.json")
    if adapter is not None:
        return _describe_adapter(root, adapter)
    files = sorted(root.glob("*.gguf"))
    if files:
        return f"{root}: holds {shown(files[0].name)} and no safetensors; serve {shown(str(files[0]))} itself"
    if (root / "params.json").exists() and list(root.glob("consolidated*")):
        return (
            f"{root}: the original form of its maker (params.json, consolidated weights) is not supported; "
            "choose the same model in Hugging Face format, with config.json and model.safetensors"
        )
    return None


def refuse_mlx(root: Path, values: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a config.json of weights that MLX quantized."""
    found = values.get("quantization")
    if not found or values.get("quantization_config"):
        return
    bits = f" of {found['bits']} bits" if isinstance(found, dict) and isinstance(found.get("bits"), int) else ""
    _refuse(root, f"config.json ({root}): quantization: 'mlx' weights{bits} are not supported")


def refuse_quantized(root: Path, values: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a config.json of quantized weights, where transformers' modules are to run.

    MXFP4, in which gpt-oss is published, is read.
    """
    refuse_mlx(root, values)
    found = values.get("quantization_config")
    method = found.get("quant_method", found) if isinstance(found, dict) else found
    if found and method != MXFP4:
        what = f"{quoted(method)} weights are not supported for models that run through transformers"
        _refuse(root, f"config.json ({root}): quantization_config: {what}")


def _refuse(root: Path, problem: str) -> NoReturn:
    base = _base_model(root)
    origin = f"{base}, which they were made of" if base else "the unquantized checkpoint"
    raise CheckpointError(f"{problem}; serve {origin}: {SMALLER}")


def _describe_adapter(root: Path, adapter: Mapping[str, Any]) -> str:
    base = adapter.get("base_model_name_or_path") or _base_model(root)
    rank = adapter.get("r")
    kind = f"{shown(str(adapter.get('peft_type') or 'LoRA'))} adapter"
    kind += f" of rank {rank}" if isinstance(rank, int) else ""
    of = f" for {shown(str(base))}" if base else ""
    article = "an" if kind[0] in "AEIO" else "a"
    served = shown(str(base or "its base model"))
    return (
        f"{root}: is {article} {kind}{of}, not a model: serve {served} with --enable-lora --lora-modules NAME={root}, "
        f"or with --merge-adapter {root}"
    )


def _base_model(root: Path) -> str | None:
    """The base model that the model card names in its header."""
    try:
        card = read_text(root, "README.md") or ""
    except CheckpointError:
        return None
    match = BASE_MODEL.search(card.partition("\n---")[0])
    return match[1] if match else None

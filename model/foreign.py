"""Says what a file or folder is that holds no whole, unquantized checkpoint: its kind, its base model, the way out."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import CheckpointError, quoted, shown
from .files import checkpoint_file, read_json, read_text

GGUF_HEAD_BYTES = 1 << 16  # of the file, in which its general keys are
GGUF_STRING, GGUF_ARRAY = 8, 9  # types of values
GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # type -> bytes of a value
GGUF_FILE_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 7: "Q8_0", 8: "Q5_0", 10: "Q2_K", 12: "Q3_K_M", 14: "Q4_K_S"}
GGUF_FILE_TYPES |= {15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 32: "BF16"}
BASE_MODEL = re.compile(r"^base_model:\s*(?:-\s*)?['\"]?([\w.-]+/[\w.-]+)", re.MULTILINE)  # of a model card
SMALLER = "quantization = int4 or int8 makes its weights smaller on a CPU"


def describe_folder(root: Path) -> str | None:
    """The error text of a folder without a checkpoint of its own; None if it is of no known kind."""
    adapter = read_json(root, "adapter_config.json")
    if adapter is not None:
        return _describe_adapter(root, adapter)
    files = sorted(root.glob("*.gguf"))
    file = checkpoint_file(root, files[0].name) if files else None
    if file is not None:
        return describe_gguf(file, files[0].name)
    if (root / "params.json").exists() and list(root.glob("consolidated*")):
        return (
            f"{root}: the original form of its maker (params.json, consolidated weights) is not supported; "
            "choose the same model in Hugging Face format, with config.json and model.safetensors"
        )
    return None


def describe_gguf(path: Path, name: str) -> str:
    """The error text of a GGUF file, with what its header says about it."""
    try:
        with path.open("rb") as file:
            values = _gguf_values(file.read(GGUF_HEAD_BYTES))
    except OSError as error:
        return f"{shown(name)}: cannot be read: {error.strerror}"
    file_type = GGUF_FILE_TYPES.get(values.get("general.file_type", -1))
    said = [values.get("general.architecture"), values.get("general.name"), file_type]
    facts = ", ".join(shown(str(fact)) for fact in said if fact)
    base = values.get("general.base_model.0.repo_url") or values.get("general.source.huggingface.repository")
    source = f"serve {shown(str(base))}, which it was made of" if base else "serve the checkpoint that it was made of"
    return f"{shown(name)}: a GGUF file{f' ({facts})' if facts else ''}, which is not supported; {source}: {SMALLER}"


def refuse_quantized(root: Path, values: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a config.json of quantized weights, in the forms of transformers, MLX and AutoGPTQ."""
    key = next((key for key in ("quantization_config", "quantization") if values.get(key)), None)
    found = values[key] if key else read_json(root, "quantize_config.json")
    if not found:
        return
    details = found if isinstance(found, dict) else {}
    method = details.get("quant_method", "mlx" if key == "quantization" else "gptq" if key is None else found)
    bits = f" of {details['bits']} bits" if isinstance(details.get("bits"), int) else ""
    source = f"config.json ({root}): {key}" if key else f"quantize_config.json ({root})"
    base = _base_model(root)
    origin = f"{base}, which they were made of" if base else "the unquantized checkpoint"
    raise CheckpointError(f"{source}: {quoted(method)} weights{bits} are not supported; serve {origin}: {SMALLER}")


def _describe_adapter(root: Path, adapter: Mapping[str, Any]) -> str:
    base = adapter.get("base_model_name_or_path") or _base_model(root)
    rank = adapter.get("r")
    kind = f"{shown(str(adapter.get('peft_type') or 'LoRA'))} adapter"
    kind += f" of rank {rank}" if isinstance(rank, int) else ""
    of = f" for {shown(str(base))}" if base else ""
    return (
        f"{root}: a {kind}{of}, and adapters are not supported; merge it with peft (merge_and_unload, save_pretrained) "
        "and serve the merged folder, or serve its base model"
    )


def _base_model(root: Path) -> str | None:
    """The base model that the model card names in its header."""
    try:
        card = read_text(root, "README.md") or ""
    except CheckpointError:
        return None
    match = BASE_MODEL.search(card.partition("\n---")[0])
    return match[1] if match else None


def _gguf_values(raw: bytes) -> dict[str, Any]:
    """The keys before the first array, which is the vocabulary; empty if the file is not GGUF."""
    values: dict[str, Any] = {}
    if raw[:4] != b"GGUF":
        return values
    place = 24  # behind the magic, the version and two counts

    def text() -> str:
        nonlocal place
        (length,) = struct.unpack_from("<Q", raw, place)
        begin, place = place + 8, place + 8 + length
        if place > len(raw):
            raise ValueError("beyond the part that was read")
        return raw[begin:place].decode()

    try:
        while True:
            key = text()
            (kind,) = struct.unpack_from("<I", raw, place)
            place += 4
            if kind == GGUF_STRING:
                values[key] = text()
            elif kind in GGUF_SIZES:
                values[key] = int.from_bytes(raw[place : place + GGUF_SIZES[kind]], "little")
                place += GGUF_SIZES[kind]
            else:
                return values
    except (struct.error, ValueError):
        return values

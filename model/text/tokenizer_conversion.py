"""Makes a tokenizer.json of a checkpoint's older files, by transformers, which is imported only then.

Older checkpoints have vocab.json with merges.txt, tokenizer.model or vocab.txt alone. The files are copied into a
folder of their own first, so that nothing else of the checkpoint is read, and no code of it runs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, shown
from ..files import checkpoint_file, read_bytes, read_json

SOURCES = (("vocab.json", "merges.txt"), ("tokenizer.model",), ("vocab.txt",))  # the first that is there
SOURCE_BYTES = 16 << 20  # largest of these files; published ones take up to 5 MB
LEAST_TOKENS = 64  # with fewer, transformers has not read the files, as its class for the model has others
_WAY_OUT = "save one with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
_NO_CLASS = (
    "transformers has no class for them; fetch the model's tokenizer.json, or name the class that wrote the files as "
    "tokenizer_class in tokenizer_config.json, such as GPT2Tokenizer"
)


@dataclass(frozen=True, slots=True)
class ConvertedTokenizer:
    """What transformers makes of the files."""

    tokenizer_json: bytes
    named_tokens: Mapping[str, str]  # texts by name
    sources: tuple[str, ...]  # the files that it is made of


def convert(root: Path, config: Mapping[str, Any]) -> ConvertedTokenizer:
    """Converts the tokenizer of the checkpoint in `root`, with tokenizer_config.json in `config`.

    Takes about 3 s where transformers was not imported before. Raises CheckpointError that names the files.
    """
    sources = next((names for names in SOURCES if all(checkpoint_file(root, name) for name in names)), None)
    if sources is None:
        raise CheckpointError(f"{root}: no tokenizer.json; {_WAY_OUT}")
    about = f"{root}: no tokenizer.json, and {' and '.join(sources)}"
    missing = [name for name in ("sentencepiece", "protobuf") if _is_missing(name)]
    if missing and "tokenizer.model" in sources:
        raise CheckpointError(
            f"{about} cannot be read without {' and '.join(missing)}; pip install {' '.join(missing)}, or {_WAY_OUT}"
        )
    with tempfile.TemporaryDirectory(prefix="millrace-tokenizer-") as folder:
        _copy(root, config, sources, Path(folder))
        tokenizer = _read_by_transformers(folder, about)
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if rust is None or rust.get_vocab_size() < LEAST_TOKENS:
        raise CheckpointError(f"{about} cannot be converted: {_NO_CLASS}")
    return ConvertedTokenizer(rust.to_str().encode(), dict(tokenizer.special_tokens_map), sources)


def _is_missing(package: str) -> bool:
    try:
        return find_spec({"protobuf": "google.protobuf"}.get(package, package)) is None
    except ModuleNotFoundError:  # of the parent package
        return True


def _copy(root: Path, config: Mapping[str, Any], sources: tuple[str, ...], folder: Path) -> None:
    """Copies the files, and of the configurations what concerns the tokenizer."""
    for name in sources:
        (folder / name).write_bytes(read_bytes(root, name, SOURCE_BYTES) or b"")
    model = read_json(root, "config.json") or {}
    kept = {key: model[key] for key in ("model_type", "tokenizer_class") if isinstance(model.get(key), str)}
    said = {key: value for key, value in config.items() if key not in ("auto_map", "chat_template")}
    others = {name: read_json(root, name) for name in ("special_tokens_map.json", "added_tokens.json")}
    for name, values in {"config.json": kept, "tokenizer_config.json": said, **others}.items():
        if values is not None:
            (folder / name).write_text(json.dumps(values))


def _read_by_transformers(folder: str, about: str) -> Any:
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        raise CheckpointError(f"{about} cannot be converted without transformers; pip install transformers") from None
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # of any kind, a panic of the bindings included
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = shown((str(error).strip().splitlines() or [type(error).__name__])[0])
        reason = _NO_CLASS if reason.startswith("Couldn't instantiate") else reason
        raise CheckpointError(f"{about} cannot be converted: {reason}") from None
    finally:
        logging.set_verbosity(verbosity)

"""The folder in Hugging Face form that stands for a GGUF file: everything but the weights, which stay in the file.

Made once, in the cache directory, from the file's metadata: config.json, the files of a `StoredTokenizer`,
tokenizer_config.json, generation_config.json, and `gguf.json`, which says where the file is. The rest of the engine
reads it as any other checkpoint; its tensors come from `GgufCheckpoint`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, quoted, shown
from ..files import read_json
from .architecture import shared_config
from .architectures import ARCHITECTURES, FACTOR_TENSORS
from .blocks import unpack
from .checkpoint import GgufCheckpoint
from .keys import Keys
from .reader import GgufFile, Metadata, open_files, parts_of
from .tokenizer import read_tokenizer

POINTER = "gguf.json"
VERSION = 9  # of the folders; a change of what is written counts it up
MAKING = "making-"  # begins the name of a folder that is not finished
MOST_FOLDERS = 32  # up to 12 MB each, of a vocabulary of 262,144
UNUSED_S = 3600.0
MARKS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # of config files -> of the metadata
ENDS = ("eos", "eot", "eom")
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def folder_of(path: Path) -> Path:
    """The folder that stands for the GGUF file at `path`, made if need be. Raises CheckpointError."""
    path = Path(os.path.abspath(path))  # not resolved: a link in the Hub's cache has the name, its target a digest
    parts = parts_of(path)
    root = cache_directory() / f"{parts[0].stem[:64]}-{_key(parts)}"
    if not (root / POINTER).is_file():
        try:
            _make(root, open_files(path))
        except OSError as error:
            raise CheckpointError(
                f"{path.name}: {root} cannot be made: {error.strerror}; set XDG_CACHE_HOME to a folder for caches"
            ) from None
        remove_unused(root.parent, but=root)
    with suppress(OSError):  # a cache that is read only
        os.utime(root / POINTER)
    return root


def _make(root: Path, files: Sequence[GgufFile]) -> None:
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=root.parent, prefix=MAKING) as work:
        made = Path(work) / "made"
        made.mkdir()
        _write(made, files)
        try:
            made.rename(root)
        except OSError:  # another process was faster
            if not (root / POINTER).is_file():
                raise


def is_gguf_folder(root: Path) -> bool:
    """Whether a folder stands for a GGUF file: one that was made here. A checkpoint may hold a gguf.json of its own."""
    return is_made_in(cache_directory(), root) and (root / POINTER).is_file()


def is_made_in(directory: Path, root: Path) -> bool:
    """Whether `root` lies in a directory where only this program makes folders, so that what it says can be trusted."""
    return Path(os.path.realpath(root)).parent == Path(os.path.realpath(directory))


def open_checkpoint(root: Path) -> GgufCheckpoint:
    """The tensors of the file that the folder stands for. Raises CheckpointError if the file is gone or another."""
    files = []
    for told in _files_of(root):
        path = Path(told["path"])
        if not path.is_file() or path.stat().st_size != told["size"]:
            raise CheckpointError(f"{path}: is gone, or not the file of which {root} was made; serve the file again")
        files.append(GgufFile(path, with_texts=False))
    if not files:
        raise CheckpointError(f"{POINTER} ({root}): names no file; remove the folder and serve the GGUF file again")
    return GgufCheckpoint(root, files)


def _files_of(root: Path) -> list[dict[str, Any]]:
    """Place and size of each file for which a folder stands."""
    files = (read_json(root, POINTER) or {}).get("files", [])
    if not isinstance(files, list) or not all(_is_file_entry(entry) for entry in files):
        raise CheckpointError(
            f"{POINTER} ({root}): files: must be places and sizes; remove the folder, and serve again"
        )
    return files


def _is_file_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and isinstance(entry.get("path"), str) and isinstance(entry.get("size"), int)


def cache_directory() -> Path:
    """Where folders are kept: millrace/gguf in XDG_CACHE_HOME, else in ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "millrace" / "gguf"


def remove_unused(directory: Path, but: Path) -> None:
    """Removes the folders of files that are gone, and the longest unused ones beyond `MOST_FOLDERS`.

    A folder that another process used within the last hour stays, as it may be reading it. What is not a folder of
    this kind, or cannot be removed, stays too.
    """
    now = time.time()
    unused: list[tuple[float, Path]] = []  # by the time of the last use
    with suppress(OSError):
        for folder in directory.iterdir():
            with suppress(OSError, CheckpointError, LookupError, TypeError):
                is_made = not folder.name.startswith(MAKING)
                used = (folder / POINTER if is_made else folder).stat().st_mtime
                if folder == but or now - used < UNUSED_S:
                    continue
                if not is_made or not all(Path(told["path"]).is_file() for told in _files_of(folder)):
                    shutil.rmtree(folder)
                else:
                    unused.append((used, folder))
        for _, folder in sorted(unused, reverse=True)[MOST_FOLDERS - 1 :]:
            shutil.rmtree(folder, ignore_errors=True)


def _key(parts: Sequence[Path]) -> str:
    """Changes with any part of the file: its place, size and time of change."""
    told = str(VERSION)
    for path in parts:
        try:
            stat = path.stat()
        except OSError as error:
            raise CheckpointError(f"{path.name}: cannot be read: {error.strerror}") from None
        told += f" {path} {stat.st_size} {stat.st_mtime_ns} {stat.st_ino}"
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def _write(root: Path, files: Sequence[GgufFile]) -> None:
    first = files[0]
    tokenizer = read_tokenizer(first.metadata, first.path.name)  # first, as it checks what others read too
    contents = {
        "config.json": _config(files),
        "tokenizer_config.json": _tokenizer_config(first.metadata),
        "generation_config.json": _generation_config(first.metadata),
        POINTER: {"files": [{"path": str(file.path), "size": file.size} for file in files]},
    }
    tokenizer.write(root)
    for name, values in contents.items():
        (root / name).write_text(json.dumps(values, indent=1), encoding="utf-8")


def _config(files: Sequence[GgufFile]) -> dict[str, Any]:
    """The config.json. Raises CheckpointError for an architecture or a key that is not read."""
    first = files[0]
    name, metadata = first.metadata.get("general.architecture"), first.metadata
    kind = metadata.get("general.type", "model")
    if not isinstance(kind, str) or kind != "model":
        raise CheckpointError(
            f"{first.path.name}: general.type = {quoted(kind)}: not a whole model; serve the file of the model that it "
            "belongs to"
        )
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{first.path.name}: general.architecture = {shown(str(name))} is not read from GGUF files; read are "
            f"{', '.join(ARCHITECTURES)}; its checkpoint in Hugging Face format may be served"
        )
    tensors = {tensor: file for file in files for tensor in file.tensors}
    layers = metadata.get(f"{name}.block_count")
    if isinstance(layers, int) and layers > len(tensors):  # a list of that many may follow
        raise CheckpointError(f"{first.path.name}: {name}.block_count = {layers}, and it holds {len(tensors)} tensors")
    factors = {kind: _factors(file, kind) for kind in FACTOR_TENSORS if (file := tensors.get(f"{kind}.weight"))}
    keys, architecture = Keys(metadata, name, factors, tensors), ARCHITECTURES[name]
    try:
        config = shared_config(keys, architecture) | architecture.config(keys)
    except KeyError as error:
        raise CheckpointError(f"{first.path.name}: {error.args[0]} is missing from its metadata") from None
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{first.path.name}: its metadata cannot be used: {error}") from None
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError(f"{first.path.name}: tensor token_embd.weight is missing, so it is no whole model")
    config["vocab_size"] = embedding.tensors["token_embd.weight"].shape[0]
    if (name := "per_layer_token_embd.weight") in tensors:
        config["vocab_size_per_layer_input"] = tensors[name].tensors[name].shape[0]
    config.setdefault("tie_word_embeddings", "output.weight" not in tensors)
    config["attention_bias"] = config.get("attention_bias", "blk.0.attn_q.bias" in tensors)
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors  # of GLM-4.5; the others' types say it
    config["dtype"] = "bfloat16"
    return config | _token_ids(metadata)


def _factors(file: GgufFile, kind: str) -> NDArray[np.float32]:
    """The numbers by which rotary frequencies are divided. Raises CheckpointError if one of them cannot be."""
    tensor = file.tensors[f"{kind}.weight"]
    factors = unpack(tensor.type, file.packed(f"{kind}.weight"), tensor.shape)
    if factors.ndim != 1 or not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(
            f"{file.path.name}: tensor {kind}.weight: must hold a number above 0 for each rotated pair, not "
            f"{list(factors.shape)} numbers from {factors.min():g} to {factors.max():g}"
        )
    return factors


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    found = {f"{key}_token_id": metadata.get(f"tokenizer.ggml.{told}_token_id") for key, told in MARKS.items()}
    return {key: index for key, index in found.items() if isinstance(index, int) and key != "unk_token_id"}


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for key, told in MARKS.items():
        index = metadata.get(f"tokenizer.ggml.{told}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            config[f"{key}_token"] = tokens[index]
    start = "tokenizer.chat_template"
    texts = {key: text for key, text in metadata.items() if key.startswith(start) and isinstance(text, str)}
    templates = {"default": texts[start]} if start in texts else {}
    templates |= {key[len(start) + 1 :]: text for key, text in texts.items() if key.startswith(f"{start}.")}
    if list(templates) == ["default"]:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _generation_config(metadata: Metadata) -> dict[str, Any]:
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ENDS]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(end for end in ends if isinstance(end, int)))}
    for key, name in SAMPLING.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and np.isfinite(value):
            config[name] = float(f"{value:.6g}") if isinstance(value, float) else value
    return config

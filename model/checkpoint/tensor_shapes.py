"""Checks that a decoder's checkpoint holds the expected tensors: names and shapes. No torch.

A wrong checkpoint fails here, before any weight is read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, quoted, shown
from ..families.building import Family
from ..families.names import DOWN, EMBEDDING, HEAD, Names, Target, tensors_of
from ..families.registry import family_of
from ..families.wrappers import OTHER_HALVES, PREFIXES
from ..gguf.folder import is_gguf_folder, open_checkpoint
from ..spec import DecoderSpec
from .canonical import CanonicalTensors, TensorSources, widened
from .safetensors import DTYPES, Checkpoint
from .stored_tensors import StoredTensors

Shapes = dict[str, tuple[int, ...]]  # by name

PART = 1 << 22  # numbers of a random tensor that one thread draws at a time
NOT_WEIGHTS = re.compile(r".*\.(rotary_emb\.inv_freq|(attention|attn)\.(bias|masked_bias))")  # in old checkpoints
DTYPE_OF = {"F16": "float16", "BF16": "bfloat16"}  # of weights -> of config.json, which names none; else float32


class TensorSource(Protocol):
    """A source of tensors by canonical name: a checkpoint, or random numbers."""

    warnings: list[str]  # what is unusual about the files

    def is_mapped(self, name: str) -> bool:
        """Whether the tensor's array is a view of a file's private map, which takes no memory before it is read."""

    def stored_name(self, name: str) -> str:
        """The name of the tensor in its file, for error messages."""

    def array(self, name: str) -> NDArray[Any]:
        """The tensor; bfloat16 has the dtype `safetensors.BFLOAT16`. Do not write to it."""

    def forget(self, name: str) -> None:
        """Releases the tensor's memory, once it is copied."""


def open_source(root: Path, spec: DecoderSpec, load_format: str) -> tuple[TensorSource, DecoderSpec]:
    """The checkpoint in `root` by canonical names, and `spec` with the output layer that its files hold.

    With load_format "dummy" it is seeded random numbers, without reading a file; "auto" is "safetensors". Raises
    CheckpointError naming file and tensor for a missing, extra or misshapen tensor, before any weight is read.
    """
    if load_format == "dummy":
        spec = replace(spec, dtype="float32") if spec.dtype == "auto" else spec
        return _RandomTensors(expected_shapes(spec)), spec
    if load_format not in ("auto", "safetensors"):
        raise ValueError(f"load_format = {load_format!r}: must be 'safetensors' or 'dummy'")
    checkpoint, spec = _open(root, spec)
    family = family_of(spec.family)
    sources = TensorSources(tensors_of(spec), family.names(spec))
    _compare(checkpoint, sources, spec, family)
    if spec.dtype == "auto":
        stored = checkpoint.dtype(sources.stored_name(f"{EMBEDDING}.weight"))
        spec = replace(spec, dtype=DTYPE_OF.get(stored, "float32"))
    return CanonicalTensors(checkpoint, sources), spec


def output_rows(root: Path, spec: DecoderSpec, load_format: str, rows: Sequence[int]) -> NDArray[np.float32]:
    """Rows [R, H] of the output layer, as they are before any quantization. `spec` is that of `open_source`."""
    name, other = f"{EMBEDDING}.weight", f"{HEAD}.weight"
    name, other = (name, other) if spec.head.is_tied else (other, name)
    if load_format == "dummy":
        return np.asarray(_RandomTensors(expected_shapes(spec)).array(name)[list(rows)], np.float32)
    checkpoint, spec = _open(root, spec)
    sources = TensorSources([Target(name, ()), Target(other, ())], family_of(spec.family).names(spec))
    stored = sources.stored_name(name)
    return widened(checkpoint.array(stored if stored in checkpoint.names else sources.stored_name(other))[list(rows)])


def expected_shapes(spec: DecoderSpec) -> Shapes:
    """The canonical name and shape of every tensor of a decoder."""
    return {target.name: target.shape for target in tensors_of(spec)}


def _open(root: Path, spec: DecoderSpec) -> tuple[StoredTensors, DecoderSpec]:
    """The checkpoint with its names as in a whole model, and `spec` with the output layer that it holds."""
    family = family_of(spec.family)
    names, prefix = family.names(spec), f"{family.prefix}."
    checkpoint = _checkpoint(root)
    checkpoint.rename(_name_of_text_half)
    checkpoint.rename(partial(_newer_name, older=family.older_names))
    _check_layers(checkpoint, spec, names, prefix)
    sources = TensorSources(tensors_of(replace(spec, head=replace(spec.head, exists=True, is_tied=False))), names)
    stored = sources.stored_shapes().keys()
    is_bare = sources.stored_name(f"{EMBEDDING}.weight").removeprefix(prefix) in checkpoint.names
    roots = {name.removeprefix(prefix).partition(".")[0] for name in stored if name.startswith(prefix)}
    checkpoint.rename(partial(_name_in_model, stored=stored, prefix=prefix, roots=roots))
    return checkpoint, _with_stored_head(checkpoint, spec, sources, is_bare=is_bare)


def _checkpoint(root: Path) -> StoredTensors:
    if is_gguf_folder(root):
        return open_checkpoint(root)
    return Checkpoint(root)


def _name_of_text_half(name: str) -> str:
    """The name of a tensor without the wrapper around its decoder."""
    prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
    rest = name.removeprefix(prefix)
    return f"model.{rest}" if prefix and not rest.startswith(("model.", "lm_head.")) else rest


def _newer_name(name: str, older: Mapping[str, str]) -> str:
    """The name of a tensor that files of older versions call otherwise."""
    stem, dot, suffix = name.rpartition(".")
    return older.get(stem, stem) + dot + suffix


def _name_in_model(name: str, stored: Collection[str], prefix: str, roots: Collection[str]) -> str:
    """The name of a tensor in a whole model. As in transformers, the prefix may be there or not.

    `stored`: the names of the model's tensors. `roots`: the first parts of those with the prefix, behind it.
    """
    if name not in stored and name.partition(".")[0] in roots:
        return prefix + name
    return rest if (rest := name.removeprefix(prefix)) in stored else name


def _check_layers(checkpoint: StoredTensors, spec: DecoderSpec, names: Names, prefix: str) -> None:
    """Raises CheckpointError if the files hold another number of layers, before anything is made for each layer."""
    sources = TensorSources([Target(f"{DOWN}.weight", ())], names)
    stem, _, _ = sources.stored_name(f"{DOWN}.weight").removeprefix(prefix).partition("*")
    pattern = re.compile(rf"(?:{re.escape(prefix)})?{re.escape(stem)}(\d{{1,9}})\.")
    found = {int(match[1]) for match in map(pattern.match, checkpoint.names) if match}
    num_layers = max(found, default=-1) + 1
    if num_layers != spec.num_layers:
        raise CheckpointError(
            f"config.json ({checkpoint.root}): num_hidden_layers: must be {num_layers}, as many as the files hold, "
            f"not {spec.num_layers}"
        )


def _with_stored_head(
    checkpoint: StoredTensors, spec: DecoderSpec, sources: TensorSources, *, is_bare: bool
) -> DecoderSpec:
    """`spec` with the output layer that the files hold: of the embedding, of its own, or none.

    As in transformers, tensors that differ are both used, even if `tie_word_embeddings` says that they are one, and
    each replaces the other if that is missing. Only a decoder saved by itself, as embedding models are, has none.
    """
    embedding, head = (sources.stored_name(f"{stem}.weight") for stem in (EMBEDDING, HEAD))
    has_embedding, has_head = embedding in checkpoint.names, head in checkpoint.names
    if not spec.head.is_tied:
        return replace(spec, head=replace(spec.head, exists=has_head or not is_bare))
    if has_head and not has_embedding:
        checkpoint.share(embedding, head)
    if not (has_head and has_embedding) or _are_equal(checkpoint, embedding, head):
        return spec
    checkpoint.warnings.append(
        f"config.json: tie_word_embeddings = true, but {head} in {checkpoint.where(head)} differs from "
        f"{embedding}: both are used, as by transformers"
    )
    return replace(spec, head=replace(spec.head, is_tied=False))


def _are_equal(checkpoint: StoredTensors, first: str, second: str) -> bool:
    """Whether two tensors hold the same numbers. Reads both, up to the first difference."""
    kinds = [(checkpoint.shape(name), checkpoint.dtype(name)) for name in (first, second)]
    if kinds[0] != kinds[1] or kinds[0][1] not in DTYPES:
        return False
    one, other = (checkpoint.array(name).reshape(-1).view(np.uint8) for name in (first, second))
    are_equal = all(
        np.array_equal(one[begin : begin + PART], other[begin : begin + PART]) for begin in range(0, len(one), PART)
    )
    checkpoint.forget(second)
    return are_equal


class _RandomTensors:
    """Random tensors in place of a checkpoint: N(0, 0.02), norms 1. A tensor's values depend on its name alone."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.warnings: list[str] = []

    def is_mapped(self, name: str) -> bool:
        return False

    def stored_name(self, name: str) -> str:
        return name

    def array(self, name: str) -> NDArray[Any]:
        if name.endswith("norm.weight"):
            return np.ones(self.shapes[name], np.float32)
        numbers = np.empty(self.shapes[name], np.float32)
        flat = numbers.reshape(-1)
        parts = [flat[begin : begin + PART] for begin in range(0, len(flat), PART)]
        if len(parts) <= 1:
            _draw(name, 0, flat)
            return numbers
        with ThreadPoolExecutor(min(len(parts), os.cpu_count() or 1)) as threads:  # numpy draws without the GIL
            try:
                drawn = threads.map(partial(_draw, name), range(len(parts)), parts)
            except RuntimeError:  # no threads: one part after the other
                threads.shutdown(cancel_futures=True)
                drawn = map(partial(_draw, name), range(len(parts)), parts)
            list(drawn)
        return numbers

    def forget(self, name: str) -> None:
        pass


def _draw(name: str, index: int, part: NDArray[np.float32]) -> None:
    """Fills part `index` of the tensor `name`."""
    text = name if index == 0 else f"{name} {index}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    np.random.Generator(np.random.SFC64(seed)).standard_normal(dtype=np.float32, out=part)
    part *= np.float32(0.02)


def _compare(checkpoint: StoredTensors, sources: TensorSources, spec: DecoderSpec, family: Family) -> None:
    """Raises CheckpointError if the checkpoint's tensors are not those of its configuration."""
    root, names, shapes = checkpoint.root, checkpoint.names, sources.stored_shapes()
    for name, shape in shapes.items():
        if name not in names:
            raise CheckpointError(f"{root}: tensor {name} is missing, which config.json ({spec.family}) requires")
        source = f"{checkpoint.where(name)} ({root}): tensor {name}"
        if checkpoint.shape(name) != shape:
            raise CheckpointError(
                f"{source} is {quoted(list(checkpoint.shape(name)))}, and config.json requires {list(shape)}: "
                f"{_sizes(sources.canonical_name(name), spec)}"
            )
        if checkpoint.dtype(name) not in DTYPES:
            raise CheckpointError(
                f"{source}: dtype {checkpoint.dtype(name)} is not supported; supported: {', '.join(DTYPES)}"
            )
    ignored = []
    head, constants = f"{HEAD}.weight", _constants(checkpoint, family, spec)
    for name in sorted(names - shapes.keys() - constants - {head}):  # a head that is not used is equal to the embedding
        if _is_weight(checkpoint, name, f"{family.prefix}."):
            raise CheckpointError(
                f"{checkpoint.where(name)} ({root}): tensor {shown(name)} is not part of a {spec.family} model "
                f"as config.json describes it{_reason(name, spec)}; the output would be wrong without it"
            )
        if not NOT_WEIGHTS.fullmatch(name):
            ignored.append(shown(name))
    if ignored:
        more = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
        checkpoint.warnings.append(f"tensors that no text is made with are not used: {', '.join(ignored[:3])}{more}")


def _constants(checkpoint: StoredTensors, family: Family, spec: DecoderSpec) -> set[str]:
    """The tensors that hold a number of the family. Raises CheckpointError for another number."""
    expected = {
        pattern.replace("*", str(layer)): number
        for pattern, number in family.constants.items()
        for layer in range(spec.num_layers)
    }
    found = expected.keys() & checkpoint.names
    for name in sorted(found):
        values = widened(checkpoint.array(name)).reshape(-1)
        if not np.allclose(values, expected[name], rtol=0.01, atol=0):
            raise CheckpointError(
                f"{checkpoint.where(name)} ({checkpoint.root}): tensor {name}: must hold {expected[name]:g} in a "
                f"{spec.family} model, not {quoted(values[:3].tolist())}"
            )
    return found


def _is_weight(checkpoint: StoredTensors, name: str, prefix: str) -> bool:
    """Whether a tensor seems to be of the decoder: other heads, other halves and buffers of whole numbers are not."""
    if NOT_WEIGHTS.fullmatch(name) or 0 in checkpoint.shape(name):
        return False
    if name.removeprefix("model.").partition(".")[0] in OTHER_HALVES:
        return False
    return name.startswith((prefix, "model.", "lm_head.")) and checkpoint.dtype(name).startswith(("F", "BF"))


def _sizes(name: str, spec: DecoderSpec) -> str:
    """The keys of config.json from which the shape of a canonical tensor follows, with their values."""
    values = {
        "vocab_size": spec.vocab_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "hidden_size": spec.hidden_size,
    }
    kind = name.split(".")[-2]
    keys = next((keys for kinds, keys in SIZES_OF.items() if kind in kinds.split()), ["hidden_size"])
    return ", ".join(f"{key} = {values[key]}" for key in keys)


def _reason(name: str, spec: DecoderSpec) -> str:
    """The key of config.json that rules out a bias, if there is one."""
    if not name.endswith(".bias"):
        return ""
    key = "mlp_bias" if ".mlp." in name else "attention_bias"
    return f" ({key} = false)" if spec.family in ("llama", "qwen3") else ""


SIZES_OF = {  # parts of a decoder -> keys of the sizes of their weights
    "embed_tokens lm_head": ["vocab_size", "hidden_size"],
    "q_proj o_proj": ["num_attention_heads", "head_dim", "hidden_size"],
    "k_proj v_proj": ["num_key_value_heads", "head_dim", "hidden_size"],
    "q_norm k_norm": ["head_dim"],
    "gate_proj up_proj down_proj": ["intermediate_size", "hidden_size"],
}

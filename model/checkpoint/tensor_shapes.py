"""Opens a decoder's checkpoint by canonical names, which files may call otherwise. No torch.

A wrong checkpoint fails here, before any weight is read; `comparison.py` says why.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from ..families.building import Family
from ..families.names import DOWN, EMBEDDING, HEAD, Target, tensors_of
from ..families.registry import family_of
from ..gguf.folder import is_gguf_folder, open_checkpoint
from ..grouped_matrix import GroupedMatrix
from ..named_tensors import StoredPiece
from ..quantized.formats import format_of
from ..quantized.unpacked import UnpackedCheckpoint
from ..spec import DecoderSpec
from .canonical import CanonicalTensors, TensorSources, widened
from .comparison import check_tensors
from .random_tensors import RandomTensors
from .remote_folder import opened_stream
from .safetensors import DTYPES, Checkpoint
from .stored_tensors import MEMBERS, StoredTensors
from .streamed import StreamedCheckpoint
from .whole_model import WholeModel, newer_name

Shapes = dict[str, tuple[int, ...]]  # by name

PART = 1 << 22  # bytes of two tensors that are compared at a time
DTYPE_OF = {"F16": "float16", "BF16": "bfloat16"}  # of weights -> of config.json, which names none; else float32


class CheckpointChange(Protocol):
    """Changes a checkpoint while it is read, as merging adapters into it does (`lora/merge.py`)."""

    def __call__(self, checkpoint: StoredTensors, spec: DecoderSpec) -> tuple[StoredTensors, DecoderSpec]:
        """The tensors, by their names in a whole model, and the spec of the model that they make."""


class TensorSource(Protocol):
    """A source of tensors by canonical name: a checkpoint, or random numbers."""

    warnings: list[str]  # what is unusual about the files
    packing: str  # how the matrices are packed, as users know it; empty: they are not

    def is_mapped(self, name: str) -> bool:
        """Whether the tensor's array is a view of a file's private map, which takes no memory before it is read."""

    def stored_name(self, name: str) -> str:
        """The name of the tensor in its file, for error messages."""

    def pieces(self, name: str) -> list[StoredPiece]:
        """What is read of the files for a tensor; other tensors may be made of the same."""

    def array(self, name: str) -> NDArray[Any]:
        """The tensor; bfloat16 has the dtype `safetensors.BFLOAT16`. Do not write to it."""

    def grouped(self, name: str) -> GroupedMatrix | str | None:
        """A packed matrix as rows of codes, or why its codes cannot stay packed; None: it is not packed."""

    def forget(self, name: str) -> None:
        """Releases the tensor's memory, once it is copied."""


def open_source(
    root: Path, spec: DecoderSpec, load_format: str, change: CheckpointChange | None = None
) -> tuple[TensorSource, DecoderSpec]:
    """The checkpoint in `root` by canonical names, and `spec` with the output layer that its files hold.

    With load_format "dummy" it is seeded random numbers, without reading a file. Raises
    CheckpointError naming file and tensor for a missing, extra or misshapen tensor, before any weight is read.
    """
    if load_format == "dummy":
        spec = replace(spec, dtype="float32") if spec.dtype == "auto" else spec
        return RandomTensors(expected_shapes(spec)), spec
    stored, spec = _open(root, spec, load_format)
    checkpoint, spec = (stored, spec) if change is None else change(stored, spec)
    family = family_of(spec.family)
    sources = TensorSources(tensors_of(spec), family.names(spec), checkpoint.names)
    check_tensors(checkpoint, sources, spec, family)
    if spec.dtype == "auto":
        dtype = stored.dtype(sources.stored_name(f"{EMBEDDING}.weight"))
        spec = replace(spec, dtype=DTYPE_OF.get(dtype, "float32"))
    return CanonicalTensors(checkpoint, sources), spec


def output_rows(
    root: Path, spec: DecoderSpec, load_format: str, rows: Sequence[int], change: CheckpointChange | None = None
) -> NDArray[np.float32]:
    """Rows [R, H] of the output layer, as they are before any quantization. `spec` is that of `open_source`."""
    name, other = f"{EMBEDDING}.weight", f"{HEAD}.weight"
    name, other = (name, other) if spec.head.is_tied else (other, name)
    if load_format == "dummy":
        return np.asarray(RandomTensors(expected_shapes(spec)).array(name)[list(rows)], np.float32)
    checkpoint, spec = _open(root, spec, load_format)
    checkpoint, spec = (checkpoint, spec) if change is None else change(checkpoint, spec)
    sources = TensorSources([Target(name, ()), Target(other, ())], family_of(spec.family).names(spec))
    stored = sources.stored_name(name)
    return widened(checkpoint.array(stored if stored in checkpoint.names else sources.stored_name(other))[list(rows)])


def expected_shapes(spec: DecoderSpec) -> Shapes:
    """The canonical name and shape of every tensor of a decoder."""
    return {target.name: target.shape for target in tensors_of(spec)}


def _open(root: Path, spec: DecoderSpec, load_format: str) -> tuple[StoredTensors, DecoderSpec]:
    """The checkpoint with its names as in a whole model, and `spec` with the output layer that it holds."""
    family = family_of(spec.family)
    checkpoint = stored_tensors(root, load_format)
    checkpoint.rename(partial(newer_name, family=family))
    _check_layers(checkpoint, spec, family)
    model = WholeModel(spec, family)
    is_bare = model.sources.stored_name(f"{EMBEDDING}.weight").removeprefix(model.prefix) in checkpoint.names
    checkpoint.rename(model.name_of)
    return checkpoint, _with_stored_head(checkpoint, spec, model.sources, is_bare=is_bare)


def stored_tensors(root: Path, load_format: str) -> StoredTensors:
    """The tensors of the checkpoint in `root` as they are stored, packed ones unpacked on access.

    "auto" is what the folder holds; package.module:Source is called with the folder. Raises CheckpointError where the
    folder holds another format.
    """
    if ":" in load_format:
        return _plug_in(root, load_format)
    stream = opened_stream(root)
    kind = "stream" if stream is not None else "gguf" if is_gguf_folder(root) else "safetensors"
    if load_format not in ("auto", kind):
        instead = "stream is for https://, s3://, gs:// and az://" if load_format == "stream" else f"use auto or {kind}"
        raise CheckpointError(f"load_format = {load_format}: {root} holds {kind} weights; {instead}")
    if kind == "gguf":
        return open_checkpoint(root)
    checkpoint = Checkpoint(root) if stream is None else StreamedCheckpoint(root, *stream)
    weights = format_of(root)
    return checkpoint if weights is None else UnpackedCheckpoint(checkpoint, weights)


def _plug_in(root: Path, name: str) -> StoredTensors:
    module, _, attribute = name.partition(":")
    try:
        source: StoredTensors = getattr(import_module(module), attribute)(root)
    except (ImportError, AttributeError) as error:
        problem = f"load_format = {name}: cannot be imported: {error}; must be package.module:Source"
        raise CheckpointError(problem) from None
    lacks = [member for member in MEMBERS if not hasattr(source, member)]
    if lacks:
        raise CheckpointError(f"load_format = {name}: lacks {', '.join(lacks)} of StoredTensors")
    return source


def _check_layers(checkpoint: StoredTensors, spec: DecoderSpec, family: Family) -> None:
    """Raises CheckpointError if the files hold another number of layers, before anything is made for each layer."""
    sources, prefix = TensorSources([Target(f"{DOWN}.weight", ())], family.names(spec)), f"{family.prefix}."
    stem, _, _ = sources.stored_name(f"{DOWN}.weight").removeprefix(prefix).partition("*")
    pattern = re.compile(rf"(?:{re.escape(prefix)})?{re.escape(stem)}(\d{{1,9}})\.")
    found = {int(match[1]) for match in map(pattern.match, checkpoint.names) if match}
    num_layers = max(found, default=-1) + 1
    if num_layers < spec.num_layers or (num_layers > spec.num_layers and not family.has_guessing_layers):
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

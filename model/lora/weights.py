"""The tensors of an adapter by module and kind, and where each lands in the model. No table of names of its own.

PEFT calls a tensor `base_model.model.M.lora_A.weight`, where M is the path of a module of the model. The names of the
family (`families/names.py`) say which tensor of a checkpoint `M.weight` is, and which rows of which linear it becomes.
An adapter with a tensor that lands nowhere is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint.canonical import widened
from ..checkpoint.safetensors import DTYPES, Checkpoint, TensorEntry
from ..checkpoint.whole_model import WholeModel
from ..errors import AdapterError, CheckpointError, quoted, shown
from ..files import checkpoint_file
from .config import AdapterConfig, read_config
from .patterns import full_matches, matches
from .tensor_file import Pauses, ReadFile

TENSORS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
A, B, B_BIAS, MAGNITUDE = "lora_A", "lora_B", "lora_B.bias", "lora_magnitude_vector"
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
BASE, BASE_BIAS, TOKENS, WEIGHT, BIAS = "base_layer", "base_layer.bias", "trainable_tokens_delta", "weight", "bias"
KINDS = {  # ends of names -> kinds, the longest first
    ".token_adapter.trainable_tokens_delta": TOKENS,
    ".trainable_tokens_delta": TOKENS,
    ".lora_magnitude_vector.weight": MAGNITUDE,
    ".lora_magnitude_vector": MAGNITUDE,
    ".lora_embedding_A": EMBEDDING_A,
    ".lora_embedding_B": EMBEDDING_B,
    ".lora_A.weight": A,
    ".lora_B.weight": B,
    ".lora_B.bias": B_BIAS,
    ".base_layer.weight": BASE,
    ".base_layer.bias": BASE_BIAS,
    ".weight": WEIGHT,
    ".bias": BIAS,
}
USUAL_END = ".lora_A.weight"  # as long as that of B, and the end of no longer one
UPDATES = (A, B, EMBEDDING_A, EMBEDDING_B)


@dataclass(slots=True)
class AdaptedModule:
    """A module of the model that an adapter changes."""

    path: str  # as the adapter calls it, without PEFT's prefix
    stored: str  # the name of its weight in a whole checkpoint
    tensors: dict[str, str] = field(default_factory=dict)  # kind -> name in the adapter's file
    scale: float = 0.0  # multiplies B A; set for modules with an update

    @property
    def label(self) -> str:
        """For messages: "layer 3 q_proj"."""
        pieces = self.path.split(".")
        number = next((piece for piece in pieces if piece.isdigit()), None)
        return self.path if number is None else f"layer {number} {pieces[-1]}"


class AdapterFiles:
    """An adapter's files, checked: every tensor is of a known kind and of a module that the model has."""

    def __init__(self, root: Path, model: WholeModel, name: str, *, model_name: str = "") -> None:
        """`model_name` is that of the served model, for messages. Raises AdapterError."""
        self.config: AdapterConfig = read_config(root, name)
        self.pause = Pauses()
        self._shard = _open(root, self.config, self.pause)
        self._file = Checkpoint(root, [self._shard])
        self.model = model
        self.modules: dict[str, AdaptedModule] = {}  # by path
        for tensor in sorted(self._file.names):
            self.pause()
            self._place(tensor, model_name)
        if not self.modules:
            self.config.fail("holds no tensor that this model uses")
        self._check_targets()
        self._set_scales()

    def check_shape(self, module: AdaptedModule, kind: str, *shape: int) -> None:
        """Raises AdapterError for a tensor of another shape or of a dtype that weights do not have."""
        tensor = module.tensors[kind]
        stored, dtype = self._file.shape(tensor), self._file.dtype(tensor)
        if stored != shape:
            self.config.fail(f"{kind} of {module.label} is {quoted(list(stored))}, this model needs {list(shape)}")
        if dtype not in DTYPES:
            self.config.fail(f"{kind} of {module.label} is of dtype {dtype}; supported: {', '.join(DTYPES)}")

    def array(self, module: AdaptedModule, kind: str) -> NDArray[np.float32]:
        """A tensor of a module in float32; `check_shape` has seen it. Raises AdapterError for NaN or infinity."""
        try:
            found = widened(self._file.array(module.tensors[kind]))
        except CheckpointError as error:
            self.config.fail(str(error))
        if not np.isfinite(found).all():
            self.config.fail(f"{kind} of {module.label} holds NaN or infinity")
        return found

    def entry(self, module: AdaptedModule, kind: str) -> TensorEntry:
        """Where a tensor lies in the file."""
        return self._shard.entries[module.tensors[kind]]

    def flat(self, begin: int, end: int, dtype: str) -> NDArray[Any]:
        """The numbers of successive tensors of one dtype, [N], as `Checkpoint.array` has them. The array is new.

        Raises AdapterError.
        """
        try:
            numbers = np.frombuffer(self._shard.read(begin, end), DTYPES[dtype])
        except CheckpointError as error:
            self.config.fail(str(error))
        return numbers.astype(np.float32) if dtype == "F64" else numbers

    def dtype(self, module: AdaptedModule, kind: str) -> str:
        """The dtype of a tensor by safetensors' name."""
        return self._file.dtype(module.tensors[kind])

    def shape(self, module: AdaptedModule, kind: str) -> tuple[int, ...]:
        return self._file.shape(module.tensors[kind])

    def forget(self, module: AdaptedModule) -> None:
        """Releases the memory of a module's tensors, once they are used."""
        for tensor in module.tensors.values():
            self._file.forget(tensor)

    def _place(self, tensor: str, model_name: str) -> None:
        fail = self.config.fail
        end = tensor[-len(USUAL_END) :]
        end = end if end in KINDS else next((end for end in KINDS if tensor.endswith(end)), "")
        if not end or not tensor.startswith(PREFIX) or not tensor.isprintable():
            fail(f"tensor {shown(tensor)} is of no known kind; it may change what the adapter computes")
        path, kind = tensor.removeprefix(PREFIX).removesuffix(end), KINDS[end]
        stored = self.model.weight_of(path)
        if stored is None:
            origin = f": it was made for {quoted(self.config.parent)}" if self.config.parent else ""
            served = f", this is {quoted(model_name)}" if origin and model_name else ""
            fail(f"changes {shown(path)}, which this model has not{origin}{served}")
        module = self.modules.setdefault(path, AdaptedModule(path, stored))
        if kind in module.tensors:
            fail(f"tensors {shown(module.tensors[kind])} and {shown(tensor)} are the same; keep one")
        module.tensors[kind] = tensor

    def _check_targets(self) -> None:
        """Refuses an update outside `target_modules`, which PEFT would leave out without a word."""
        config = self.config
        paths = [path for path, module in self.modules.items() if any(kind in module.tensors for kind in UPDATES)]
        targets = config.target_modules
        heads = {index for index, path in enumerate(paths) if self.modules[path].stored == self.model.head}
        everything = set(range(len(paths)))
        inside = everything - heads if targets == "all-linear" else self._chosen(targets, paths)
        inside |= heads if config.is_tied else set()  # what was trained of the embedding is written for the head, too
        inside -= self._chosen(config.exclude_modules, paths)
        if config.layers_to_transform:
            inside = {index for index in inside if _layer(paths[index]) in config.layers_to_transform}
        if left := [path for index, path in enumerate(paths) if index not in inside]:
            config.fail(f"changes {shown(left[0])}, which its target_modules leave out; PEFT would not apply it")

    def _chosen(self, modules: str | tuple[str, ...] | None, paths: Sequence[str]) -> set[int]:
        if isinstance(modules, str):
            return full_matches([modules], paths, self.config.fail)[0]
        names = {*(modules or ())}
        return {index for index, path in enumerate(paths) if not names.isdisjoint(_ends(path))}

    def _set_scales(self) -> None:
        """Sets the scale of each update, and compares the ranks of tensors with those of the file."""
        config = self.config
        found = [module for module in self.modules.values() if any(kind in module.tensors for kind in UPDATES)]
        patterns, paths = [*config.rank_pattern, *config.alpha_pattern], [module.path for module in found]
        hits = matches(patterns, paths, config.fail)
        for index, module in enumerate(found):
            self.pause()
            said = [pattern for pattern, hit in zip(patterns, hits, strict=True) if index in hit]
            rank = next((config.rank_pattern[one] for one in said if one in config.rank_pattern), config.rank)
            alpha = next((config.alpha_pattern[one] for one in said if one in config.alpha_pattern), config.alpha)
            for first, second in ((A, B), (EMBEDDING_A, EMBEDDING_B)):
                self._check_pair(module, first, second, rank)
            module.scale = config.scale(rank, alpha)

    def _check_pair(self, module: AdaptedModule, first: str, second: str, rank: int) -> None:
        fail = self.config.fail
        if (first in module.tensors) != (second in module.tensors):
            fail(f"{module.label} has only one of {first} and {second}; fetch the files again")
        if first in module.tensors:
            shape = self.shape(module, first)
            if len(shape) != 2 or shape[0] != rank or 0 in shape:
                fail(f"{first} of {module.label} is {quoted(list(shape))}, and its config says rank {rank}")


def _ends(path: str) -> list[str]:
    """The path, and what follows each of its dots."""
    pieces = path.split(".")
    return [".".join(pieces[index:]) for index in range(len(pieces))]


def _layer(path: str) -> int | None:
    """The first number in the path of a module."""
    return next((int(piece) for piece in path.split(".") if piece.isascii() and piece.isdigit()), None)


def _open(root: Path, config: AdapterConfig, pause: Pauses) -> ReadFile:
    try:
        if checkpoint_file(root, TENSORS) is None:
            if (root / PICKLE).exists():
                config.fail(f"{PICKLE} is a pickle; convert it to safetensors")
            config.fail(f"{root} holds no {TENSORS}")
        return ReadFile(root, TENSORS, pause)
    except CheckpointError as error:
        raise AdapterError(f"adapter {quoted(config.name)}: {error}") from None

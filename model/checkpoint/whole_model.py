"""The names that tensors have in a whole model of a family, whatever the files call them. No torch.

Files of wrappers, of older versions and of decoders saved by themselves have other names, and so have adapters for
such models.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property

from ..families.building import Family
from ..families.names import EMBEDDING, HEAD, tensors_of
from ..families.registry import family_of
from ..families.wrappers import PREFIXES
from ..spec import DecoderSpec
from .canonical import TensorSources


class WholeModel:
    """The tensors of a decoder by the names of its checkpoints, the output layer included."""

    def __init__(self, spec: DecoderSpec, family: Family | None = None) -> None:
        """`family`: None = that of the spec."""
        self.family = family_of(spec.family) if family is None else family
        self.prefix = f"{self.family.prefix}."
        whole = replace(spec, head=replace(spec.head, exists=True, is_tied=False))
        self.sources = TensorSources(tensors_of(whole), self.family.names(spec))
        self.shapes = self.sources.stored_shapes()  # by name
        self.embedding, self.head = (self.sources.stored_name(f"{stem}.weight") for stem in (EMBEDDING, HEAD))
        inside = (name.removeprefix(self.prefix) for name in self.shapes if name.startswith(self.prefix))
        self._weights: dict[str, str] = {}  # of modules that were asked for; each has few spellings
        self._roots = {name.partition(".")[0] for name in inside}

    @cached_property
    def transposed(self) -> frozenset[str]:
        """Names of the matrices that are stored [columns, rows]."""
        parts = (part for name in self.sources.targets for part in self.sources.parts(name))
        return frozenset(part.stem for part in parts if part.is_transposed)

    @cached_property
    def fused(self) -> frozenset[str]:
        """Names of the tensors of which several are made here."""
        stems = Counter(part.stem for name in self.sources.targets for part in self.sources.parts(name))
        return frozenset(stem for stem, count in stems.items() if count > 1)

    def name_of(self, stored: str) -> str:
        """The name of a tensor, of `newer_name`. As in transformers, the prefix may be there or not."""
        if stored not in self.shapes and stored.partition(".")[0] in self._roots:
            return self.prefix + stored
        return rest if (rest := stored.removeprefix(self.prefix)) in self.shapes else stored

    def weight_of(self, path: str) -> str | None:
        """The name of the weight of a module that an adapter calls `path`; None: the model has no such module."""
        found = self._weights.get(path)
        if found is None:
            name = self.name_of(newer_name(f"{path}.weight", self.family))
            if name in self.shapes:
                found = self._weights[path] = name
        return found


def newer_name(stored: str, family: Family) -> str:
    """The name of a tensor without the wrapper around its decoder, and as newer files have it."""
    prefix = next((prefix for prefix in PREFIXES if stored.startswith(prefix)), "")
    rest = stored.removeprefix(prefix)
    name = f"model.{rest}" if prefix and not rest.startswith(("model.", "lm_head.")) else rest
    stem, dot, suffix = name.rpartition(".")
    return family.older_names.get(stem, stem) + dot + suffix

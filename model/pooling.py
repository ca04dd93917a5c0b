"""The pooling of a checkpoint: which positions of a text make its embedding, and what happens to that vector.

Read from the files that sentence-transformers writes beside a model, and from config.json. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from .errors import CheckpointError
from .files import read_json
from .sentence_files import PoolingKind, SentenceFiles, Similarity

Role = Literal["query", "document"]  # of a text in a search

_ROLE_PROMPTS: dict[str, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """How a model's embeddings are made, from the checkpoint.

    The embeddings of a "matryoshka" model may be cut: to the lengths in `dimensions`, or to any length if that is
    empty. None = they cannot be cut.
    """

    kind: PoolingKind
    size: int  # numbers in a whole embedding
    dimensions: tuple[int, ...] | None = None
    normalizes: bool = True  # embeddings have length 1, unless a request says otherwise
    truncate_dim: int | None = None  # leading numbers that are kept, unless a request says otherwise
    max_tokens: int | None = None  # longer texts are cut
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: put before a text
    default_prompt: str = ""
    includes_prompt: bool = True  # in the pooling
    similarity: Similarity = "cosine"  # of two embeddings, as a score

    def allows(self, dimensions: int) -> bool:
        """Whether embeddings may be cut to `dimensions` numbers."""
        if dimensions in (self.size, self.truncate_dim):
            return True
        if self.dimensions is None or not 1 <= dimensions <= self.size:
            return False
        return not self.dimensions or dimensions in self.dimensions

    def describe_dimensions(self) -> str:
        """The allowed lengths, for an error message."""
        if self.dimensions is None:
            return f"this model's embeddings have {self.size} numbers and were not trained to be cut; leave it out"
        if self.dimensions:
            return f"must be one of {', '.join(map(str, self.dimensions))}, or {self.size}"
        return f"must be from 1 to {self.size}"

    def prompt(self, name: str | None, role: Role | None) -> str:
        """What is put before a text: the prompt of a name, else of the text's role, else the default."""
        if name is not None:
            return self.prompts[name]
        known = [each for each in _ROLE_PROMPTS.get(role or "", ()) if each in self.prompts]
        return self.prompts[known[0]] if known else self.default_prompt


def read_pooling(
    root: Path, files: SentenceFiles, size: int, default: PoolingKind, override: PoolingKind | None = None
) -> PoolingConfig:
    """The pooling of the checkpoint in `root`, whose embeddings have `size` numbers.

    `override` replaces the checkpoint's pooling; `default` applies if it has none. Raises CheckpointError for values
    that are out of range.
    """
    if files.pooling_problem and override is None:
        raise CheckpointError(files.pooling_problem)
    if files.truncate_dim is not None and files.truncate_dim > size:
        raise CheckpointError(
            f"config_sentence_transformers.json ({root}): truncate_dim = {files.truncate_dim}: must be at most {size}"
        )
    return PoolingConfig(
        kind=override or files.pooling or default,
        size=size,
        dimensions=_dimensions(root / files.folder, size),
        normalizes=files.normalizes,
        truncate_dim=files.truncate_dim,
        max_tokens=files.max_tokens,
        prompts=files.prompts,
        default_prompt=files.default_prompt,
        includes_prompt=files.includes_prompt,
        similarity=files.similarity,
    )


def read_decoder_pooling(
    root: Path, files: SentenceFiles, size: int, override: PoolingKind | None = None
) -> PoolingConfig:
    """As `read_pooling`, for a decoder. Raises CheckpointError for what only encoders support."""
    config = read_json(root, "config.json") or {}
    made = read_pooling(root, files, size, "last", override)
    problem = None
    if files.folder or files.dense:
        what = f"{files.folder or files.dense[0]}: another folder of the model, and Dense,"
        problem = f"modules.json ({root}): {what} are"
    elif made.kind in ("max", "weighted_mean"):
        problem = f"{root}: pooling_mode for {made.kind}: is"
    elif not made.includes_prompt and any(made.prompts.values()):
        problem = f"{root}: include_prompt = false with prompts: is"
    if problem is not None:
        raise CheckpointError(f"{problem} supported for encoder models, and not for a {config.get('model_type')}")
    return made if files.is_present else replace(made, max_tokens=None)


def _dimensions(root: Path, size: int) -> tuple[int, ...] | None:
    values: Mapping[str, Any] = read_json(root, "config.json") or {}
    listed = values.get("matryoshka_dimensions")
    if isinstance(listed, list) and listed:
        if not all(type(item) is int and 1 <= item <= size for item in listed):
            raise CheckpointError(f"config.json ({root}): matryoshka_dimensions: must list lengths from 1 to {size}")
        return tuple(sorted(listed))
    return () if values.get("is_matryoshka") is True else None

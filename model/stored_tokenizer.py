"""A BPE tokenizer in three files, which are read in less time and memory than one tokenizer.json.

In a tokenizer.json each merge is two texts. Here it is two ids, and the texts of all tokens are one list. Any folder
may hold such files: what they say is checked as a tokenizer.json would be.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import CheckpointError
from .files import read_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

STEPS, TOKENS, MERGES = "tokenizer.steps.json", "tokenizer.tokens.json", "tokenizer.merges.npy"
SETTINGS = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")  # of the model


@dataclass(frozen=True, slots=True, eq=False)
class StoredTokenizer:
    """The parts of a tokenizer. `tokens`: the vocabulary by id, each text once."""

    steps: Mapping[str, Any]  # a tokenizer.json without vocabulary and merges
    tokens: Sequence[str]
    merges: NDArray[np.int32]  # [M, 2] ids of the tokens that are merged

    def write(self, root: Path) -> None:
        """Writes the files into a folder."""
        (root / STEPS).write_text(json.dumps(self.steps, ensure_ascii=False), encoding="utf-8")
        (root / TOKENS).write_text(json.dumps(self.tokens, ensure_ascii=False), encoding="utf-8")
        np.save(root / MERGES, self.merges, allow_pickle=False)

    @classmethod
    def read(cls, root: Path) -> StoredTokenizer | None:
        """The tokenizer of a folder; None: it has none in this form. Raises CheckpointError."""
        raw = [read_bytes(root, name) for name in (STEPS, TOKENS, MERGES)]
        steps, tokens, merges = raw
        if steps is None or tokens is None or merges is None:
            return None
        try:
            return cls(
                *_checked(json.loads(steps), json.loads(tokens), np.load(io.BytesIO(merges), allow_pickle=False))
            )
        except (ValueError, TypeError, EOFError, RecursionError) as error:
            raise CheckpointError(
                f"{STEPS} ({root}): cannot be used: {str(error)[:200]}; remove the folder, and serve the model again"
            ) from None

    def make(self) -> Tokenizer:
        """The tokenizer. Raises what the tokenizers library does, which is Exception itself."""
        from tokenizers import AddedToken, Tokenizer, models

        model = self.steps["model"]
        made = Tokenizer.from_str(json.dumps({**self.steps, "added_tokens": [], "model": {**model, **_EMPTY}}))
        made.model = models.BPE(
            vocab=dict(zip(self.tokens, range(len(self.tokens)), strict=True)),
            merges=_Pairs(self.tokens, self.merges),
            **{name: model[name] for name in SETTINGS},
        )
        added = [{key: value for key, value in token.items() if key != "id"} for token in self.steps["added_tokens"]]
        made.add_tokens([AddedToken(**token) for token in added])
        return made


class _Pairs(Sequence[tuple[str, str]]):
    """The texts of merges, each made when it is asked for: a list of them all would take 60 MB for 500,000 merges."""

    def __init__(self, tokens: Sequence[str], merges: NDArray[np.int32]) -> None:
        self._tokens, self._merges = tokens, merges

    def __len__(self) -> int:
        return len(self._merges)

    def __getitem__(self, index: Any) -> Any:
        left, right = self._merges[index].tolist()
        return self._tokens[left], self._tokens[right]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        left, right = (map(self._tokens.__getitem__, np.ascontiguousarray(ids).data) for ids in self._merges.T)
        return zip(left, right, strict=True)


_EMPTY: Mapping[str, Any] = {"vocab": {}, "merges": []}


def _checked(steps: Any, tokens: Any, merges: Any) -> tuple[Mapping[str, Any], list[str], NDArray[np.int32]]:
    """The parts. Raises ValueError for what is none."""
    if not isinstance(tokens, list) or not all(type(token) is str for token in tokens):
        raise ValueError(f"{TOKENS} must be a list of texts")
    if merges.dtype != np.int32 or merges.ndim != 2 or merges.shape[1] != 2:
        raise ValueError(f"{MERGES} must be pairs of ids")
    if merges.size and not 0 <= merges.min() <= merges.max() < len(tokens):
        raise ValueError(f"{MERGES} has ids beyond {len(tokens)} tokens")
    if not isinstance(steps, dict) or not isinstance(model := steps.get("model"), dict) or model.get("type") != "BPE":
        raise ValueError(f"{STEPS} must be the steps of a BPE tokenizer")
    if missing := [name for name in SETTINGS if name not in model]:
        raise ValueError(f"{STEPS} has no {missing[0]}")
    if not isinstance(added := steps.get("added_tokens"), list) or not all(isinstance(token, dict) for token in added):
        raise ValueError(f"{STEPS}: added_tokens must be a list of tokens")
    return steps, tokens, merges

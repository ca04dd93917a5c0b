"""A model's tokens as bytes: what a grammar's compiler must know of a tokenizer. Plain data; no compiler here."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens that the rows of a model's output layer stand for.

    Ids from `len(tokens)` to `vocab_size`, and those of empty tokens, mean nothing; tokens past `vocab_size` can not be
    chosen. `tokenizer_json` is what a compiler may cut text with in the model's own way.
    """

    tokens: Sequence[bytes]  # what each adds to the text
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    vocab_size: int  # logits of a row
    tokenizer_json: str | None = None

    def to_bytes(self) -> bytes:
        """All but `tokenizer_json`, for another process: counts, then ids, lengths and spellings."""
        columns = (sorted(self.special_ids), self.eos_ids, [len(token) for token in self.tokens])
        counts = struct.pack("<4I", self.vocab_size, *map(len, columns))
        return b"".join([counts, *(np.array(column, "<u4").tobytes() for column in columns), *self.tokens])

    @classmethod
    def from_bytes(cls, data: bytes) -> Vocabulary:
        """What `to_bytes` made."""
        vocab_size, *counts = struct.unpack_from("<4I", data)
        columns, at = [], 16
        for count in counts:
            columns.append(np.frombuffer(data, "<u4", count, at).tolist())
            at += 4 * count
        tokens = []
        for length in columns[2]:
            tokens.append(data[at : at + length])
            at += length
        return cls(tokens, frozenset(columns[0]), tuple(columns[1]), vocab_size)

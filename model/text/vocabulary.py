"""A model's tokens as bytes: the part of a tokenizer that a grammar's compiler needs. Plain data."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The tokens of the rows of a model's output layer.

    Ids in [len(tokens), vocab_size), and those of empty tokens, have no meaning; tokens from `vocab_size` on cannot be
    chosen. With `tokenizer_json` a compiler can tokenize text as the model does.
    """

    tokens: Sequence[bytes]  # the bytes that each adds to the text
    special_ids: frozenset[int]
    eos_ids: tuple[int, ...]
    vocab_size: int  # logits in a row
    tokenizer_json: str | None = None

    def to_bytes(self) -> bytes:
        """All but `tokenizer_json`, for another process: counts, then ids, lengths and the tokens' bytes."""
        columns = (sorted(self.special_ids), self.eos_ids, [len(token) for token in self.tokens])
        counts = struct.pack("<4I", self.vocab_size, *map(len, columns))
        return b"".join([counts, *(np.array(column, "<u4").tobytes() for column in columns), *self.tokens])

    @classmethod
    def from_bytes(cls, data: bytes) -> Vocabulary:
        """The inverse of `to_bytes`."""
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

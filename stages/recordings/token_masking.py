"""Masks token ids: numbers that show where texts are equal, but not their content.

A recording must show which prompts and answers begin with the same tokens, as the prefix cache decides by it, without
holding the text. So each token is replaced by a hash of itself and all tokens before it. The hash is keyed with a
secret that is never stored. Two texts have the same numbers up to their first difference, and different ones from there
on (except with probability 2**-31). No number stands for one token, so frequencies reveal nothing.

For each chunk of CHUNK tokens, a keyed blake2b of everything before it gives new keys. Inside a chunk the numbers are a
polynomial hash under those keys, mixed. That takes a few numpy operations for all tokens at once, and does not hold the
interpreter lock as a loop would.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..messages import Ints

Words = NDArray[np.uint64]

CHUNK = 256  # tokens
FIRST_ROWS = 64  # of the table of answers, which grows


class Veil:
    """Masks prompts as a whole, and answers token by token.

    Each sequence is begun once and ended once.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._rows: dict[int, int] = {}  # sequence -> its row below
        self._free: list[int] = []
        self._digests: list[bytes] = []  # [R] of all chunks before the current one
        self._table = _Table(0)
        self._last: tuple[Sequence[int], NDArray[np.intp]] | None = None  # sequences and rows, until they change

    def __len__(self) -> int:
        """The number of sequences begun and not ended."""
        return len(self._rows)

    def hide(self, token_ids: Ints) -> Ints:
        """Masks a whole text, [P]."""
        return _hash(self._chunks(token_ids)[0], token_ids)

    def begin(self, sequence_ids: Sequence[int], token_ids: Ints) -> Ints:
        """Masks the prompt of these sequences, [P]. Their answers continue it."""
        digests, filling = self._chunks(token_ids)
        hidden = _hash(digests, token_ids)
        rest = token_ids[len(token_ids) // CHUNK * CHUNK :]
        for sequence_id in sequence_ids:
            if sequence_id in self._rows:
                continue  # begun before
            row = self._take_row(sequence_id)
            self._digests[row] = filling
            self._table.begin(row, filling, rest)
        return hidden

    def go_on(self, sequence_ids: Sequence[int], token_ids: NDArray[Any]) -> Ints:
        """Masks the next token of the answer of each, [L]; 0 for sequences that have ended."""
        if self._last is None or self._last[0] != sequence_ids:
            rows = np.array([self._rows.get(sequence_id, -1) for sequence_id in sequence_ids], np.intp)
            self._last = sequence_ids, rows
        rows = self._last[1]
        is_known = rows >= 0
        known = rows[is_known]
        hidden = np.zeros(len(rows), np.int32)
        hidden[is_known] = self._table.append(known, token_ids[is_known])
        for row in known[self._table.count[known] == CHUNK].tolist():
            self._digests[row] = self._next(self._digests[row], self._table.tokens[row])
            self._table.begin(row, self._digests[row], self._table.tokens[row, :0])
        return hidden

    def end(self, sequence_id: int) -> None:
        """Ends a sequence. Does nothing if it has ended."""
        row = self._rows.pop(sequence_id, None)
        if row is not None:
            self._free.append(row)
            self._last = None

    def name(self, text: str) -> str:
        """Masks a text that only needs to be compared for equality; "" stays."""
        return hashlib.blake2b(text.encode(), key=self._secret, digest_size=8).hexdigest() if text else ""

    def _take_row(self, sequence_id: int) -> int:
        if not self._free:
            grown = _Table(max(FIRST_ROWS, 2 * len(self._digests)))
            grown.copy(self._table, len(self._digests))
            self._free = list(range(len(grown.count) - 1, len(self._digests) - 1, -1))
            self._digests += [b""] * len(self._free)
            self._table = grown
        row = self._rows[sequence_id] = self._free.pop()
        self._last = None
        return row

    def _chunks(self, token_ids: Ints) -> tuple[list[bytes], bytes]:
        """(The digest before each chunk, the digest before the chunk to fill next).

        A partly filled chunk counts.
        """
        digests = [hashlib.blake2b(key=self._secret, digest_size=16).digest()]
        for begin in range(CHUNK, len(token_ids) + 1, CHUNK):
            digests.append(self._next(digests[-1], token_ids[begin - CHUNK : begin]))
        return digests[: -(-len(token_ids) // CHUNK)], digests[-1]

    def _next(self, digest: bytes, token_ids: Ints) -> bytes:
        text = digest + token_ids.astype(np.int32).tobytes()
        return hashlib.blake2b(text, key=self._secret, digest_size=16).digest()


class _Table:
    """The current chunk of each answer, columnar."""

    def __init__(self, num_rows: int) -> None:
        self.count = np.zeros(num_rows, np.intp)  # tokens in the chunk
        self.tokens = np.zeros((num_rows, CHUNK), np.int32)
        self.factor, self.mask = np.zeros(num_rows, np.uint64), np.zeros(num_rows, np.uint64)
        self.power, self.sum = np.zeros(num_rows, np.uint64), np.zeros(num_rows, np.uint64)

    def copy(self, other: _Table, num_rows: int) -> None:
        for name in ("count", "tokens", "factor", "mask", "power", "sum"):
            getattr(self, name)[:num_rows] = getattr(other, name)[:num_rows]

    def begin(self, row: int, digest: bytes, token_ids: Ints) -> None:
        (self.factor[row],), (self.mask[row],) = _keys([digest])
        self.count[row], self.power[row], self.sum[row] = 0, self.factor[row], 0
        for token in token_ids.tolist():
            self.append(np.array([row]), np.array([token]))

    def append(self, rows: NDArray[np.intp], token_ids: NDArray[Any]) -> Ints:
        self.tokens[rows, self.count[rows]] = token_ids
        self.count[rows] += 1
        self.sum[rows] += (token_ids.astype(np.uint64) + np.uint64(1)) * self.power[rows]
        self.power[rows] *= self.factor[rows]
        return _mix(self.sum[rows] ^ self.mask[rows])


def _keys(digests: Sequence[bytes]) -> tuple[Words, Words]:
    """(factor, mask) of each chunk, [C] each."""
    words = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
    return words[:, 0] | np.uint64(1), words[:, 1]


def _hash(digests: Sequence[bytes], token_ids: Ints) -> Ints:
    """The masked tokens of a text, [P]. `digests` are those before its chunks."""
    if not len(token_ids):
        return np.zeros(0, np.int32)
    factor, mask = _keys(digests)
    padded = np.zeros(len(digests) * CHUNK, np.uint64)
    padded[: len(token_ids)] = token_ids.astype(np.uint64) + np.uint64(1)
    powers = np.cumprod(np.broadcast_to(factor[:, None], (len(digests), CHUNK)), axis=1, dtype=np.uint64)
    sums = np.cumsum(padded.reshape(len(digests), CHUNK) * powers, axis=1, dtype=np.uint64)
    return _mix(sums ^ mask[:, None]).reshape(-1)[: len(token_ids)]


def _mix(z: Words) -> Ints:
    """Splitmix64's finalizer, cut to 31 bits."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    hidden: Ints = (z >> np.uint64(33)).astype(np.int32)
    return hidden

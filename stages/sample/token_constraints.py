"""Token constraints: `allowed_token_ids` and `bad_words`, by slot.

Used on the device thread only. Rows with constraints are processed one by one, since they are few. The tokenize stage
turns bad words into ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..device.arrays import Array
from ..messages import Indices, Ints, Started

Longs = NDArray[np.int64]


@dataclass(slots=True)
class _Constraint:
    """The constraints of one row."""

    allowed: Longs | None  # only these ids; None: any
    bad_words: Sequence[tuple[int, ...]]  # token sequences that may not occur in the answer
    newest: list[int]  # the answer's last tokens: one fewer than the longest bad word has
    allowed_mask: Ints | None = None  # [W] `allowed` as a mask, once it was needed

    def forbidden(self) -> list[int]:
        """The tokens that would complete a bad word now."""
        return [word[-1] for word in self.bad_words if self._ends_with(word[:-1])]

    def _ends_with(self, begin: tuple[int, ...]) -> bool:
        return not begin or tuple(self.newest[-len(begin) :]) == begin


class TokenConstraints:
    """The constraints of the running sequences. `is_limited` [S] marks the slots that have some."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.is_limited = np.zeros(num_slots, np.bool_)
        self._vocab_size = vocab_size
        self.depends_on_tokens = np.zeros(num_slots, np.bool_)  # [S] a bad word has several tokens
        self._limits: dict[int, _Constraint] = {}
        self._has_bad_words = np.zeros(num_slots, np.bool_)

    def start(self, started: Started) -> bool:
        """Assigns a slot to a sequence, and discards the slot's old state.

        Returns whether it has constraints.
        """
        slot, params = started.slot, started.params
        self._limits.pop(slot, None)
        has_bad_words = len(params.bad_words_token_ids) > 0
        self.is_limited[slot] = params.allowed_token_ids is not None or has_bad_words
        self._has_bad_words[slot] = has_bad_words
        self.depends_on_tokens[slot] = max(map(len, params.bad_words_token_ids), default=1) > 1
        if self.is_limited[slot]:
            self._limits[slot] = self._limit(started)
        return bool(self.is_limited[slot])

    def _limit(self, started: Started) -> _Constraint:
        params, answer = started.params, started.token_ids[started.num_prompt :]
        bad_words = [word for word in params.bad_words_token_ids if max(word) < self._vocab_size]
        longest = max(map(len, bad_words), default=1) - 1
        newest = answer[-longest:].tolist() if longest else []
        allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64)
        return _Constraint(allowed, bad_words, newest)

    def apply(self, slots: Indices, logits: Array) -> None:
        """Sets to -inf, in place, the tokens that the rows of `slots` may not choose.

        `logits` [n, V] f32.
        """
        for row in np.flatnonzero(self.is_limited[slots]).tolist():
            limit = self._limits[int(slots[row])]
            if limit.allowed is not None:
                kept = logits[row, limit.allowed]
                logits[row] = -math.inf
                logits[row, limit.allowed] = kept
            if forbidden := limit.forbidden():
                logits[row, forbidden] = -math.inf

    def restrict(self, slot: int, mask: Ints) -> None:
        """As `apply` for a slot with constraints: clears the bits of such tokens in `mask` [W].

        Bit t % 32 of word t // 32 is token t.
        """
        limit = self._limits[slot]
        if limit.allowed is not None:
            if limit.allowed_mask is None:
                limit.allowed_mask = _mask_of(limit.allowed, len(mask))
            mask &= limit.allowed_mask
        if forbidden := limit.forbidden():
            mask &= ~_mask_of(np.array(forbidden, np.int64), len(mask))

    def note(self, slots: Indices, token_ids: Indices) -> None:
        """Records the token of each slot."""
        for row in np.flatnonzero(self._has_bad_words[slots]).tolist():
            limit = self._limits[int(slots[row])]
            longest = max(map(len, limit.bad_words), default=1) - 1
            limit.newest = [*limit.newest, int(token_ids[row])][-longest:] if longest else []


def _mask_of(ids: Longs, num_words: int) -> Ints:
    """[W] a mask with the bits of `ids`, which need not differ."""
    bits = np.zeros(32 * num_words, np.uint8)
    bits[ids] = 1
    mask: Ints = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32, copy=False)
    return mask

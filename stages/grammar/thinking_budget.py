"""Thinking budgets: limits the tokens of an answer's thinking section.

When the budget is used up, the closing marker is forced token by token. Columnar: rows without a budget cost nothing;
all others together cost a dozen numpy operations a step. Used on the device thread only. The markers of each model are
given as token ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..params import MAX_MARKER_TOKENS, ThinkingBudget

Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]


OUTSIDE, INSIDE = 0, 1  # of the thinking section: the opening or the closing marker is expected next


class ThinkingTable:
    """The progress of each slot's thinking section. S slots, W the longest marker."""

    def __init__(self, num_slots: int) -> None:
        self._budgets = np.zeros(num_slots, np.int64)
        self._num_thought = np.zeros(num_slots, np.int64)
        self._side = np.zeros(num_slots, np.intp)
        self._num_matched = np.zeros(num_slots, np.intp)  # tokens of the expected marker
        self._markers = np.zeros((2, num_slots, MAX_MARKER_TOKENS), np.int64)  # [2, S, W] opening, closing
        self._lengths = np.zeros((2, num_slots), np.intp)

    def start(self, slot: int, budget: ThinkingBudget, generated: NDArray[Any]) -> bool:
        """Assigns a slot to a sequence that has `generated` [G] tokens.

        Returns whether it needs `steer`.
        """
        for side, ids in ((OUTSIDE, budget.start_ids), (INSIDE, budget.end_ids)):
            self._markers[side, slot, : len(ids)] = ids
            self._lengths[side, slot] = len(ids)
        self._budgets[slot] = budget.num_tokens
        side = INSIDE if budget.is_open else OUTSIDE
        if side == OUTSIDE and (at := _find(generated, budget.start_ids)) is not None:
            side, generated = INSIDE, generated[at + len(budget.start_ids) :]
        if side == INSIDE and _find(generated, budget.end_ids) is not None:
            return False
        self._side[slot] = side
        self._num_thought[slot] = len(generated) if side == INSIDE else 0
        self._num_matched[slot] = _num_begun(generated, budget.end_ids if side == INSIDE else budget.start_ids)
        return True

    def steer(self, slots: NDArray[np.intp], token_ids: Longs) -> tuple[Longs, Bools]:
        """Replaces chosen tokens by forced ones: (tokens, whether the thinking is over), [n] each."""
        side, at = self._side[slots], self._num_matched[slots]
        is_inside = side == INSIDE
        wanted = self._markers[side, slots, at]
        token_ids = np.where(self._is_forced(slots), wanted, token_ids)
        at = np.where(token_ids == wanted, at + 1, token_ids == self._markers[side, slots, 0])
        is_complete = at == self._lengths[side, slots]
        self._num_thought[slots] += is_inside
        self._side[slots] = side | is_complete
        self._num_matched[slots] = np.where(is_complete, 0, at)
        return token_ids, is_complete & is_inside

    def forced(self, slots: NDArray[np.intp]) -> Longs:
        """[n] the tokens that come next in these slots; -1 where the budget is not used up."""
        wanted: Longs = np.where(self._is_forced(slots), self._markers[INSIDE, slots, self._num_matched[slots]], -1)
        return wanted

    def may_force(self, slots: NDArray[np.intp], num_pending: int) -> bool:
        """Whether any token may be forced after `num_pending` more tokens that the table does not know."""
        return bool((self._num_thought[slots] + num_pending >= self._budgets[slots]).any())

    def _is_forced(self, slots: NDArray[np.intp]) -> Bools:
        is_forced: Bools = (self._side[slots] == INSIDE) & (self._num_thought[slots] >= self._budgets[slots])
        return is_forced


def _find(ids: NDArray[Any], marker: tuple[int, ...]) -> int | None:
    """Index of the first occurrence of the marker in `ids`."""
    if len(ids) < len(marker):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(marker))
    places = np.flatnonzero((windows == np.array(marker)).all(1))
    return int(places[0]) if len(places) else None


def _num_begun(ids: NDArray[Any], marker: tuple[int, ...]) -> int:
    """Number of the marker's first tokens that `ids` end with."""
    ends = (n for n in range(min(len(marker) - 1, len(ids)), 0, -1) if tuple(ids[-n:].tolist()) == marker[:n])
    return next(ends, 0)

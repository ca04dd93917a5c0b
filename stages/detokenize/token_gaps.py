"""Inter-token latencies, for all answers of a step at once.

Plain code behind the detokenize stage; reads no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...runtime.histogram import LatencyHistogram
from ..array_checks import equal
from ..messages import Indices

# vLLM's buckets for inter-token latency
BOUNDS_MS = (
    *(10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1_000),
    *(2_500, 5_000, 7_500, 10_000, 20_000, 40_000, 80_000),
)
BOUNDS_US = tuple(1000 * ms for ms in BOUNDS_MS)
MOST_GROUPS = 16  # of slots that take turns, as many as steps may be in flight


@dataclass(slots=True, eq=False)
class _Group:
    """Slots whose tokens come in the same steps."""

    slots: Indices
    last_us: int  # time of their last tokens


class TokenGaps:
    """An exact histogram of inter-token latencies.

    Columnar: while steps have the same slots, or those of a few groups in turns, one time covers all of a group. A
    preempted sequence takes the time of its last token along (`leave`) and brings it to its next slot (`enter`), since
    its client sees the wait as a gap.
    """

    def __init__(self, num_slots: int) -> None:
        self.histogram = LatencyHistogram(BOUNDS_US)
        self._last_us = np.zeros(num_slots, np.int64)  # [S] time of the last token, except for slots in groups
        self._groups: list[_Group] = []  # no slot is in two; the one whose turn is longest ago first
        self._is_grouped = np.zeros(num_slots, np.bool_)  # [S]

    def enter(self, slot: int, last_us: int) -> None:
        """A sequence takes the slot. Its last token, if it has any, came at `last_us`."""
        self._dissolve(self._groups)
        self._last_us[slot] = last_us

    def leave(self, slot: int) -> int:
        """The time of the last token of the sequence in the slot."""
        self._dissolve(self._groups)
        return int(self._last_us[slot])

    def step(self, slots: Indices, places: NDArray[np.integer], now_us: int) -> None:
        """Counts one token for each of `slots` [L]; `places` [L] are from 0.

        The first token ends no gap.
        """
        if not len(slots):
            return
        for place, group in enumerate(self._groups):
            if equal(slots, group.slots):
                self.histogram.observe(now_us - group.last_us, len(slots))
                group.last_us = now_us
                if len(self._groups) > 1:
                    self._groups.append(self._groups.pop(place))
                return
        if np.count_nonzero(self._is_grouped[slots]):
            is_one = len(self._groups) == 1
            self._dissolve([one for one in self._groups if is_one or np.isin(one.slots, slots).any()])
        self.histogram.observe_many((now_us - self._last_us[slots])[places > 0])
        if len(self._groups) == MOST_GROUPS:
            self._dissolve(self._groups[:1])
        self._groups.append(_Group(slots, now_us))
        self._is_grouped[slots] = True

    def _dissolve(self, groups: Sequence[_Group]) -> None:
        for group in list(groups):
            self._last_us[group.slots] = group.last_us
            self._is_grouped[group.slots] = False
            self._groups.remove(group)

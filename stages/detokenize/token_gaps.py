"""Inter-token latencies, for all answers of a step at once.

Plain code behind the detokenize stage; reads no clock.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...runtime.histogram import LatencyHistogram
from ..array_checks import equal
from ..messages import NO_INDICES, Indices

# vLLM's buckets for inter-token latency
BOUNDS_MS = (
    *(10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1_000),
    *(2_500, 5_000, 7_500, 10_000, 20_000, 40_000, 80_000),
)
BOUNDS_US = tuple(1000 * ms for ms in BOUNDS_MS)


class TokenGaps:
    """An exact histogram of inter-token latencies.

    Columnar: while steps have the same slots, one time covers all. A preempted sequence takes the time of its last
    token along (`leave`) and brings it to its next slot (`enter`), since its client sees the wait as a gap.
    """

    def __init__(self, num_slots: int) -> None:
        self.histogram = LatencyHistogram(BOUNDS_US)
        self._last_us = np.zeros(num_slots, np.int64)  # [S] time of the last token, except for slots in `_steady`
        self._steady: Indices = NO_INDICES  # slots of the last step; their time is `_steady_us`
        self._steady_us = 0

    def enter(self, slot: int, last_us: int) -> None:
        """A sequence takes the slot. Its last token, if it has any, came at `last_us`."""
        self._fold_rows()
        self._last_us[slot] = last_us

    def leave(self, slot: int) -> int:
        """The time of the last token of the sequence in the slot."""
        self._fold_rows()
        return int(self._last_us[slot])

    def step(self, slots: Indices, places: NDArray[np.integer], now_us: int) -> None:
        """Counts one token for each of `slots` [L]; `places` [L] are from 0.

        The first token ends no gap.
        """
        if equal(slots, self._steady):
            self.histogram.observe(now_us - self._steady_us, len(slots))
        else:
            self._fold_rows()
            self.histogram.observe_many((now_us - self._last_us[slots])[places > 0])
            self._steady = slots
        self._steady_us = now_us

    def _fold_rows(self) -> None:
        self._last_us[self._steady] = self._steady_us
        self._steady = NO_INDICES

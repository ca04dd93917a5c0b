"""The time between two tokens of an answer, for all answers of a step at once. Plain code behind detokenize.

Knows slots and moments. Refuses to know clocks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...runtime.histogram import Histogram
from ..array_checks import equal
from ..messages import NO_INDICES, Indices

# vLLM's buckets for inter-token latency
BOUNDS_MS = (
    *(10, 25, 50, 75, 100, 150, 200, 300, 400, 500, 750, 1_000),
    *(2_500, 5_000, 7_500, 10_000, 20_000, 40_000, 80_000),
)
BOUNDS_US = tuple(1000 * ms for ms in BOUNDS_MS)


class TokenGaps:
    """Counts inter-token latencies, exactly. Columnar, and while the same slots go on, one number stands for all.

    A sequence that gives its slot up takes its last moment along (`leave`) and brings it to the next (`enter`): what
    it waited for its turn is a gap that its client saw. On 2 busy cores a step of 256 rows that go
    on costs 3 to 10 us, any other 20.
    """

    def __init__(self, num_slots: int) -> None:
        self.histogram = Histogram(BOUNDS_US)
        self._last_us = np.zeros(num_slots, np.int64)  # [S] when the slot's sequence got its last token, but for those
        self._steady: Indices = NO_INDICES  # of the last step, which all got it then
        self._steady_us = 0

    def enter(self, slot: int, last_us: int) -> None:
        """A sequence takes the slot; its last token, if it has any, came at `last_us`."""
        self._settle()
        self._last_us[slot] = last_us

    def leave(self, slot: int) -> int:
        """When the sequence in the slot got its last token."""
        self._settle()
        return int(self._last_us[slot])

    def step(self, slots: Indices, places: NDArray[np.integer], now_us: int) -> None:
        """Each of these slots [L] got a token; `places` [L] says which of its answer, from 0. The first ends no gap."""
        if equal(slots, self._steady):
            self.histogram.observe(now_us - self._steady_us, len(slots))
        else:
            self._settle()
            self.histogram.observe_many((now_us - self._last_us[slots])[places > 0])
            self._steady = slots
        self._steady_us = now_us

    def _settle(self) -> None:
        self._last_us[self._steady] = self._steady_us
        self._steady = NO_INDICES

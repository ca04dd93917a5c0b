"""Step pace: estimates how long a step may take from recent steps. Reads no clock."""

from __future__ import annotations

FADE = 0.9  # decay of the remembered slowest step, with each later step of its size
NUM_SIZES = 32  # step sizes, in powers of two of tokens


class StepPace:
    """The slowest recent steps, by size.

    A size without a step is extrapolated from the next smaller one.
    """

    def __init__(self) -> None:
        self._slowest_s = [0.0] * NUM_SIZES

    def note(self, num_tokens: int, seconds: float) -> None:
        """Records a step of `num_tokens` tokens that took `seconds`."""
        size, slowest_s = _size(num_tokens), self._slowest_s
        slowest_s[size] = max(seconds, FADE * slowest_s[size])

    def expect_s(self, num_tokens: int) -> float:
        """Seconds that a step of `num_tokens` tokens may take; 0 before the first step."""
        size = _size(num_tokens)
        known = [other for other, seconds in enumerate(self._slowest_s) if seconds and other <= size]
        if not known:
            return max(self._slowest_s)
        return max(self._slowest_s[: size + 1]) * 2.0 ** (size - known[-1])


def _size(num_tokens: int) -> int:
    return min(num_tokens.bit_length(), NUM_SIZES - 1)

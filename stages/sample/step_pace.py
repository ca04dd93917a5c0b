"""How long a step may well take, judged by those before. Plain code behind the sample stage; reads no clock."""

from __future__ import annotations

FADE = 0.9  # of the slowest step that is remembered, with each later one of its size
NUM_SIZES = 32  # powers of two, of tokens in a step


class StepPace:
    """The slowest steps of late, by size. A size that has not come yet is judged by the largest that has."""

    def __init__(self) -> None:
        self._slowest_s = [0.0] * NUM_SIZES

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        size, slowest_s = _size(num_tokens), self._slowest_s
        slowest_s[size] = max(seconds, FADE * slowest_s[size])

    def expect_s(self, num_tokens: int) -> float:
        """Seconds that a step of so many tokens may well take; 0 before the first."""
        size = _size(num_tokens)
        known = [other for other, seconds in enumerate(self._slowest_s) if seconds and other <= size]
        if not known:
            return max(self._slowest_s)
        return max(self._slowest_s[: size + 1]) * 2.0 ** (size - known[-1])


def _size(num_tokens: int) -> int:
    return min(num_tokens.bit_length(), NUM_SIZES - 1)

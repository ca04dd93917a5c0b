"""Estimate of the prefix cache's hits, which only allocate can see. Plain code.

A wrong estimate is harmless: sequences admitted too early hold slots but no blocks, and their order does not change.
"""

from __future__ import annotations

RATE = 0.25  # weight of the newest prompt in the mean


class FoundShare:
    """The share of a prompt likely found in the cache: an exponential mean over started prompts."""

    def __init__(self) -> None:
        self._share = 0.0

    def note(self, num_tokens: int, num_found: int) -> None:
        """Records a started prompt of `num_tokens` tokens, of which `num_found` were cached."""
        self._share += RATE * (num_found / num_tokens - self._share)

    def of(self, num_tokens: int) -> int:
        """Expected cached tokens of a prompt of `num_tokens`."""
        return int(self._share * num_tokens)

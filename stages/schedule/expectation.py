"""What schedule expects of the prefix cache, which only allocate can see. Plain code.

A wrong guess costs no right to anything: those let in for it hold slots and no blocks, in the same order as before.
"""

from __future__ import annotations

RATE = 0.25  # of the newest prompt in the mean


class FoundShare:
    """How much of a prompt is likely found in the cache: a running mean over the prompts that began."""

    def __init__(self) -> None:
        self._share = 0.0

    def note(self, num_tokens: int, num_found: int) -> None:
        """A prompt began, of which so many tokens were found."""
        self._share += RATE * (num_found / num_tokens - self._share)

    def of(self, num_tokens: int) -> int:
        """Tokens of the next prompt that are likely there."""
        return int(self._share * num_tokens)

"""Decides whether evicted prefix-cache blocks are copied to the host.

They are while enough of them are hit there. Plain code behind the allocate stage, without clock or random numbers, so
that a replay decides the same.
"""

from __future__ import annotations

from ...messages import Rates

FREE_MOVES = 256  # initial credit: blocks to move before any hit
MOST_CREDIT = 4096  # upper bound of the credit, so that old hits do not pay forever
SAMPLED = 8  # without credit, one sequence in so many is still moved, to notice when it pays again


def is_sampled(sequence_id: int) -> bool:
    """Whether all blocks of a sequence are moved even without credit.

    All or none: a block is found only after those before it.
    """
    return sequence_id % SAMPLED == 0


class OffloadPolicy:
    """A credit account of copies to the host.

    Each moved block costs 1. Each block hit on the host earns the ratio of computing to copying it, less 1. Without
    credit only sampled sequences are moved, free of charge: if prompts have nothing in common, moving costs 1 % of a
    CPU's time for nothing.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._credit = float(FREE_MOVES)  # moves
        self._num_found = 0  # tokens found on the host in total

    def is_worthwhile(self, num_found: int, rates: Rates | None) -> bool:
        """Whether to move every evicted block. `num_found`: tokens found on the host so far."""
        blocks, self._num_found = (num_found - self._num_found) / self._block_size, num_found
        if rates is None:
            return True
        gain = self._block_size * rates.compute_s / max(rates.copy_s, 1e-9) - 1
        self._credit = min(MOST_CREDIT, self._credit + max(0.0, blocks * gain))
        return self._credit >= 1

    def charge(self, num_moved: int) -> None:
        """Charges moved blocks to the account."""
        self._credit = max(0.0, self._credit - num_moved)

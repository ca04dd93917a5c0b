"""Whether what the prefix cache evicts is worth its copy to the host: as long as enough of it is found there again.

Plain code behind allocate. Reads no clock, and draws no lots: a recording that is run again decides alike.
"""

from __future__ import annotations

from ..messages import Rates

FREE_MOVES = 256  # blocks that may be moved before any is found again
MOST_CREDIT = 4096  # moves: what paid once does not pay for ever
SAMPLED = 8  # while it does not pay, the blocks of one sequence in so many are moved, so as to notice when it does


def is_sampled(sequence_id: int) -> bool:
    """Whether the blocks of a sequence are moved even where it does not pay: all of them, as each is found only behind
    those before it."""
    return sequence_id % SAMPLED == 0


class Offloading:
    """Keeps the account of copies: each costs one, and each block found on the host pays for as many as its tokens take
    longer to compute than to copy.

    Where prompts have nothing in common, moving what is evicted costs 1 % of a CPU's time and brings nothing: with an
    empty account only the blocks of some sequences are moved, and not charged.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._credit = float(FREE_MOVES)  # moves
        self._num_found = 0  # tokens, ever

    def pays(self, num_found: int, rates: Rates | None) -> bool:
        """Whether all that is evicted is to be moved. `num_found`: tokens found on the host so far."""
        blocks, self._num_found = (num_found - self._num_found) / self._block_size, num_found
        if rates is None:
            return True
        gain = self._block_size * rates.compute_s / max(rates.copy_s, 1e-9) - 1
        self._credit = min(MOST_CREDIT, self._credit + max(0.0, blocks * gain))
        return self._credit >= 1

    def charge(self, num_moved: int) -> None:
        """So many blocks were moved because it pays."""
        self._credit = max(0.0, self._credit - num_moved)

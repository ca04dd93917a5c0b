"""Which layers and which share of them each rank has: ranges of layers, each over as many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .comm import Comm
from .shard import RankShare


@dataclass(frozen=True, slots=True)
class RankGrid:
    """`num_ranges` ranges of layers, each on `num_shares` ranks. Rank 0 has the first share of the last range.

    Ranks of a range are next to each other, and hidden states go `num_shares` ranks on.
    """

    num_ranges: int
    num_shares: int

    @property
    def size(self) -> int:
        """All ranks."""
        return self.num_ranges * self.num_shares

    def range_of(self, rank: int) -> int:
        """The place of a rank's layers among the ranges, in the order of layers."""
        return (rank // self.num_shares - 1) % self.num_ranges

    def share_of(self, rank: int) -> RankShare:
        """What a rank holds of each of its layers."""
        return RankShare(rank % self.num_shares, self.num_shares)

    def before(self, rank: int) -> int:
        """The rank from which hidden states come."""
        return (rank - self.num_shares) % self.size

    def behind(self, rank: int) -> int:
        """The rank to which hidden states go."""
        return (rank + self.num_shares) % self.size

    def mates(self, rank: int) -> Sequence[int]:
        """The ranks that share a rank's layers, itself included, in order."""
        first = rank - rank % self.num_shares
        return range(first, first + self.num_shares)

    def shares_of(self, comm: Comm) -> Comm | None:
        """The sums among a rank's mates, of the end of all ranks. None: it has its layers alone. All ranks call it."""
        if self.num_shares == 1:
            return None
        return comm if self.num_ranges == 1 else comm.part(self.mates(comm.rank))

"""The plan being served, and all that serving it has caused so far.

Made when a plan arrives, passed to all that serve a part of it, and gone with the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...messages import BlockCopy, Drafts, Indices, Ints, StepPlan


class KindMatch(NamedTuple):
    """The blocks of one kind with which a sequence starts: the last ones before its position."""

    first: int  # place of the first of them in the sequence
    shared: Ints  # [C] on the device
    on_host: Ints  # [H] on the host, after those
    source: int | None = None  # a device block that is copied, as that of kind 0 is


@dataclass(frozen=True, slots=True, eq=False)
class ReusedPrefix:
    """The tokens that a sequence need not compute when it starts or resumes."""

    num_tokens: int  # tokens in the blocks below
    shared: Ints  # its first blocks, on the device; other tables may hold them too
    on_host: Ints  # the next blocks, on the host, to be copied in
    is_swapped: bool  # True: the host blocks are its own; False: the prefix cache's
    source: int | None = None  # a device block from which the remaining tokens are copied
    more: tuple[KindMatch, ...] = ()  # the same of the kinds of memory after the first
    snapshot: int | None = None  # place of the recurrent state to go on with; None: it has none, or it is swapped

    @property
    def num_whole(self) -> int:
        """Number of blocks before the one copied from `source`."""
        return len(self.shared) + len(self.on_host)


@dataclass(slots=True, eq=False)
class PlanInHand:
    """One plan of R rows while it is served. The plan itself and its arrays are never written."""

    plan: StepPlan
    wanted: Ints  # [R] tokens in all, cached ones included: the plan's `num_wanted`, or less if its drafts were dropped
    remaining: Ints  # [R] of those, the tokens left to compute: `wanted` itself until a row starts with some of them
    drafts: Drafts | None  # the plan's, until they are dropped
    begun: dict[int, ReusedPrefix] = field(default_factory=dict)  # by slot: sequences that start with tokens
    swapped: dict[int, int] = field(default_factory=dict)  # slot -> tokens copied to the host
    copies: list[BlockCopy] = field(default_factory=list)  # for the grant, in order

    @classmethod
    def of(cls, plan: StepPlan) -> PlanInHand:
        """A plan of which nothing has been served."""
        return cls(plan, plan.num_wanted, plan.num_wanted, plan.drafts)

    def set_remaining(self, row: int, num_tokens: int) -> None:
        """The row has so many tokens left to compute."""
        if self.remaining is self.wanted:
            self.remaining = self.wanted.copy()
        self.remaining[row] = num_tokens

    def drop_drafts(self) -> None:
        """No row gets its drafts: they are dropped before any sequence is preempted or waits."""
        if self.drafts is not None:
            self.wanted = self.wanted - self.drafts.counts
            self.remaining = self.remaining - self.drafts.counts
            self.drafts = None

    def num_begun(self, slots: Indices) -> Ints:
        """[S] tokens with which the sequences in these slots start in this plan, without computing them."""
        return np.array([self.begun[slot].num_tokens if slot in self.begun else 0 for slot in slots.tolist()], np.int32)

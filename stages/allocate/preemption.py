"""Serves a plan when free blocks run short: row by row, preempting victims in order.

Plain code behind the allocator.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..messages import Ints
from .slot_blocks import SlotBlocks
from .tiers.block_tables import BlockTables
from .tiers.plan_in_hand import PlanInHand

Needs = list[int]  # blocks of each kind


class Preemptor:
    """One plan, served in order.

    A row that lacks blocks preempts the victims that it may preempt. Their blocks may be quarantined at first; they are
    counted before the next victim is taken. While a row waits for blocks, rows of lower rank get no new ones. The rank
    of a row is the number of victims that it may preempt: higher is better. So rank differs from the order in the plan,
    where decodes come before prefills of better rank.
    """

    def __init__(
        self, slot_blocks: SlotBlocks, hand: PlanInHand, starting_rows: Collection[int], last_granted: int
    ) -> None:
        plan = hand.plan
        self.granted: Ints = np.zeros_like(plan.num_wanted)  # [R] tokens
        self._slot_blocks, self._starts = slot_blocks, slot_blocks.starts
        self._device = device = slot_blocks.device
        self.new_blocks: list[Ints] = [np.zeros_like(plan.num_wanted) for _ in device.kinds]  # [R] of each kind
        self.preempted: list[int] = []  # slots
        self._hand, self._plan = hand, plan
        self._starting_rows = starting_rows
        self._row_of = {slot: row for row, slot in enumerate(plan.slots.tolist())}
        self._budget = plan.token_budget
        self._waiting_rank = -1  # highest rank of a row that waits for blocks
        self._taken = [0] * len(device.kinds)  # sums of `new_blocks`
        self._is_idle = plan.completed_step >= last_granted  # no step is in flight, so that nothing will change

    def serve(self) -> None:
        """Fills in `granted`, `new_blocks` and `preempted`."""
        for row, slot in enumerate(self._plan.slots.tolist()):
            if slot not in self.preempted:
                self._serve_row(row)
        if self._is_idle and self._waiting_rank >= 0 and not self.preempted and not self.granted.any():
            self._preempt_last()

    def _fits(self, need: Needs, *, with_quarantined: bool = False) -> bool:
        """Whether `need` fits beside what earlier rows of the plan get."""
        total = [taken + more for taken, more in zip(self._taken, need, strict=True)]
        return self._device.fits(total, with_quarantined=with_quarantined)

    def _serve_row(self, row: int) -> None:
        plan, is_beginner = self._plan, row in self._starting_rows
        if is_beginner:
            self._starts.attach(self._hand, row, may_fork=False)
        wanted, rank = self._within_budget(int(self._hand.remaining[row])), int(plan.num_victims[row])
        is_behind = rank <= self._waiting_rank
        need = self._need(row, wanted)
        while not is_behind and not self._fits(need):
            victim = self._next_victim(row, need)
            if victim is None:
                break
            self._preempt(victim)
        if is_beginner and not is_behind and self._device.more and not self._fits(need, with_quarantined=True):
            self._starts.detach(self._hand, row)
            self._starts.attach(self._hand, row, may_fork=False, may_share=False)
            wanted = self._within_budget(int(self._hand.remaining[row]))
            need = self._need(row, wanted)
        if any(need) if is_behind else not self._fits(need):
            wanted, need = (0, self._nothing) if is_behind else self._what_fits(row, wanted)
            self._waiting_rank = max(self._waiting_rank, rank)
        self._give(row, wanted, need)
        self._budget -= wanted
        if is_beginner and not wanted:
            self._starts.detach(self._hand, row)

    def _within_budget(self, wanted: int) -> int:
        return wanted if wanted <= self._budget else self._budget if self._plan.allows_partial else 0

    def _give(self, row: int, granted: int, need: Needs) -> None:
        """The row gets `granted` tokens and `need` blocks, in place of what it had."""
        self.granted[row] = granted
        for kind, new_blocks in enumerate(self.new_blocks):
            self._taken[kind] += need[kind] - int(new_blocks[row])
            new_blocks[row] = need[kind]

    @property
    def _nothing(self) -> Needs:
        return [0] * len(self._taken)

    def _need(self, row: int, granted: int) -> Needs:
        """Blocks of each kind that the row lacks for `granted` more tokens."""
        if granted == 0:
            return self._nothing
        slot, num_reserved = self._plan.slots[row], self._num_reserved(row)
        length = int(self._device.tables.num_tokens[slot]) + granted
        return [_num_lacking(each.tables, slot, length, num_reserved) for each in self._device.kinds]

    def _num_reserved(self, row: int) -> int:
        return 0 if self._plan.num_reserved is None else int(self._plan.num_reserved[row])

    def _next_victim(self, row: int, need: Needs) -> int | None:
        """The next slot to preempt for `row`; None if quarantined blocks suffice or none is left."""
        if self._fits(need, with_quarantined=True):
            return None
        for victim in self._plan.victims[: self._plan.num_victims[row]].tolist():
            if victim not in self.preempted and self._device.tables.capacity[victim] > 0:
                return int(victim)
        return None

    def _preempt(self, slot: int) -> None:
        """Preempts a slot, and takes back what it was granted in this plan."""
        self.preempted.append(slot)
        self._slot_blocks.preempt(self._hand, slot)
        row = self._row_of.get(slot)
        if row is not None:
            self._budget += int(self.granted[row])
            self._give(row, 0, self._nothing)

    def _preempt_last(self) -> None:
        """Preempts the row of lowest rank that has blocks, as no row can go on and no step is in flight.

        Only windows come to this: what a sequence needs is free, but spread over slabs of another kind. Computed again,
        its blocks lie together.
        """
        holders = [row for slot, row in self._row_of.items() if self._device.tables.capacity[slot] > 0]
        if self._device.has_windows and holders:
            ranks = self._plan.num_victims[holders].tolist()
            _, row = min(zip(ranks, (-row for row in holders), strict=True))
            self._preempt(int(self._plan.slots[-row]))

    def _what_fits(self, row: int, wanted: int) -> tuple[int, Needs]:
        """The part of the wanted tokens that fits into the free blocks: (tokens, blocks).

        A row that reserves gets all or nothing, unless what it computes at once counts: that of a window does.
        """
        if not self._plan.allows_partial or (self._num_reserved(row) > 0 and not self._device.has_windows):
            return 0, self._nothing
        fits = 0
        while fits < wanted:  # the most tokens whose blocks fit: any fewer fit too
            middle = (fits + wanted + 1) // 2
            if self._fits(self._need(row, middle)):
                fits = middle
            else:
                wanted = middle - 1
        return fits, self._need(row, fits)


def _num_lacking(tables: BlockTables, slot: int, length: int, num_reserved: int) -> int:
    """Blocks that a slot lacks for `length` tokens, and for those that it may reserve."""
    if num_reserved:
        slots, reserved = np.array([slot]), np.array([num_reserved], np.int32)
        length = max(length, int(tables.reservable(slots, reserved)[0]))
    return max(-(-(length - int(tables.capacity[slot])) // tables.block_size), 0)

"""Serves a plan when free blocks run short: row by row, preempting victims in order.

Plain code behind the allocator.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ..messages import Ints
from .plan_in_hand import PlanInHand
from .slot_blocks import SlotBlocks


class Preemptor:
    """One plan, served in order.

    A row that lacks blocks preempts the victims that it may preempt. Their blocks may be quarantined at first; they are
    counted before the next victim is taken. While a row waits for blocks, rows of lower rank get no new ones. The rank
    of a row is the number of victims that it may preempt: higher is better. So rank differs from the order in the plan,
    where decodes come before prefills of better rank.
    """

    def __init__(self, slot_blocks: SlotBlocks, hand: PlanInHand, starting_rows: Collection[int]) -> None:
        plan = hand.plan
        self.granted: Ints = np.zeros_like(plan.num_wanted)  # [R] tokens
        self.new_blocks: Ints = np.zeros_like(plan.num_wanted)  # [R]
        self.preempted: list[int] = []  # slots
        self._slot_blocks = slot_blocks
        self._hand, self._plan = hand, plan
        self._starting_rows = starting_rows
        self._row_of = {slot: row for row, slot in enumerate(plan.slots.tolist())}
        self._budget = plan.token_budget
        self._waiting_rank = -1  # highest rank of a row that waits for blocks

    def serve(self) -> None:
        """Fills in `granted`, `new_blocks` and `preempted`."""
        for row, slot in enumerate(self._plan.slots.tolist()):
            if slot not in self.preempted:
                self._serve_row(row)

    @property
    def _num_free(self) -> int:
        return self._slot_blocks.pool.num_available - int(self.new_blocks.sum())

    def _serve_row(self, row: int) -> None:
        plan, is_beginner = self._plan, row in self._starting_rows
        if is_beginner:
            self._slot_blocks.attach(self._hand, row, may_fork=False)
        wanted, rank = int(self._hand.remaining[row]), int(plan.num_victims[row])
        if wanted > self._budget:
            wanted = self._budget if plan.allows_partial else 0
        is_behind = rank <= self._waiting_rank
        need = self._need(row, wanted)
        while need > self._num_free and not is_behind:
            victim = self._next_victim(row, need)
            if victim is None:
                break
            self._preempt(victim)
        if need > self._num_free or (is_behind and need > 0):
            wanted, need = (0, 0) if is_behind else self._what_fits(row, wanted)
            self._waiting_rank = max(self._waiting_rank, rank)
        self.granted[row], self.new_blocks[row] = wanted, need
        self._budget -= wanted
        if is_beginner and not wanted:
            self._slot_blocks.detach(self._hand, row)

    def _need(self, row: int, granted: int) -> int:
        """Blocks that the row lacks for `granted` more tokens."""
        if granted == 0:
            return 0
        tables, slot = self._slot_blocks.tables, self._plan.slots[row]
        length = max(int(tables.num_tokens[slot]) + granted, self._num_reserved(row))
        return max(-(-(length - int(tables.capacity[slot])) // tables.block_size), 0)

    def _num_reserved(self, row: int) -> int:
        return 0 if self._plan.num_reserved is None else int(self._plan.num_reserved[row])

    def _next_victim(self, row: int, need: int) -> int | None:
        """The next slot to preempt for `row`; None if quarantined blocks suffice or none is left."""
        if need <= self._num_free + self._slot_blocks.pool.num_quarantined:
            return None
        for victim in self._plan.victims[: self._plan.num_victims[row]].tolist():
            if victim not in self.preempted and self._slot_blocks.tables.capacity[victim] > 0:
                return int(victim)
        return None

    def _preempt(self, slot: int) -> None:
        """Preempts a slot, and takes back what it was granted in this plan."""
        self.preempted.append(slot)
        self._slot_blocks.preempt(self._hand, slot)
        row = self._row_of.get(slot)
        if row is not None:
            self._budget += int(self.granted[row])
            self.granted[row] = self.new_blocks[row] = 0

    def _what_fits(self, row: int, wanted: int) -> tuple[int, int]:
        """The part of the wanted tokens that fits into the free blocks: (tokens, blocks)."""
        if not self._plan.allows_partial or self._num_reserved(row) > 0:
            return 0, 0
        tables, slot = self._slot_blocks.tables, self._plan.slots[row]
        capacity = int(tables.capacity[slot]) + self._num_free * tables.block_size
        fits = max(0, min(wanted, capacity - int(tables.num_tokens[slot])))
        return fits, self._need(row, fits)

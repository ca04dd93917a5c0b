"""The blocks that windows pass: given back when no step reads them, or written again by the row that passed them."""

from __future__ import annotations

import numpy as np

from ..messages import Bools, Indices, Ints, StepPlan
from .prefix_publisher import PrefixPublisher
from .tiers.block_tables import WindowTables
from .tiers.device_tier import DeviceTier, KindBlocks

STEPS_TO_RETIRE = 8  # between two looks at which of many rows that decode have blocks to give back
MANY_ROWS = 32  # of a plan; with fewer, blocks that windows pass are given back at once, which takes no time


class WindowBlocks:
    """The blocks of the kinds that have windows, on the device.

    A row passes a block when no later query of it sees the block. `publisher`: that of the prefix cache, if there is
    one; other slots may then hold what a row passes, and other sequences find it.
    """

    def __init__(self, device: DeviceTier, publisher: PrefixPublisher | None) -> None:
        self.device = device
        self._publisher = publisher
        self._windows = [each for each in device.kinds if isinstance(each.tables, WindowTables)]
        self.may_share = publisher is not None  # whether several slots may hold a block
        self.many_rows = MANY_ROWS

    # -- blocks that are given back

    def retire_after(self, plan: StepPlan, slots: Indices, granted: Ints) -> None:
        """Gives back what windows have passed in the step of a plan, whose rows got `granted` tokens.

        Rows that decode may go on in the block that they have passed. What they do not need is given back once in some
        steps, for all at once.
        """
        if not self.keeps_passed(plan):
            return self.retire(slots, plan.step)
        if not plan.is_decode and np.count_nonzero(granted != 1):
            self.retire(slots[granted != 1], plan.step)
        if plan.step % STEPS_TO_RETIRE == 0:
            self.retire_missed(slots, plan.step)

    def retire(self, slots: Indices, step: int) -> None:
        """Takes the blocks of windows that no query of `slots` after `step` sees, and `step` is granted.

        A slot has as many tokens as `step` surely leaves it: drafts do not count, as they may be rejected. If the step
        is voided, its slots are dropped.
        """
        for each in self._windows:
            assert isinstance(each.tables, WindowTables)
            self.retire_of(each, each.tables.due(slots), step)

    def retire_of(self, each: KindBlocks, due: Indices, step: int) -> None:
        """The same of one window, and of slots that have passed a block."""
        tables, pool = each.tables, each.pool
        assert isinstance(tables, WindowTables)
        if not len(due):
            return
        owners, places, blocks = tables.retire(due)
        if self._publisher is not None:
            published = self._publisher.kinds[each.kind - 1]
            pool.pass_by(blocks[self._publisher.is_passed(published, owners, places)])
        if self._publisher is None or len(np.unique(blocks)) == len(blocks):
            pool.give_back(blocks, step, self.device.completed_step)
        else:  # some slots share blocks
            for slot in due.tolist():
                pool.give_back(blocks[owners == slot], step, self.device.completed_step)

    def retire_missed(self, slots: Indices, step: int) -> None:
        """The same, of slots that have passed a block and did not go on in it; `may_go_on` says which may."""
        for each in self._windows:
            assert isinstance(each.tables, WindowTables)
            self.retire_of(each, each.tables.missed(slots), step)

    # -- blocks that rows go on in

    def keeps_passed(self, plan: StepPlan) -> bool:
        """Whether rows of a plan that decode keep the block that they have passed, to go on in it."""
        return len(plan.slots) >= self.many_rows and plan.num_reserved is None and plan.drafts is None

    def may_go_on(self, each: KindBlocks, slots: Indices, num_in_flight: int) -> Bools:
        """Whether `slots`, each of which needs a block of a window, can go on in the one that they passed.

        They passed it at least `num_in_flight` tokens ago, as many as there are steps in flight: the step that passed
        it is done. Drafts would not be such steps, and neither would prompts, which give back what they pass at once.
        """
        tables = each.tables
        assert isinstance(tables, WindowTables)
        if tables.kind.name != "window":
            return np.zeros(len(slots), np.bool_)
        firsts = tables.num_retired[slots].astype(np.intp)
        since = tables.num_tokens[slots] - tables.passes_at(firsts)
        is_alone = each.pool.is_alone(tables.blocks[slots, firsts], self.device.completed_step)
        found: Bools = (since >= num_in_flight) & is_alone & self._may_reuse(slots, firsts)
        return found

    def go_on(self, each: KindBlocks, slots: Indices) -> tuple[Indices, Indices, Ints]:
        """Has `slots` go on in the block that they passed. Returns (slot, place, block) of each."""
        tables = each.tables
        assert isinstance(tables, WindowTables)
        blocks = tables.blocks[slots, tables.num_retired[slots]]
        self.write_again(each, blocks)
        tables.num_retired[slots] += 1
        return *tables.append(slots, np.ones(len(slots), np.int32), blocks), blocks

    def write_again(self, each: KindBlocks, blocks: Ints) -> None:
        """The slots of these blocks of a window write other tokens there: sequences find them no more."""
        if self._publisher is not None:
            cached = blocks[each.pool.is_kept(blocks)].tolist()
            self._publisher.forget_blocks_of(each.kind, cached)
            for block in cached:
                each.pool.forget(block)

    def _may_reuse(self, slots: Indices, places: Indices) -> Bools:
        """Whether the blocks at these places of windows, [R], are of no use once passed: those of answers are not."""
        if self._publisher is None:
            return np.ones(len(slots), np.bool_)
        return self._publisher.is_of_answer(slots, places)

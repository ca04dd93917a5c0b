"""Steady decoding: the same rows step after step, with block needs known ahead.

Plain, columnar state behind the allocator. A row of a window passes one block for each that it needs, so its next
tokens go into the block that it passed last. Pools have nothing to do then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..messages import NO_INDICES, NO_INTS, Indices, Ints
from .tiers.block_tables import BlockTables, WindowTables
from .tiers.device_tier import DeviceTier, KindBlocks
from .window_blocks import WindowBlocks


@dataclass(slots=True, eq=False)
class BlockCohort:
    """The rows that need a block in the same step, which is one in `block_size` steps."""

    slots: Indices  # [G]
    places: Indices  # [G] table positions of their next blocks
    capacity: Ints  # [G] of their blocks, in tokens
    ones: Indices  # [G]
    sizes: Ints  # [G] tokens per block


class SteadyGrowth:
    """The tables of one kind as the rows grow: each row needs a new block once in `block_size` steps.

    A cohort is formed when its turn comes: mostly a row comes or goes before all of them had one.
    """

    def __init__(self, slots: Indices, starts: Ints, tables: BlockTables) -> None:
        self._tables, size = tables, tables.block_size
        num_left = tables.capacity[slots] - starts  # [R] tokens that still fit into the slot's blocks
        self._slots = slots[num_left.argsort(kind="stable")]  # [R] in the order of their turns
        counts = np.bincount(num_left, minlength=size)[:size]
        self._counts: list[int] = counts.tolist()  # rows of each cohort
        self._ends: list[int] = counts.cumsum().tolist()  # of each cohort, in `_slots`
        self.is_whole = self._ends[-1] == len(slots)  # each row needs its next block within `block_size` steps
        self._cohorts: list[BlockCohort | None] = [None] * size
        self._cohort = 0

    @property
    def _turn(self) -> BlockCohort:
        """The rows whose turn it is."""
        return self._cohorts[self._cohort] or self._form()

    def _form(self) -> BlockCohort:
        count, end, size = self._counts[self._cohort], self._ends[self._cohort], self._tables.block_size
        slots = self._slots[end - count : end]
        capacity = self._tables.capacity[slots]
        steps = np.ones(count, np.intp), np.full(count, size, np.int32)
        made = self._cohorts[self._cohort] = BlockCohort(slots, (capacity // size).astype(np.intp), capacity, *steps)
        return made

    @property
    def num_rows(self) -> int:
        """Rows whose turn it is."""
        return self._counts[self._cohort]

    @property
    def num_blocks(self) -> int:
        """Blocks that the next step needs."""
        return self._counts[self._cohort]

    def last_blocks(self) -> list[int]:
        """The last block of each row that needs a new one in the next step; -1 if it holds none."""
        turn = self._turn
        return self._tables.blocks_at(turn.slots, turn.places - turn.ones)

    def grow(self, blocks: Ints) -> tuple[Indices, Indices, Ints]:
        """Appends the new blocks to the tables. Returns (slot, place, block) of each."""
        turn, tables = self._turn, self._tables
        slots, places = turn.slots, turn.places
        tables.blocks[slots, places] = blocks
        turn.capacity = tables.capacity[slots] = turn.capacity + turn.sizes
        turn.places = places + turn.ones
        return slots, places, blocks

    def step(self) -> None:
        """Advances by one granted step."""
        self._cohort = (self._cohort + 1) % len(self._cohorts)


class SteadyWindow(SteadyGrowth):
    """The same of a window: a row that has passed a block writes its next tokens there, where nothing reads any more.

    Other blocks that windows pass are given back for all rows at once, which takes hardly longer than for one.
    """

    def __init__(self, slots: Indices, starts: Ints, each: KindBlocks, windows: WindowBlocks) -> None:
        assert isinstance(each.tables, WindowTables)
        super().__init__(slots, starts, each.tables)
        self._window, self._each = each.tables, each
        self._windows, self._device = windows, windows.device
        self._rings: list[_Ring | None] = [None] * len(self._cohorts)  # of cohorts that need no other blocks
        self._passed: list[Indices] = []  # slots with blocks to give back
        self._again: Indices | None = None  # rows of the turn that go on in a block they have passed; None: all
        self._reused: Ints = NO_INTS  # those blocks
        self._others: Indices = NO_INDICES  # rows of the turn that need another block

    @property
    def num_blocks(self) -> int:
        return len(self._others)

    def last_blocks(self) -> list[int]:
        turn = self._turn
        return self._window.blocks_at(turn.slots[self._others], turn.places[self._others] - 1)

    def prepare(self, num_in_flight: int, last_step: int) -> None:
        """Finds the rows that go on in a block they have passed.

        They passed it at least `num_in_flight` tokens ago, as many as these rows have steps in flight: the step that
        passed it is done. Of blocks that are given back, step `last_step` may be the last to read.
        """
        if not self._cohort and self._passed:
            self.give_back(last_step)
        turn, window, ring = self._turn, self._window, self._rings[self._cohort]
        if ring is not None and num_in_flight <= ring.slack:
            blocks = window.blocks[turn.slots, ring.firsts]
            if not self._windows.may_share or self._each.pool.is_alone(blocks, self._device.completed_step).all():
                self._again, self._reused, self._others = None, blocks, NO_INDICES
                return
        self._again, self._reused, self._others = NO_INDICES, NO_INTS, NO_INDICES
        if len(turn.slots):
            self._look(turn, num_in_flight)

    def _look(self, turn: BlockCohort, num_in_flight: int) -> None:
        """Looks at each row of the turn."""
        window, slots = self._window, turn.slots
        firsts = window.num_retired[slots].astype(np.intp)
        blocks = window.blocks[slots, firsts]
        since = turn.places * window.block_size - window.passes_at(firsts)  # tokens since a row passed its first block
        is_reused = self._windows.may_go_on(self._each, slots, num_in_flight)
        is_ring = len(slots) == np.count_nonzero(is_reused)
        self._rings[self._cohort] = _Ring(firsts, int(since.min())) if is_ring else None
        self._passed.append(slots[(since >= 0) & ~is_reused])
        self._again, self._others = is_reused.nonzero()[0], (~is_reused).nonzero()[0]
        self._reused = blocks[self._again]

    def give_back(self, last_step: int) -> None:
        """Gives back the blocks that rows have passed and will not write again."""
        slots = np.concatenate(self._passed)
        self._passed.clear()
        self._windows.retire_of(self._each, self._window.due(slots), last_step)

    def grow(self, blocks: Ints) -> tuple[Indices, Indices, Ints]:
        """`blocks` are for the rows that need others."""
        turn, window, again = self._turn, self._window, self._again
        if len(self._reused):
            self._windows.write_again(self._each, self._reused)
            if (ring := self._rings[self._cohort]) is not None:
                ring.firsts = window.num_retired[turn.slots] = ring.firsts + turn.ones
            else:
                window.num_retired[turn.slots[again]] += 1
        if again is None:
            return super().grow(self._reused)
        found = np.empty(len(turn.slots), np.int32)
        found[again], found[self._others] = self._reused, blocks
        return super().grow(found)


@dataclass(slots=True, eq=False)
class _Ring:
    """A cohort whose rows go on in the blocks that they pass, until other rows come."""

    firsts: Indices  # [G] places of the blocks that they pass next
    slack: int  # least tokens since a row has passed that block, when it needs one


class SteadyDecode:
    """Rows that get one token each in every step.

    The rows are grouped once by the step in which they need a new block, and a step handles only its group. Valid for
    plans with the identical `slots` array, which schedule replaces when a sequence comes or goes.
    """

    def __init__(self, slots: Indices, device: DeviceTier, windows: WindowBlocks, in_flight: Iterable[int]) -> None:
        """`in_flight`: steps that may be of these rows, and do not come by `step`."""
        self.slots = slots
        self._tables = tables = device.tables
        self.starts: Ints = tables.num_tokens[slots]  # [R] positions of the tokens of the next step
        self._ones = np.ones(len(slots), np.int32)
        self.growth = _growth_of(device.kinds[0], slots, self.starts, windows)
        self.more = [_growth_of(each, slots, self.starts, windows) for each in device.more]  # of other kinds
        self._in_flight = deque(in_flight)  # steps of these rows, kept for windows
        self.windows = [growth for growth in (self.growth, *self.more) if isinstance(growth, SteadyWindow)]
        self.reserves = False  # whether kinds need slabs for the next step
        self.is_whole = self.growth.is_whole and all(growth.is_whole for growth in self.more)

    def prepare(self, completed_step: int, last_granted: int) -> None:
        """Finds out what the next step needs."""
        while self._in_flight and self._in_flight[0] <= completed_step:
            self._in_flight.popleft()
        for window in self.windows:
            window.prepare(len(self._in_flight), last_granted)

    def needs(self) -> list[int]:
        """Blocks of each kind that the next step needs."""
        return [self.growth.num_blocks, *(growth.num_blocks for growth in self.more)]

    def step(self, step: int) -> Ints:
        """Advances by one granted step. Returns the positions of its tokens, [R]."""
        if self.windows:
            self._in_flight.append(step)
        starts = self.starts
        self.starts = starts + self._ones
        self._tables.num_tokens[self.slots] = self.starts
        self.growth.step()
        for growth in self.more:
            growth.step()
        return starts


def _growth_of(each: KindBlocks, slots: Indices, starts: Ints, windows: WindowBlocks) -> SteadyGrowth:
    is_window = isinstance(each.tables, WindowTables)
    return SteadyWindow(slots, starts, each, windows) if is_window else SteadyGrowth(slots, starts, each.tables)


@dataclass(slots=True, eq=False)
class SteadyLane:
    """The rows of a plan with only decodes. `steady` is made when they come again."""

    slots: Indices
    steady: SteadyDecode | None = None


class SteadyLanes:
    """The rows of the last `most` plans of different rows, all with only decodes; rows are told by their array."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lanes: list[SteadyLane] = []  # the latest last

    @property
    def made(self) -> list[SteadyDecode]:
        """Those of rows that have come again."""
        return [lane.steady for lane in self._lanes if lane.steady is not None]

    def find(self, slots: Indices) -> SteadyLane | None:
        """The lane of these rows; None if they are new."""
        for lane in self._lanes:
            if lane.slots is slots:
                return lane
        return None

    def note(self, slots: Indices) -> list[SteadyDecode]:
        """Takes rows as new, or anew. Returns what was made for them, and for rows that are forgotten."""
        lanes = [*(lane for lane in self._lanes if lane.slots is not slots), SteadyLane(slots)][-self._most :]
        return self._change(lanes)

    def forget(self, lane: SteadyLane) -> list[SteadyDecode]:
        """Takes the rows of a lane as new when they come again. Returns what was made for them."""
        return self._change([each for each in self._lanes if each is not lane])

    def clear(self) -> list[SteadyDecode]:
        """Forgets all rows. Returns what was made for them."""
        return self._change([])

    def _change(self, lanes: list[SteadyLane]) -> list[SteadyDecode]:
        ended = [lane.steady for lane in self._lanes if lane.steady is not None and lane not in lanes]
        self._lanes = lanes
        return ended

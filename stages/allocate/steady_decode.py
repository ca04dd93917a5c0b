"""Steady decoding: the same rows step after step, with block needs known ahead.

Plain, columnar state behind the allocator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..messages import Indices, Ints
from .block_tables import BlockTables


@dataclass(slots=True, eq=False)
class BlockCohort:
    """The rows that need a block in the same step, which is one in `block_size` steps."""

    slots: Indices  # [G]
    places: Indices  # [G] table positions of their next blocks
    ones: Indices  # [G]
    sizes: Ints  # [G] tokens per block


class SteadyGrowth:
    """The tables of one kind as the rows grow: each row needs a new block once in `block_size` steps."""

    def __init__(self, slots: Indices, starts: Ints, tables: BlockTables) -> None:
        self._tables = tables
        num_left = tables.capacity[slots] - starts  # [R] tokens that still fit into the slot's blocks
        order = np.argsort(num_left, kind="stable")
        ends = np.searchsorted(num_left[order], np.arange(tables.block_size), side="right")
        places = tables.capacity[slots] // tables.block_size
        groups = np.split(order, ends)  # the last group: rows with a whole spare block
        self.is_whole = not len(groups.pop())  # each row needs its next block within `block_size` steps
        self._cohorts = [
            BlockCohort(
                slots=slots[rows],
                places=places[rows].astype(np.intp),
                ones=np.ones(len(rows), np.intp),
                sizes=np.full(len(rows), tables.block_size, np.int32),
            )
            for rows in groups
        ]
        self._cohort = 0

    @property
    def num_blocks(self) -> int:
        """Blocks that the next step needs."""
        return len(self._cohorts[self._cohort].slots)

    def last_blocks(self) -> list[int]:
        """The last block of each row that needs a new one in the next step; -1 if it holds none."""
        turn = self._cohorts[self._cohort]
        return self._tables.blocks_at(turn.slots, turn.places - turn.ones)

    def grow(self, blocks: Ints) -> tuple[Indices, Indices]:
        """Appends the new blocks to the tables. Returns (slot, place) of each."""
        turn, tables = self._cohorts[self._cohort], self._tables
        slots, places = turn.slots, turn.places
        tables.blocks[slots, places] = blocks
        tables.capacity[slots] += turn.sizes
        turn.places = places + turn.ones
        return slots, places

    def step(self) -> None:
        """Advances by one granted step."""
        self._cohort = (self._cohort + 1) % len(self._cohorts)


class SteadyDecode:
    """Rows that get one token each in every step.

    The rows are grouped once by the step in which they need a new block, and a step handles only its group. Valid for
    plans with the identical `slots` array, which schedule replaces when a sequence comes or goes.
    """

    def __init__(self, slots: Indices, tables: BlockTables, more: Sequence[BlockTables] = ()) -> None:
        self.slots = slots
        self.starts: Ints = tables.num_tokens[slots]  # [R] positions of the tokens of the next step
        self._tables = tables
        self._ones = np.ones(len(slots), np.int32)
        self.growth = SteadyGrowth(slots, self.starts, tables)
        self.more = [SteadyGrowth(slots, self.starts, each) for each in more]  # of the other kinds
        self.is_whole = self.growth.is_whole and all(growth.is_whole for growth in self.more)

    def needs(self) -> list[int]:
        """Blocks of each kind that the next step needs."""
        return [self.growth.num_blocks, *(growth.num_blocks for growth in self.more)]

    def step(self) -> Ints:
        """Advances by one granted step. Returns the positions of its tokens, [R]."""
        starts = self.starts
        self.starts = starts + self._ones
        self._tables.num_tokens[self.slots] = self.starts
        self.growth.step()
        for growth in self.more:
            growth.step()
        return starts


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

    def note(self, slots: Indices) -> None:
        """Takes rows as new, or anew."""
        self._lanes = [*(lane for lane in self._lanes if lane.slots is not slots), SteadyLane(slots)][-self._most :]

    def forget(self, lane: SteadyLane) -> None:
        """Takes the rows of a lane as new when they come again."""
        self._lanes = [each for each in self._lanes if each is not lane]

    def clear(self) -> None:
        """Forgets all rows."""
        self._lanes = []

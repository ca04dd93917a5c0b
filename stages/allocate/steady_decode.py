"""Steady decoding: the same rows step after step, with block needs known ahead.

Plain, columnar state behind the allocator.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..messages import Indices, Ints
from .block_pool import BlockTables


@dataclass(slots=True, eq=False)
class BlockCohort:
    """The rows that need a block in the same step, which is one in `block_size` steps."""

    slots: Indices  # [G]
    places: Indices  # [G] table positions of their next blocks
    ones: Indices  # [G]
    sizes: Ints  # [G] tokens per block


class SteadyDecode:
    """Rows that get one token each in every step.

    Each row needs a new block once in `block_size` steps. The rows are grouped once by the step in which they do, and a
    step handles only its group. Valid for plans with the identical `slots` array, which schedule replaces when a
    sequence comes or goes.
    """

    def __init__(self, slots: Indices, tables: BlockTables) -> None:
        self.slots = slots
        self.starts: Ints = tables.num_tokens[slots]  # [R] positions of the tokens of the next step
        self._tables = tables
        self._ones = np.ones(len(slots), np.int32)
        num_left = tables.capacity[slots] - self.starts  # [R] tokens that still fit into the slot's blocks
        order = np.argsort(num_left, kind="stable")
        ends = np.searchsorted(num_left[order], np.arange(tables.block_size), side="right")
        places = tables.capacity[slots] // tables.block_size
        groups = np.split(order, ends)  # the last group: rows with a whole spare block
        self.is_whole = not len(groups.pop())
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
        """The last block of each row that needs a new one in the next step."""
        turn = self._cohorts[self._cohort]
        last_blocks: list[int] = self._tables.blocks[turn.slots, turn.places - turn.ones].tolist()
        return last_blocks

    def grow(self, blocks: Ints) -> tuple[Indices, Indices]:
        """Appends the new blocks to the tables. Returns (slot, place) of each."""
        turn, tables = self._cohorts[self._cohort], self._tables
        slots, places = turn.slots, turn.places
        tables.blocks[slots, places] = blocks
        tables.capacity[slots] += turn.sizes
        turn.places = places + turn.ones
        return slots, places

    def step(self) -> Ints:
        """Advances by one granted step. Returns the positions of its tokens, [R]."""
        starts = self.starts
        self.starts = starts + self._ones
        self._tables.num_tokens[self.slots] = self.starts
        self._cohort = (self._cohort + 1) % len(self._cohorts)
        return starts

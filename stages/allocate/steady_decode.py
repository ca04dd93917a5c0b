"""Rows that go on decoding, the same ones step after step: what each step needs is known ahead.

Plain, columnar state behind the allocator. Knows tables; refuses to know where blocks come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..messages import Indices, Ints
from .block_pool import BlockTables


@dataclass(slots=True, eq=False)
class Turn:
    """The rows that need a block in the same steps, one of each `block_size`."""

    slots: Indices  # [G]
    places: Indices  # [G] in their tables, of the block that comes next
    ones: Indices  # [G]
    sizes: Ints  # [G] tokens of that block


class Stride:
    """Rows that get one token each in every step. Each of them needs a block once in `block_size` steps, so they are
    sorted by that once, and a step looks at those alone whose turn it is.

    It holds for plans of the very same array `slots`, which schedule makes anew when anybody comes or goes.
    """

    def __init__(self, slots: Indices, tables: BlockTables) -> None:
        self.slots = slots
        self.starts: Ints = tables.num_tokens[slots]  # [R] positions of the tokens of the next step
        self._tables = tables
        self._ones = np.ones(len(slots), np.int32)
        num_left = tables.room[slots] - self.starts  # [R] tokens for which there is room
        order = np.argsort(num_left, kind="stable")
        ends = np.searchsorted(num_left[order], np.arange(tables.block_size), side="right")
        places = tables.room[slots] // tables.block_size
        groups = np.split(order, ends)  # the last one: those that hold more than they need now, and none is made for
        self.is_whole = not len(groups.pop())
        self._turns = [
            Turn(
                slots=slots[rows],
                places=places[rows].astype(np.intp),
                ones=np.ones(len(rows), np.intp),
                sizes=np.full(len(rows), tables.block_size, np.int32),
            )
            for rows in groups
        ]
        self._turn = 0

    @property
    def num_blocks(self) -> int:
        """That the next step needs."""
        return len(self._turns[self._turn].slots)

    def lasts(self) -> list[int]:
        """The last block of each row that needs one for the next step."""
        turn = self._turns[self._turn]
        lasts: list[int] = self._tables.blocks[turn.slots, turn.places - turn.ones].tolist()
        return lasts

    def grow(self, blocks: Ints) -> tuple[Indices, Indices]:
        """Puts the blocks for the next step into the tables: (slot, place) of each."""
        turn, tables = self._turns[self._turn], self._tables
        slots, places = turn.slots, turn.places
        tables.blocks[slots, places] = blocks
        tables.room[slots] += turn.sizes
        turn.places = places + turn.ones
        return slots, places

    def step(self) -> Ints:
        """The step is granted. Returns the positions at which it begins, [R]."""
        starts = self.starts
        self.starts = starts + self._ones
        self._tables.num_tokens[self.slots] = self.starts
        self._turn = (self._turn + 1) % len(self._turns)
        return starts

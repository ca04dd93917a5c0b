"""The block tables of the slots: where the keys of each token are. The tables of a window give back what slid out."""

from __future__ import annotations

import numpy as np

from ....kernels.layout.kv_layout import KVKind, KVLayout
from ...messages import Indices, Ints

MOST_PASSED = 4  # entries of the prefix cache without keys, for each block of the cache, where all layers have windows


class BlockTables:
    """The block tables: token `i` of slot `s` is in block `blocks[s, i // block_size]`.

    Columnar: one row per slot, so that a step of 256 sequences is a few numpy operations and no loop.
    """

    def __init__(self, num_slots: int, blocks_per_slot: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = np.zeros((num_slots, blocks_per_slot), np.int32)  # [S, M] block ids, in token order
        self.capacity = np.zeros(num_slots, np.int32)  # [S] capacity of the slot's blocks in tokens
        self.num_tokens = np.zeros(num_slots, np.int32)  # [S] tokens in the blocks; the last block may be partly filled

    @property
    def num_blocks(self) -> Ints:
        """[S] valid entries of each row of `blocks`."""
        return self.capacity // self.block_size

    @property
    def num_held(self) -> Ints:
        """[S] blocks that each slot has."""
        return self.num_blocks

    def num_blocks_for(self, num_tokens: Ints) -> Ints:
        """Blocks that hold `num_tokens` tokens, elementwise."""
        return -(-num_tokens // self.block_size)

    def last_blocks(self, slots: Indices) -> list[int]:
        """The last block of each slot; -1 if it has none."""
        places = self.capacity[slots] // self.block_size - 1
        last_blocks: list[int] = np.where(places < 0, -1, self.blocks[slots, places]).tolist()
        return last_blocks

    def blocks_at(self, slots: Indices, places: Indices) -> list[int]:
        """The block at `places[i]` of `slots[i]`, which have been filled; -1 if it was retired since."""
        blocks: list[int] = self.blocks[slots, places].tolist()
        return blocks

    def append(self, slots: Indices, counts: Ints, blocks: Ints) -> tuple[Indices, Indices]:
        """Appends `counts[i]` of `blocks`, in order, to the table of `slots[i]`.

        Returns (slot, place) of each, [B].
        """
        if len(blocks) == len(slots):  # one each, as in decoding
            owners, places = slots, (self.capacity[slots] // self.block_size).astype(np.intp)
        else:
            owners = np.repeat(slots, counts)
            places = self.num_blocks[owners] + np.arange(len(blocks)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.blocks[owners, places] = blocks
        self.capacity[slots] += counts * self.block_size
        return owners, places

    def reservable(self, slots: Indices, num_reserved: Ints) -> Ints:
        """The tokens for which slots may have blocks now, of those that they may grow to, elementwise."""
        return num_reserved

    @property
    def waste(self) -> float:
        """The unused share of the running sequences' blocks; 0 if none run."""
        capacity = int(self.capacity.sum())
        return 1.0 - int(self.num_tokens.sum()) / capacity if capacity else 0.0

    def begin(self, slot: int, num_retired: int) -> None:
        """The table of `slot`, which is empty, begins after `num_retired` blocks that it does not hold."""
        assert not num_retired, "a table of a full kind begins with the first block"

    def first_seen(self, position: int) -> int:
        """The place of the first block that the query at `position` sees."""
        return 0

    def live_blocks(self, slot: int, num_tokens: int) -> Ints:
        """The blocks of `slot` that later queries see, of its `num_tokens` tokens."""
        live: Ints = self.blocks[slot, self.first_seen(num_tokens) : -(-num_tokens // self.block_size)].copy()
        return live

    def held_by(self, slot: int) -> Ints:
        """The blocks of `slot`, in token order."""
        held: Ints = self.blocks[slot, : self.capacity[slot] // self.block_size].copy()
        return held

    def clear(self, slot: int) -> Ints:
        """Empties the table of `slot`. Returns the blocks it held."""
        held = self.blocks[slot, : self.capacity[slot] // self.block_size].copy()
        self.capacity[slot] = self.num_tokens[slot] = 0
        return held

    def clear_all(self) -> None:
        """Empties every table."""
        self.capacity[:] = self.num_tokens[:] = 0

    def held(self) -> Ints:
        """The blocks of all tables, one after another."""
        columns = np.arange(self.blocks.shape[1])
        return self.blocks[columns < self.num_blocks[:, None]]


class WindowTables(BlockTables):
    """The tables of a kind whose queries see only the last tokens: the first blocks of a slot are retired.

    Places stay logical, token // block_size. Entries before `num_retired` are stale.
    """

    def __init__(self, kind: KVKind, most: int, num_slots: int, blocks_per_slot: int, block_size: int) -> None:
        super().__init__(num_slots, blocks_per_slot, block_size)
        self.kind = kind
        self.most = most  # blocks that a slot needs at once if it grows by single tokens
        self.num_retired = np.zeros(num_slots, np.int32)  # [S] first blocks of the slot, which were given back
        # tokens from where a slot passes a block to where it needs the next one
        self._num_until_next = -int(kind.first_query_after(block_size)) % block_size

    @property
    def num_held(self) -> Ints:
        return self.num_blocks - self.num_retired

    @property
    def waste(self) -> float:
        num_retired = int(self.num_retired.sum()) * self.block_size  # tokens
        capacity = int(self.capacity.sum()) - num_retired
        return 1.0 - (int(self.num_tokens.sum()) - num_retired) / capacity if capacity else 0.0

    def reservable(self, slots: Indices, num_reserved: Ints) -> Ints:
        return np.minimum(num_reserved, (self.num_retired[slots] + self.most) * self.block_size)

    def due(self, slots: Indices) -> Indices:
        """Those of `slots` of which a block can be retired: about one in `block_size` of decoding ones."""
        return slots[self.num_tokens[slots] >= self.passes_at(self.num_retired[slots])]

    def missed(self, slots: Indices) -> Indices:
        """Those of `slots` that have passed a block, and have got another one since."""
        if self.kind.name != "window":
            return self.due(slots)
        return slots[self.num_tokens[slots] > self.passes_at(self.num_retired[slots]) + self._num_until_next]

    def passes_at(self, places: Indices | Ints) -> Ints:
        """The tokens with which a slot passes its block at each place: no later query sees it."""
        found: Ints = self.kind.first_query_after((places + 1) * self.block_size)
        return found

    def retire(self, slots: Indices) -> tuple[Indices, Indices, Ints]:
        """Takes the blocks of `slots`, all of them due, that no later query sees.

        Returns (slot, place, block) of each, one slot after another.
        """
        firsts, ends = self.num_retired[slots], self.kind.first_key(self.num_tokens[slots]) // self.block_size
        counts = ends - firsts
        if np.count_nonzero(counts != 1):
            owners = np.repeat(slots, counts)
            before = np.repeat(np.cumsum(counts) - counts - firsts, counts)
            places = (np.arange(len(owners)) - before).astype(np.intp)
        else:  # one each, as in decoding
            owners, places = slots, firsts.astype(np.intp)
        self.num_retired[slots] = ends
        return owners, places, self.blocks[owners, places]

    def last_blocks(self, slots: Indices) -> list[int]:
        return self.blocks_at(slots, (self.capacity[slots] // self.block_size - 1).astype(np.intp))

    def blocks_at(self, slots: Indices, places: Indices) -> list[int]:
        blocks: list[int] = np.where(places < self.num_retired[slots], -1, self.blocks[slots, places]).tolist()
        return blocks

    def first_seen(self, position: int) -> int:
        return int(self.kind.first_key(np.array(position, np.int32))) // self.block_size

    def begin(self, slot: int, num_retired: int) -> None:
        assert not self.capacity[slot], f"the table of slot {slot} is not empty"
        self.capacity[slot] = num_retired * self.block_size
        self.num_retired[slot] = num_retired

    def held_by(self, slot: int) -> Ints:
        return super().held_by(slot)[self.num_retired[slot] :]

    def clear(self, slot: int) -> Ints:
        num_retired = int(self.num_retired[slot])
        self.num_retired[slot] = 0
        return super().clear(slot)[num_retired:]

    def clear_all(self) -> None:
        super().clear_all()
        self.num_retired[:] = 0

    def held(self) -> Ints:
        columns = np.arange(self.blocks.shape[1])
        is_held = (columns < self.num_blocks[:, None]) & (columns >= self.num_retired[:, None])
        held: Ints = self.blocks[is_held]
        return held


def index_blocks(layout: KVLayout, num_blocks: int, blocks_per_slot: int, num_slots: int | None = None) -> int:
    """Blocks of the index kind beside `num_blocks` of the largest window.

    Of running or swapped sequences as many as those of the window may need, and for prefixes `MOST_PASSED` a block.
    """
    window = layout.kinds[0].window
    assert window is not None
    each = -(-blocks_per_slot // max(1, (window - 1) // layout.block_size))  # of a sequence, for each of its window
    held = max(each * num_blocks, blocks_per_slot)
    return MOST_PASSED * num_blocks + (held if num_slots is None else min(held, num_slots * blocks_per_slot))

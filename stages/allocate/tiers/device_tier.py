"""The blocks on the device: a pool, and the block tables of the slots, for each kind of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ....kernels.layout.kv_layout import KVLayout
from ...messages import NO_INDICES, NO_INTS, BlockCopy, TableEntries
from .block_pool import BlockPool
from .block_tables import BlockTables, WindowTables, index_blocks
from .plan_in_hand import PlanInHand
from .slab_pool import SlabPool, WindowPool


@dataclass(frozen=True, slots=True, eq=False)
class KindBlocks:
    """The blocks of one kind (see `KVLayout`), and which slots hold them."""

    kind: int
    pool: BlockPool
    tables: BlockTables


class DeviceTier:
    """The pools and the block tables of all kinds. `needs` are blocks, one number a kind.

    `pool` and `tables` are those of kind 0, which keeps all blocks of a sequence: by them prefixes are found, and
    sequences swapped. Where all layers have windows and `keeps_prefixes` (of ended or preempted sequences), kind 0 is
    an *index kind*: its blocks are numbers without memory, and the kinds of the layout follow it. No step hears of it:
    see `without_index`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        blocks_per_slot: int,
        layout: KVLayout | None = None,
        *,
        keeps_prefixes: bool,
    ) -> None:
        self.has_index = layout is not None and layout.kinds[0].window is not None and keeps_prefixes
        self.slabs = SlabPool(layout) if layout is not None and len(layout.kinds) > 1 else None
        pools: tuple[BlockPool, ...] = () if self.slabs is None else self.slabs.pools
        pools = pools or ((WindowPool if self.has_index else BlockPool)(num_blocks, block_size),)
        self.with_memory = self.kinds = _kinds(pools, layout, num_slots, blocks_per_slot, int(self.has_index))
        if self.has_index:
            assert layout is not None
            num_numbers = index_blocks(layout, num_blocks, blocks_per_slot, num_slots)
            tables = BlockTables(num_slots, blocks_per_slot, block_size)
            tables.num_tokens = self.kinds[0].tables.num_tokens
            self.kinds = (KindBlocks(0, BlockPool(num_numbers, block_size), tables), *self.with_memory)
        self.more = self.kinds[1:]
        self.pool, self.tables = self.kinds[0].pool, self.kinds[0].tables
        self.has_windows = any(isinstance(each.tables, WindowTables) for each in self.kinds)
        self.completed_step = -1  # up to which all steps are done

    # -- room

    def fits(self, needs: Sequence[int], *, with_quarantined: bool = False) -> bool:
        """Whether the pools have `needs`, blocks of each kind; `with_quarantined`, once steps in flight are done."""
        if self.slabs is None:
            pairs = zip(self.kinds, needs, strict=True)
            return all(_has(each.pool, need, with_quarantined=with_quarantined) for each, need in pairs)
        if self.has_index and not _has(self.pool, needs[0], with_quarantined=with_quarantined):
            return False
        return self.slabs.fits(needs[self.has_index :], with_quarantined=with_quarantined)

    def has_free(self, needs: Sequence[int]) -> bool:
        """Whether each kind has its `needs` free, in slabs that it has."""
        assert self.slabs is not None
        if self.has_index and needs[0] > self.pool.num_free:
            return False
        return self.slabs.has_free(needs[self.has_index :])

    def reserve(self, needs: Sequence[int], hand: PlanInHand) -> None:
        """Makes sure that each kind can take its `needs`; check `fits` first."""
        if self.slabs is not None:
            self.slabs.reserve(needs[self.has_index :], hand)

    def give_back_unused(self) -> None:
        """Takes back what `reserve` lent to kinds that did not need it after all."""
        if self.slabs is not None:
            self.slabs.give_back_unused()

    # -- steps and slots

    def complete_steps(self, completed_step: int) -> None:
        """Every step up to `completed_step` is done: blocks that it may have touched become free."""
        self.completed_step = completed_step
        for each in self.kinds:
            each.pool.complete_steps(completed_step)

    def clear(self, slot: int, last_step: int) -> None:
        """Gives back all blocks of a slot; step `last_step` may still touch them."""
        for each in self.kinds:
            each.pool.give_back(each.tables.clear(slot), last_step, self.completed_step)

    # -- after a crash

    def reset(self, completed_step: int, last_granted: int) -> None:
        """Clears all block tables. All blocks become free once the steps granted so far are done."""
        self.completed_step = completed_step
        for each in self.kinds:
            each.tables.clear_all()
            each.pool.seize_all(last_granted)
            each.pool.complete_steps(completed_step)

    def check(self, *, may_share: bool) -> None:
        """Raises AssertionError unless each block is in as many tables as its pool counts (I3, I4).

        `may_share`: whether several tables may hold a block.
        """
        for each in self.kinds:
            _check_kind(each, may_share=may_share)
        if self.slabs is not None:
            self.slabs.check()


def without_index(
    copies: Sequence[BlockCopy], entries: Sequence[TableEntries]
) -> tuple[tuple[BlockCopy, ...], TableEntries, tuple[TableEntries, ...]]:
    """What a step hears of copies and new entries of tables: the kinds as in the layout, and none of the index kind.

    Returns the copies, the entries of kind 0, and those of the others.
    """
    told = [replace(each, kind=each.kind - 1) if each.kind > 0 else each for each in copies if each.kind]
    first = next((each for each in entries if each.kind == 1), TableEntries(1, NO_INDICES, NO_INDICES, NO_INTS))
    return tuple(told), first, tuple(replace(each, kind=each.kind - 1) for each in entries if each.kind > 1)


def _has(pool: BlockPool, need: int, *, with_quarantined: bool) -> bool:
    return need <= pool.num_available + pool.num_quarantined * with_quarantined


def _kinds(
    pools: Sequence[BlockPool], layout: KVLayout | None, num_slots: int, blocks_per_slot: int, first: int
) -> tuple[KindBlocks, ...]:
    """The blocks of each kind of the layout, from number `first` on. All tables have one array of `num_tokens`."""
    found: list[KindBlocks] = []
    for number, pool in enumerate(pools):
        kind = None if layout is None else layout.kinds[number]
        if kind is None or kind.window is None:
            tables = BlockTables(num_slots, blocks_per_slot, pool.block_size)
        else:
            assert layout is not None
            most = layout.most_blocks(number, blocks_per_slot * pool.block_size)
            tables = WindowTables(kind, most, num_slots, blocks_per_slot, pool.block_size)
        if found:
            tables.num_tokens = found[0].tables.num_tokens
        found.append(KindBlocks(first + number, pool, tables))
    return tuple(found)


def _check_kind(each: KindBlocks, *, may_share: bool) -> None:
    pool, tables = each.pool, each.tables
    pool.check()
    num_tables = np.bincount(tables.held(), minlength=pool.num_blocks)
    wrong = (num_tables != pool.num_tables).nonzero()[0]
    assert not len(wrong), f"blocks {wrong.tolist()} are in other tables than the pool counts"
    assert may_share or num_tables.max(initial=0) <= 1, "two tables hold one block"
    assert not (tables.capacity % tables.block_size).any(), "the capacity of a table ends within a block"
    assert (tables.num_tokens <= tables.capacity).all(), "a slot has tokens without a block"

"""Bugs to plant in the allocator, each a context manager. Random plans against the naive memory must find them.

Includes those of `tests/simulation/memory_bugs.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from pytest import MonkeyPatch

from millrace.stages.allocate import allocator
from millrace.stages.allocate.partial_blocks import PartialBlocks
from millrace.stages.allocate.preemption import Preemptor
from millrace.stages.allocate.prefix_cache import BlockChain, PrefixCache
from millrace.stages.allocate.prefix_publisher import PrefixPublisher
from millrace.stages.allocate.sequence_starts import SequenceStarts
from millrace.stages.allocate.slot_blocks import SlotBlocks
from millrace.stages.allocate.tiers.block_pool import BlockPool
from millrace.stages.allocate.tiers.block_tables import BlockTables
from millrace.stages.allocate.tiers.host_tier import HostTier
from millrace.stages.allocate.tiers.plan_in_hand import PlanInHand, ReusedPrefix
from millrace.stages.messages import Direction, Indices, Ints, Started
from tests.simulation.memory_bugs import MEMORY_BUGS
from tests.simulation.planting import Bug, changed

# -- counting blocks and tokens


def one_block_too_few() -> AbstractContextManager[None]:
    """Tokens that do not fill a whole block get no block."""

    def change(num_blocks_for: Any) -> Any:
        def short(self: BlockTables, num_tokens: Ints) -> Ints:
            return np.maximum(num_tokens // self.block_size, 1)

        return short

    return changed(BlockTables, "num_blocks_for", change)


def budget_exceeded_by_one() -> AbstractContextManager[None]:
    """A step holds one token more than it may."""

    def change(cut_to_budget: Any) -> Any:
        def generous(hand: PlanInHand) -> Any:
            plan, hand.plan = hand.plan, replace(hand.plan, token_budget=hand.plan.token_budget + 1)
            granted = cut_to_budget(hand)
            hand.plan = plan
            return granted

        return generous

    return changed(allocator, "_cut_to_budget", change)


def whole_wishes_cut() -> AbstractContextManager[None]:
    """If free blocks do not suffice, a part is granted even where that is not allowed."""

    def change(what_fits: Any) -> Any:
        def cutting(self: Preemptor, row: int, wanted: int) -> Any:
            self._plan, plan = replace(self._plan, allows_partial=True), self._plan
            fits = what_fits(self, row, wanted)
            self._plan = plan
            return fits

        return cutting

    return changed(Preemptor, "_what_fits", change)


# -- preemption


def victim_that_may_not_be_taken() -> AbstractContextManager[None]:
    """A row takes from one victim more than it may."""

    def change(next_victim: Any) -> Any:
        def greedy(self: Preemptor, row: int, need: int) -> Any:
            more = replace(self._plan, num_victims=self._plan.num_victims + 1)
            self._plan, plan = more, self._plan
            victim = next_victim(self, row, need)
            self._plan = plan
            return victim

        return greedy

    return changed(Preemptor, "_next_victim", change)


def victim_served_all_the_same() -> AbstractContextManager[None]:
    """A victim loses its blocks and keeps what this plan has granted it before."""

    def change(preempt: Any) -> Any:
        def forgetful(self: Preemptor, slot: int) -> None:
            row, self._row_of = self._row_of, {}
            preempt(self, slot)
            self._row_of = row

        return forgetful

    return changed(Preemptor, "_preempt", change)


def detached_in_name_only() -> AbstractContextManager[None]:
    """A row that cannot start after all keeps the cached blocks that it found."""

    def change(detach: Any) -> Any:
        def lossy(self: SequenceStarts, hand: PlanInHand, row: int) -> None:
            with MonkeyPatch.context() as patch:
                patch.setattr(self.device.pool, "give_back", lambda *args: None)
                detach(self, hand, row)

        return lossy

    return changed(SequenceStarts, "detach", change)


# -- blocks that are used again


def settled_one_step_early() -> AbstractContextManager[None]:
    """Blocks leave quarantine one step too early."""

    def change(complete_steps: Any) -> Any:
        def hasty(self: BlockPool, completed_step: int) -> None:
            complete_steps(self, completed_step + 1)

        return hasty

    return changed(BlockPool, "complete_steps", change)


def evicted_while_in_use() -> AbstractContextManager[None]:
    """A cached block that is shared stays in the order of eviction."""

    def change(share: Any) -> Any:
        def forgetful(self: BlockPool, blocks: Ints) -> None:
            cached = [block for block in blocks.tolist() if block in self._cached]
            share(self, blocks)
            self._cached.update(dict.fromkeys(cached))

        return forgetful

    return changed(BlockPool, "share", change)


def eviction_untold() -> AbstractContextManager[None]:
    """The cache is not notified of evicted blocks."""

    def change(tell: Any) -> Any:
        def silent(self: BlockPool, hand: PlanInHand | None) -> None:
            self._listeners, told = [], self._listeners
            tell(self, hand)
            self._listeners = told

        return silent

    return changed(BlockPool, "_notify_evicted", change)


# -- the host


def one_block_too_few_is_swapped() -> AbstractContextManager[None]:
    """The last block of several is not copied to the host."""

    def change(preempt: Any) -> Any:
        def short(self: SlotBlocks, hand: PlanInHand, slot: int) -> None:
            num_copies = len(hand.copies)
            preempt(self, hand, slot)
            if len(hand.copies) > num_copies and len(hand.copies[-1].sources) > 1:
                copy = hand.copies.pop()
                hand.copies.append(replace(copy, sources=copy.sources[:-1], destinations=copy.destinations[:-1]))

        return short

    return changed(SlotBlocks, "preempt", change)


def copied_back_in_the_wrong_place() -> AbstractContextManager[None]:
    """Blocks from the host are copied after the shared ones without skipping the shared part."""

    def change(copy_in: Any) -> Any:
        def shifted(self: SequenceStarts, hand: PlanInHand) -> None:
            copy_in(self, hand)
            for place, copy in enumerate(hand.copies):
                if copy.direction is Direction.IN:
                    hand.copies[place] = replace(copy, destinations=np.roll(copy.destinations, 1))

        return shifted

    return changed(SequenceStarts, "copy_in", change)


def reset_keeps_the_host() -> AbstractContextManager[None]:
    """After a crash sequences keep their host blocks."""

    def change(forget_all: Any) -> Any:
        def sentimental(self: HostTier, last_step: int) -> None:
            swapped = dict(self._swapped)
            forget_all(self, last_step)
            self._swapped.update(swapped)

        return sentimental

    return changed(HostTier, "forget_all", change)


# -- the prefix cache


def one_block_found_too_many() -> AbstractContextManager[None]:
    """The device is notified of one cached block too many."""

    def change(with_beginning: Any) -> Any:
        def boasting(self: SequenceStarts, hand: PlanInHand, started: Started) -> Started:
            told: Started = with_beginning(self, hand, started)
            return replace(told, num_cached=told.num_cached + self.device.pool.block_size) if told.num_cached else told

        return boasting

    return changed(SequenceStarts, "_with_beginning", change)


def salt_ignored() -> AbstractContextManager[None]:
    """Sequences find blocks of any cache salt."""

    def change(chain: Any) -> Any:
        def unsalted(self: PrefixCache, sequence_id: int, token_ids: Ints, salt: str = "", **more: Any) -> BlockChain:
            made: BlockChain = chain(self, sequence_id, token_ids, "", **more)
            return made

        return unsalted

    return changed(PrefixCache, "chain", change)


def partial_block_published() -> AbstractContextManager[None]:
    """The last, partly filled block of a prompt counts as filled."""

    def change(put_known: Any) -> Any:
        def rounding_up(self: PrefixPublisher, slot: int, chain: BlockChain, num_full: int) -> None:
            put_known(self, slot, chain, min(num_full + 1, chain.num_known))

        return rounding_up

    return changed(PrefixPublisher, "_put_known", change)


def answer_published_early() -> AbstractContextManager[None]:
    """A block of an answer can be found when its last token is chosen, before that is computed."""

    def change(put_filled: Any) -> Any:
        def hasty(self: PrefixPublisher, slots: Indices, places: Indices) -> None:
            put_filled(self, slots, places)
            size = self._tables.block_size
            for slot in np.flatnonzero(self._sequence_ids >= 0).tolist():
                chain = self._chain(slot)
                end = int(self._tables.num_tokens[slot])
                if end % size == 0 and chain.num_blocks == end // size - 1 >= chain.num_known:
                    half = self._newest.reshape(len(self._newest), 2, size)[slot, chain.num_blocks % 2]
                    block = self._tables.blocks[slot, chain.num_blocks]
                    if self.cache.put(chain, int(block), half.tobytes()):
                        self._pool.keep(np.array([block], np.int32))

        return hasty

    return changed(PrefixPublisher, "_put_filled", change)


def kept_unwritten() -> AbstractContextManager[None]:
    """Blocks are put into the cache as soon as they are granted."""

    def change(note_grant: Any) -> Any:
        def hasty(self: PrefixPublisher, step: int, slots: Indices, starts: Ints, ends: Ints, found: Ints) -> None:
            note_grant(self, step, slots, starts, ends, found)
            for slot, end in zip(slots.tolist(), ends.tolist(), strict=True):
                chain = self._chain(slot)
                self._put_known(slot, chain, min(end // self._tables.block_size, chain.num_known))

        return hasty

    return changed(PrefixPublisher, "note_grant", change)


def reset_cache_still_fills() -> AbstractContextManager[None]:
    """Sequences that run during a reset of the prefix cache still publish their blocks."""

    def change(forget: Any) -> Any:
        def lenient(self: PrefixPublisher) -> None:
            self.cache.clear()

        return lenient

    return changed(PrefixPublisher, "forget", change)


def forked_on_the_first_token() -> AbstractContextManager[None]:
    """Blocks with the same first token count as equal."""

    def change(find: Any) -> Any:
        def trusting(self: PartialBlocks, before: int | str, tokens: bytes, least: int) -> tuple[int, int] | None:
            found = find(self, before, tokens, least)
            return None if found is None else (found[0], len(tokens) // 4)

        return trusting

    return changed(PartialBlocks, "find", change)


def tail_outlives_its_block() -> AbstractContextManager[None]:
    """A tail can be found after its block is taken for something else."""

    def change(forget: Any) -> Any:
        def sentimental(self: PrefixCache, block: int) -> None:
            if not self.is_tail(block):
                forget(self, block)

        return sentimental

    return changed(PrefixCache, "forget", change)


def copied_into_the_wrong_block() -> AbstractContextManager[None]:
    """The forked block goes after the shared ones, even if host blocks come in between."""

    def change(fork: Any) -> Any:
        def shifted(self: SequenceStarts, hand: PlanInHand) -> None:
            with MonkeyPatch.context() as patch:
                patch.setattr(ReusedPrefix, "num_whole", property(lambda beginning: len(beginning.shared)))
                fork(self, hand)

        return shifted

    return changed(SequenceStarts, "fork", change)


def whole_block_stays_a_tail() -> AbstractContextManager[None]:
    """A tail is kept as known although another block represents it once it is whole."""

    def change(put: Any) -> Any:
        def lazy(self: PrefixPublisher, chain: BlockChain, block: int, tokens: bytes | None = None) -> bool:
            self.cache.drop_tail(block)
            return self.cache.put(chain, block, tokens)

        return lazy

    return changed(PrefixPublisher, "_put", change)


OURS: tuple[Bug, ...] = (
    one_block_too_few,
    budget_exceeded_by_one,
    whole_wishes_cut,
    victim_that_may_not_be_taken,
    victim_served_all_the_same,
    detached_in_name_only,
    settled_one_step_early,
    evicted_while_in_use,
    eviction_untold,
    one_block_too_few_is_swapped,
    copied_back_in_the_wrong_place,
    reset_keeps_the_host,
    one_block_found_too_many,
    salt_ignored,
    partial_block_published,
    answer_published_early,
    kept_unwritten,
    reset_cache_still_fills,
    forked_on_the_first_token,
    tail_outlives_its_block,
    copied_into_the_wrong_block,
    whole_block_stays_a_tail,
)
BUGS: Mapping[str, Bug] = {bug.__name__: bug for bug in OURS} | MEMORY_BUGS

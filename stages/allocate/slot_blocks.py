"""The blocks of each slot, on the device and, waiting to be copied back, on the host.

The allocator decides how much each row gets; this file carries it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...kernels.layout.kv_layout import KVLayout
from ..messages import NO_INDICES, NO_INTS, STATES, BlockCopy, Bools, Direction, Indices, Ints, Started, TableEntries
from .evictions import Evictions, KindEvictions
from .prefix_cache import PrefixCache, PrefixMatch
from .prefix_publisher import PrefixPublisher
from .tiers.block_pool import BlockPool
from .tiers.block_tables import BlockTables, WindowTables, index_blocks
from .tiers.host_tier import HostTier
from .tiers.plan_in_hand import KindMatch, PlanInHand, ReusedPrefix
from .tiers.slab_pool import SlabPool, WindowPool

NOTHING_FOUND = PrefixMatch(NO_INTS, NO_INTS, None, 0)


@dataclass(frozen=True, slots=True, eq=False)
class KindBlocks:
    """The blocks of one kind (see `KVLayout`), and which slots hold them."""

    kind: int
    pool: BlockPool
    tables: BlockTables


@dataclass(frozen=True, slots=True, eq=False)
class Growth:
    """New blocks of one kind for some rows of a plan."""

    rows: Indices  # [G]
    counts: Ints  # [G] blocks for each
    num_blocks: int  # in all
    again: Indices  # rows beside those that go on in a block that their window has passed


class SlotBlocks:
    """The state of one pool a kind and of the slots. What a plan causes is collected in the plan in hand.

    `pool` and `tables` are those of kind 0, which keeps all blocks of a sequence: by them prefixes are found, and
    sequences swapped. Where all layers have windows, kind 0 is an *index kind*: its blocks are numbers without memory,
    and the kinds of the layout follow it. No step hears of it: see `without_index`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        blocks_per_slot: int,
        cache: PrefixCache | None,
        host: HostTier | None,
        layout: KVLayout | None = None,
    ) -> None:
        keeps_prefixes = cache is not None or host is not None
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
        self.host = host
        self.publisher = None if cache is None else PrefixPublisher(cache, self.pool, self.tables)
        host_pools = [None] * len(self.more) if host is None else host.more
        assert len(host_pools) == len(self.more), f"{len(self.kinds)} kinds, and host pools of {1 + len(host_pools)}"
        self._evictions: list[Evictions | KindEvictions] = []  # of each kind, with a prefix cache
        if self.publisher is not None:
            for each, host_pool in zip(self.more, host_pools, strict=True):
                assert layout is not None
                kind = layout.kinds[each.kind - self.has_index]
                self.publisher.add_kind(kind, each.pool, each.tables, host_pool)
            self._evictions.append(Evictions(self.publisher, host, self.pool))
            self._evictions += [KindEvictions(self.publisher, host, each.kind, each.pool) for each in self.more]
        windows = [each for each in self.kinds if isinstance(each.tables, WindowTables)]
        self._windows = windows
        self.has_windows = bool(windows)
        self.completed_step = -1
        self.last_step = np.full(num_slots, -1, np.int64)  # [S] the last step that may touch the slot's blocks
        self.started: dict[int, Started] = {}  # by slot: not yet sent with a grant
        self.sequence_ids = np.full(num_slots, -1, np.int64)  # [S] the sequence that started there last
        self._must_compute = np.zeros(num_slots, np.bool_)  # [S] whether it must compute all its tokens

    # -- updates

    def apply_updates(self, hand: PlanInHand) -> None:
        """Applies the updates of a plan: completed steps, and ended, preempted or started sequences."""
        plan = hand.plan
        self.completed_step = plan.completed_step
        if self.publisher is not None:
            self.publisher.complete_steps(plan)
        self.pool.complete_steps(plan.completed_step)
        for each in self.more:
            each.pool.complete_steps(plan.completed_step)
        if self.host is not None:
            lost = self.host.complete_steps(plan.completed_step, plan.voided, plan.generation)
            for evictions in self._evictions:
                evictions.on_host(self.host.take_lost(evictions.kind) if evictions.kind else lost)
            for sequence_id in plan.discarded:
                self.host.release(sequence_id, plan.step - 1, plan.completed_step)  # an earlier step may copy into them
        for slot, num_accepted in plan.accepted:
            self.tables.num_tokens[slot] += num_accepted
        if self.publisher is not None and self.publisher.cache.snapshots is not None:
            self._save_ends(hand)
        for slot in (*plan.ended, *plan.dropped):
            self.empty(hand, slot)
        for slot in plan.preempted:
            self.preempt(hand, slot)
        for started in plan.started:
            self.started[started.slot] = started
            self.sequence_ids[started.slot] = started.sequence_id
            self._must_compute[started.slot] = started.pooling is not None and started.pooling.needs_every_position
            if self.publisher is not None:
                self.publisher.start(started)

    def _save_ends(self, hand: PlanInHand) -> None:
        """Collects the copies of the states of ended sequences to snapshots, before other sequences get their slots."""
        assert self.publisher is not None
        plan, places = hand.plan, {}
        for slot in plan.ended:
            if slot not in plan.dropped and slot not in self.started:
                place = self.publisher.save_end(slot, plan)
                if place is not None:
                    places[slot] = place
        if places:
            arrays = np.array(list(places), np.int32), np.array(list(places.values()), np.int32)
            hand.copies.append(BlockCopy(Direction.FORK, *arrays, STATES))

    def empty(self, hand: PlanInHand, slot: int) -> None:
        """Takes all blocks of a slot.

        They become available when the last step that may touch them is done.
        """
        self.started.pop(slot, None)
        self._give_up_beginning(hand, slot)
        if self.publisher is not None:
            self.publisher.drop(slot)
        self._clear(slot, int(self.last_step[slot]))

    def _clear(self, slot: int, last_step: int) -> None:
        """Gives back all blocks of a slot; step `last_step` may still touch them."""
        self.pool.give_back(self.tables.clear(slot), last_step, self.completed_step)
        for each in self.more:
            each.pool.give_back(each.tables.clear(slot), last_step, self.completed_step)

    def preempt(self, hand: PlanInHand, slot: int) -> None:
        """Preempts a slot in the plan in hand: swaps it out if there is room and it pays.

        Blocks that were not copied back from the host yet stay there.
        """
        num_tokens = int(self.tables.num_tokens[slot])
        may_return = num_tokens and slot not in self.started and not self._must_compute[slot]
        if self.host is not None and may_return:
            sequence_id = int(self.sequence_ids[slot])
            live = [each.tables.live_blocks(slot, num_tokens) for each in self.more]
            kept = self.host.swap_out(sequence_id, num_tokens, [len(blocks) for blocks in live])
            if kept is not None:
                blocks = self.tables.blocks[slot, : len(kept)].copy()
                hand.copies.append(BlockCopy(Direction.OUT, blocks, kept))
                for each, blocks, places in zip(self.more, live, self.host.more_blocks(sequence_id), strict=True):
                    if len(blocks):
                        hand.copies.append(BlockCopy(Direction.OUT, blocks, places, each.kind))
                if len(place := self.host.state(sequence_id)):
                    hand.copies.append(BlockCopy(Direction.OUT, np.array([slot], np.int32), place, STATES))
                hand.swapped[slot] = num_tokens
                self.last_step[slot] = hand.plan.step
        self.empty(hand, slot)

    # -- starting sequences

    def starting_rows(self, hand: PlanInHand) -> list[int]:
        """Starting rows that may have cached or swapped tokens."""
        if not self.started:
            return []
        fewest = 2  # tokens; a cache hit must leave at least one token to compute
        return [
            row
            for row, slot in enumerate(hand.plan.slots.tolist())
            if slot in self.started
            and not self.tables.capacity[slot]
            and not self._must_compute[slot]
            and (self._num_swapped(slot) or (self.publisher is not None and hand.wanted[row] >= fewest))
        ]

    def attach(self, hand: PlanInHand, row: int, *, may_fork: bool, may_share: bool = True) -> None:
        """Gives the row its cached or swapped blocks; their tokens do not remain to be computed.

        None remains, for now, if another sequence is computing the row's next block.

        A fork holds its source block until the copy is done, which could be the very block lacking for the copy. So
        `may_fork` is False when blocks run short, and the few tokens are computed. Where there are several kinds,
        shared blocks hold their slabs, of which another kind may lack one. So `may_share` is False if the row does not
        fit.
        """
        slot, wanted = int(hand.plan.slots[row]), int(hand.wanted[row])
        beginning = self._find(slot, may_fork=may_fork, may_share=may_share)
        if beginning is None:
            hand.set_remaining(row, 0)
            return
        num_tokens, shared = beginning.num_tokens, beginning.shared
        if num_tokens:
            if len(shared):
                self.pool.share(shared)
                self.tables.append(np.array([slot]), np.array([len(shared)], np.int32), shared)
            if len(beginning.on_host) and not beginning.is_swapped:
                assert self.host is not None
                self.host.pool.share(beginning.on_host)
            if beginning.source is not None:
                self.pool.share(np.array([beginning.source], np.int32))
            if self.more:
                self._attach_more(slot, beginning)
            self.tables.num_tokens[slot] = num_tokens
            hand.set_remaining(row, wanted - num_tokens)
            hand.begun[slot] = beginning
        if self.publisher is not None:
            self.publisher.begin(slot, num_tokens + min(wanted - num_tokens, hand.plan.token_budget))

    def _attach_more(self, slot: int, beginning: ReusedPrefix) -> None:
        """The same for the kinds after kind 0: their tables begin with what the next query sees."""
        for each, match in zip(self.more, beginning.more, strict=True):
            each.tables.begin(slot, match.first)
            if len(match.shared):
                each.pool.share(match.shared)
                each.tables.append(np.array([slot]), np.array([len(match.shared)], np.int32), match.shared)
            if len(match.on_host) and not beginning.is_swapped:
                assert self.host is not None
                self.host.more[each.kind - 1].share(match.on_host)
            if match.source is not None:
                each.pool.share(np.array([match.source], np.int32))

    def _find(self, slot: int, *, may_fork: bool, may_share: bool) -> ReusedPrefix | None:
        """What the sequence in `slot` need not compute; None if it should wait for another sequence.

        A sequence with prompt_logprobs needs the logits of each prompt token, so it uses no cached blocks.
        """
        num_swapped = self._num_swapped(slot)
        found: PrefixMatch | None = NOTHING_FOUND
        if self.publisher is not None and not self.started[slot].wants_prompt_logprobs:
            if may_share:
                found = self.publisher.find(slot, may_wait=not num_swapped, may_fork=may_fork)
            else:
                self.publisher.find_nothing(slot)
        if found is None:
            return None
        shared, places, source, num_forked, more, snapshot = found
        num_found = (len(shared) + len(places)) * self.pool.block_size + num_forked
        if num_swapped > num_found:
            assert self.host is not None
            sequence_id = int(self.sequence_ids[slot])
            own = self.host.blocks(sequence_id)
            if self.publisher is not None and self.host.is_stale(sequence_id):
                self.publisher.cut(slot)
            more = tuple(
                KindMatch(int(each.tables.first_seen(num_swapped)), NO_INTS, blocks)
                for each, blocks in zip(self.more, self.host.more_blocks(sequence_id), strict=True)
            )
            return ReusedPrefix(num_swapped, shared, own[len(shared) :], is_swapped=True, more=more)
        return ReusedPrefix(num_found, shared, places, is_swapped=False, source=source, more=more, snapshot=snapshot)

    def detach(self, hand: PlanInHand, row: int) -> None:
        """Undoes `attach`: all that the row wants remains to be computed."""
        hand.set_remaining(row, int(hand.wanted[row]))
        slot = int(hand.plan.slots[row])
        if self.publisher is not None:
            self.publisher.begin_no_more(slot)
        self._give_up_beginning(hand, slot)
        self._clear(slot, -1)

    def _give_up_beginning(self, hand: PlanInHand, slot: int) -> None:
        beginning = hand.begun.pop(slot, None)
        if beginning is None:
            return
        if self.host is not None and not beginning.is_swapped:
            self.host.pool.give_back(beginning.on_host, -1, self.completed_step)
        if beginning.source is not None:
            self.pool.give_back(np.array([beginning.source], np.int32), -1, self.completed_step)
        for each, match in zip(self.more, beginning.more, strict=True):
            if self.host is not None and not beginning.is_swapped:
                self.host.more[each.kind - 1].give_back(match.on_host, -1, self.completed_step)
            if match.source is not None:
                each.pool.give_back(np.array([match.source], np.int32), -1, self.completed_step)

    def _num_swapped(self, slot: int) -> int:
        return 0 if self.host is None else self.host.num_tokens(int(self.sequence_ids[slot]))

    # -- granting

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

    def grow(self, hand: PlanInHand, slots: Indices, counts: Ints, num_blocks: int) -> tuple[Indices, Indices, Ints]:
        """Takes `num_blocks` new blocks, `counts[i]` for `slots[i]`.

        Returns (slot, place, block) of each, and of the shared blocks with which sequences start.
        """
        blocks = self.pool.take_behind(self.tables.last_blocks(slots), counts.tolist(), num_blocks, hand)
        table_slots, table_places = self.tables.append(slots, counts, blocks)
        for slot, beginning in hand.begun.items():
            found = beginning.shared
            table_slots = np.concatenate([table_slots, np.full(len(found), slot)])
            table_places = np.concatenate([table_places, np.arange(len(found))])
            blocks = np.concatenate([blocks, found])
        return table_slots, table_places, blocks

    def grow_more(self, hand: PlanInHand, growths: Sequence[Growth]) -> tuple[TableEntries, ...]:
        """Takes the new blocks of the kinds after kind 0. Their entries come with those of shared blocks."""
        made = []
        for each, growth in zip(self.more, growths, strict=True):
            slots, places, blocks = NO_INDICES, NO_INDICES, NO_INTS
            if growth.num_blocks:
                slots = hand.plan.slots[growth.rows]
                last_blocks = each.tables.last_blocks(slots)
                blocks = each.pool.take_behind(last_blocks, growth.counts.tolist(), growth.num_blocks, hand)
                slots, places = each.tables.append(slots, growth.counts, blocks)
            if len(growth.again):
                own_slots, own_places, own_blocks = self._go_on(each, hand.plan.slots[growth.again])
                slots, places = np.concatenate([slots, own_slots]), np.concatenate([places, own_places])
                blocks = np.concatenate([blocks, own_blocks])
            for slot, beginning in hand.begun.items():
                first, found, _, _ = beginning.more[each.kind - 1]
                slots = np.concatenate([slots, np.full(len(found), slot)])
                places = np.concatenate([places, np.arange(first, first + len(found))])
                blocks = np.concatenate([blocks, found])
            if len(slots):
                made.append(TableEntries(each.kind, slots, places, blocks))
        return tuple(made)

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
        if self.publisher is not None:
            published = self.publisher.kinds[each.kind - 1]
            pool.pass_by(blocks[self.publisher.is_passed(published, owners, places)])
        if self.publisher is None or len(np.unique(blocks)) == len(blocks):
            pool.give_back(blocks, step, self.completed_step)
        else:  # some slots share blocks
            for slot in due.tolist():
                pool.give_back(blocks[owners == slot], step, self.completed_step)

    def retire_missed(self, slots: Indices, step: int) -> None:
        """The same, of slots that have passed a block and did not go on in it; `may_go_on` says which may."""
        for each in self._windows:
            assert isinstance(each.tables, WindowTables)
            self.retire_of(each, each.tables.missed(slots), step)

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
        is_alone = each.pool.is_alone(tables.blocks[slots, firsts], self.completed_step)
        found: Bools = (since >= num_in_flight) & is_alone & self.may_reuse(slots, firsts)
        return found

    def _go_on(self, each: KindBlocks, slots: Indices) -> tuple[Indices, Indices, Ints]:
        """Has `slots` go on in the block that they passed. Returns (slot, place, block) of each."""
        tables = each.tables
        assert isinstance(tables, WindowTables)
        blocks = tables.blocks[slots, tables.num_retired[slots]]
        self.write_again(each, blocks)
        tables.num_retired[slots] += 1
        return *tables.append(slots, np.ones(len(slots), np.int32), blocks), blocks

    def may_reuse(self, slots: Indices, places: Indices) -> Bools:
        """Whether the blocks at these places of windows, [R], are of no use once passed: those of answers are not."""
        if self.publisher is None:
            return np.ones(len(slots), np.bool_)
        return self.publisher.is_of_answer(slots, places)

    def write_again(self, each: KindBlocks, blocks: Ints) -> None:
        """The slots of these blocks of a window write other tokens there: sequences find them no more."""
        if self.publisher is not None:
            cached = blocks[each.pool.is_kept(blocks)].tolist()
            self.publisher.forget_blocks_of(each.kind, cached)
            for block in cached:
                each.pool.forget(block)

    def copy_in(self, hand: PlanInHand) -> None:
        """Collects the copies from the host for the sequences that start in the plan."""
        if self.host is None:
            return
        step = hand.plan.step
        for slot, beginning in hand.begun.items():
            if len(beginning.on_host):
                first = len(beginning.shared)
                blocks = self.tables.blocks[slot, first : first + len(beginning.on_host)].copy()
                hand.copies.append(BlockCopy(Direction.IN, beginning.on_host, blocks))
            if not beginning.is_swapped:
                self.host.pool.give_back(beginning.on_host, step, self.completed_step)
            for each, match in zip(self.more, beginning.more, strict=True):
                if len(match.on_host):
                    first = match.first + len(match.shared)
                    blocks = each.tables.blocks[slot, first : first + len(match.on_host)].copy()
                    hand.copies.append(BlockCopy(Direction.IN, match.on_host, blocks, each.kind))
                if not beginning.is_swapped:
                    self.host.more[each.kind - 1].give_back(match.on_host, step, self.completed_step)
            if beginning.is_swapped and len(place := self.host.state(int(self.sequence_ids[slot]))):
                hand.copies.append(BlockCopy(Direction.IN, place, np.array([slot], np.int32), STATES))
            self.host.release(int(self.sequence_ids[slot]), step, self.completed_step)

    def fork(self, hand: PlanInHand) -> None:
        """Collects the copies of partly matching blocks for the sequences that start in the plan.

        The sources are held until its step is done.
        """
        step, sources, destinations = hand.plan.step, [], []
        for slot, beginning in hand.begun.items():
            if beginning.source is not None:
                sources.append(beginning.source)
                destinations.append(int(self.tables.blocks[slot, beginning.num_whole]))
                self.pool.give_back(np.array([beginning.source], np.int32), step, self.completed_step)
        if sources:
            copy = BlockCopy(Direction.FORK, np.array(sources, np.int32), np.array(destinations, np.int32))
            hand.copies.append(copy)
            for each in self.more:
                self._fork_more(hand, each)

    def restore_states(self, hand: PlanInHand) -> None:
        """Collects the copies of snapshots for the sequences that start in the plan behind cached prefixes."""
        found = {slot: each.snapshot for slot, each in hand.begun.items() if each.snapshot is not None}
        if found:
            arrays = np.array(list(found.values()), np.int32), np.array(list(found), np.int32)
            hand.copies.append(BlockCopy(Direction.FORK, *arrays, STATES))

    def save_states(self, hand: PlanInHand, places: dict[int, int]) -> None:
        """Collects the copies of the states behind the plan's rows to snapshots, `places` by slot."""
        if places:
            arrays = np.array(list(places), np.int32), np.array(list(places.values()), np.int32)
            hand.copies.append(BlockCopy(Direction.SAVE, *arrays, STATES))

    def _fork_more(self, hand: PlanInHand, each: KindBlocks) -> None:
        """The same for a kind after kind 0: a block that is copied is copied in every kind."""
        sources, destinations = [], []
        for slot, beginning in hand.begun.items():
            source = beginning.more[each.kind - 1].source
            if source is not None:
                sources.append(source)
                destinations.append(int(each.tables.blocks[slot, beginning.num_whole]))
                each.pool.give_back(np.array([source], np.int32), hand.plan.step, self.completed_step)
        arrays = np.array(sources, np.int32), np.array(destinations, np.int32)
        hand.copies.append(BlockCopy(Direction.FORK, *arrays, each.kind))

    def take_started(self, hand: PlanInHand, slots: Indices) -> tuple[Started, ...]:
        """The starts of these slots that were not sent with a grant yet."""
        all_started = (self.started.pop(slot) for slot in slots.tolist() if slot in self.started)
        return tuple(self._with_beginning(hand, started) for started in all_started)

    def _with_beginning(self, hand: PlanInHand, started: Started) -> Started:
        beginning = hand.begun.get(started.slot)
        if beginning is None:
            return started
        num_shared = len(beginning.shared) * self.pool.block_size
        return replace(started, num_cached=beginning.num_tokens, num_shared=num_shared)

    # -- after a crash

    def reset(self, completed_step: int, last_granted: int) -> None:
        """Clears all block tables. All blocks become free once the steps granted so far are done."""
        self.completed_step = completed_step
        self.started.clear()
        if self.publisher is not None:
            self.publisher.drop_all()
        for each in self.kinds:
            each.tables.clear_all()
            each.pool.seize_all(last_granted)
            each.pool.complete_steps(completed_step)
        if self.host is not None:
            self.host.forget_all(last_granted)
            for pool in self.host.pools:
                pool.complete_steps(completed_step)

    def check(self) -> None:
        """Raises AssertionError unless pools, tables and cache agree (I3, I4, I11).

        Each block is in as many tables as the pool counts, and the pool keeps exactly the blocks in the cache.
        """
        for each in self.kinds:
            self._check_kind(each)
        if self.slabs is not None:
            self.slabs.check()
        if self.publisher is not None:
            self.publisher.check()
        if self.host is not None:
            self.host.check()
            places = set() if self.publisher is None else self.publisher.cache.places()
            assert self.host.pool.kept() == places, "the host pool keeps other blocks than the cache holds"

    def _check_kind(self, each: KindBlocks) -> None:
        pool, tables = each.pool, each.tables
        pool.check()
        num_tables = np.bincount(tables.held(), minlength=pool.num_blocks)
        wrong = (num_tables != pool.num_tables).nonzero()[0]
        assert not len(wrong), f"blocks {wrong.tolist()} are in other tables than the pool counts"
        assert self.publisher is not None or num_tables.max(initial=0) <= 1, "two tables hold one block"
        assert not (tables.capacity % tables.block_size).any(), "the capacity of a table ends within a block"
        assert (tables.num_tokens <= tables.capacity).all(), "a slot has tokens without a block"


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

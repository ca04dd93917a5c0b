"""Sequences that start or resume in a slot, with the tokens that they need not compute.

Those are in blocks of the prefix cache, or were swapped out to the host.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..messages import NO_INTS, STATES, BlockCopy, Direction, Indices, Started
from .prefix_cache import PrefixMatch
from .prefix_publisher import PrefixPublisher
from .tiers.device_tier import DeviceTier, KindBlocks
from .tiers.host_tier import HostTier
from .tiers.plan_in_hand import KindMatch, PlanInHand, ReusedPrefix

NOTHING_FOUND = PrefixMatch(NO_INTS, NO_INTS, None, 0)


class SequenceStarts:
    """The sequence of each slot, and its start until a grant has carried it.

    A start has two parts. `attach` gives a row the blocks of the tokens that it need not compute, and `detach` takes
    them back if the row gets nothing in this plan. Once the row is granted, `fork`, `copy_in` and `restore_states`
    collect the copies that fill those blocks, and `take` tells the device.
    """

    def __init__(
        self, num_slots: int, device: DeviceTier, host: HostTier | None, publisher: PrefixPublisher | None
    ) -> None:
        self.device = device
        self._host, self._publisher = host, publisher
        self.started: dict[int, Started] = {}  # by slot: not yet sent with a grant
        self.sequence_ids = np.full(num_slots, -1, np.int64)  # [S] the sequence that started there last
        self.must_compute = np.zeros(num_slots, np.bool_)  # [S] whether it must compute all its tokens

    # -- slots

    def add(self, started: Started) -> None:
        """A sequence got a slot. It has no blocks yet."""
        self.started[started.slot] = started
        self.sequence_ids[started.slot] = started.sequence_id
        self.must_compute[started.slot] = started.pooling is not None and started.pooling.needs_every_position
        if self._publisher is not None:
            self._publisher.start(started)

    def drop(self, hand: PlanInHand, slot: int) -> None:
        """The sequence loses its slot: it starts no more. Its table still holds its blocks."""
        self.started.pop(slot, None)
        self._give_up_beginning(hand, slot)

    # -- tokens that need not be computed

    def starting_rows(self, hand: PlanInHand) -> list[int]:
        """Starting rows that may have cached or swapped tokens."""
        if not self.started:
            return []
        fewest = 2  # tokens; a cache hit must leave at least one token to compute
        return [
            row
            for row, slot in enumerate(hand.plan.slots.tolist())
            if slot in self.started
            and not self.device.tables.capacity[slot]
            and not self.must_compute[slot]
            and (self._num_swapped(slot) or (self._publisher is not None and hand.wanted[row] >= fewest))
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
                self.device.pool.share(shared)
                self.device.tables.append(np.array([slot]), np.array([len(shared)], np.int32), shared)
            if len(beginning.on_host) and not beginning.is_swapped:
                assert self._host is not None
                self._host.pool.share(beginning.on_host)
            if beginning.source is not None:
                self.device.pool.share(np.array([beginning.source], np.int32))
            if self.device.more:
                self._attach_more(slot, beginning)
            self.device.tables.num_tokens[slot] = num_tokens
            hand.set_remaining(row, wanted - num_tokens)
            hand.begun[slot] = beginning
        if self._publisher is not None:
            self._publisher.begin(slot, num_tokens + min(wanted - num_tokens, hand.plan.token_budget))

    def _attach_more(self, slot: int, beginning: ReusedPrefix) -> None:
        """The same for the kinds after kind 0: their tables begin with what the next query sees."""
        for each, match in zip(self.device.more, beginning.more, strict=True):
            each.tables.begin(slot, match.first)
            if len(match.shared):
                each.pool.share(match.shared)
                each.tables.append(np.array([slot]), np.array([len(match.shared)], np.int32), match.shared)
            if len(match.on_host) and not beginning.is_swapped:
                assert self._host is not None
                self._host.more[each.kind - 1].share(match.on_host)
            if match.source is not None:
                each.pool.share(np.array([match.source], np.int32))

    def _find(self, slot: int, *, may_fork: bool, may_share: bool) -> ReusedPrefix | None:
        """What the sequence in `slot` need not compute; None if it should wait for another sequence.

        A sequence with prompt_logprobs needs the logits of each prompt token, so it uses no cached blocks.
        """
        num_swapped = self._num_swapped(slot)
        found: PrefixMatch | None = NOTHING_FOUND
        if self._publisher is not None and not self.started[slot].wants_prompt_logprobs:
            if may_share:
                found = self._publisher.find(slot, may_wait=not num_swapped, may_fork=may_fork)
            else:
                self._publisher.find_nothing(slot)
        if found is None:
            return None
        shared, places, source, num_forked, more, snapshot = found
        num_found = (len(shared) + len(places)) * self.device.pool.block_size + num_forked
        if num_swapped > num_found:
            assert self._host is not None
            sequence_id = int(self.sequence_ids[slot])
            own = self._host.blocks(sequence_id)
            if self._publisher is not None and self._host.is_stale(sequence_id):
                self._publisher.cut(slot)
            more = tuple(
                KindMatch(int(each.tables.first_seen(num_swapped)), NO_INTS, blocks)
                for each, blocks in zip(self.device.more, self._host.more_blocks(sequence_id), strict=True)
            )
            return ReusedPrefix(num_swapped, shared, own[len(shared) :], is_swapped=True, more=more)
        return ReusedPrefix(num_found, shared, places, is_swapped=False, source=source, more=more, snapshot=snapshot)

    def detach(self, hand: PlanInHand, row: int) -> None:
        """Undoes `attach`: all that the row wants remains to be computed."""
        hand.set_remaining(row, int(hand.wanted[row]))
        slot = int(hand.plan.slots[row])
        if self._publisher is not None:
            self._publisher.begin_no_more(slot)
        self._give_up_beginning(hand, slot)
        self.device.clear(slot, -1)

    def _give_up_beginning(self, hand: PlanInHand, slot: int) -> None:
        beginning = hand.begun.pop(slot, None)
        if beginning is None:
            return
        if self._host is not None and not beginning.is_swapped:
            self._host.pool.give_back(beginning.on_host, -1, self.device.completed_step)
        if beginning.source is not None:
            self.device.pool.give_back(np.array([beginning.source], np.int32), -1, self.device.completed_step)
        for each, match in zip(self.device.more, beginning.more, strict=True):
            if self._host is not None and not beginning.is_swapped:
                self._host.more[each.kind - 1].give_back(match.on_host, -1, self.device.completed_step)
            if match.source is not None:
                each.pool.give_back(np.array([match.source], np.int32), -1, self.device.completed_step)

    def _num_swapped(self, slot: int) -> int:
        return 0 if self._host is None else self._host.num_tokens(int(self.sequence_ids[slot]))

    # -- copies, once the rows are granted

    def fork(self, hand: PlanInHand) -> None:
        """Collects the copies of partly matching blocks for the sequences that start in the plan.

        The sources are held until its step is done.
        """
        step, sources, destinations = hand.plan.step, [], []
        for slot, beginning in hand.begun.items():
            if beginning.source is not None:
                sources.append(beginning.source)
                destinations.append(int(self.device.tables.blocks[slot, beginning.num_whole]))
                self.device.pool.give_back(np.array([beginning.source], np.int32), step, self.device.completed_step)
        if sources:
            copy = BlockCopy(Direction.FORK, np.array(sources, np.int32), np.array(destinations, np.int32))
            hand.copies.append(copy)
            for each in self.device.more:
                self._fork_more(hand, each)

    def _fork_more(self, hand: PlanInHand, each: KindBlocks) -> None:
        """The same for a kind after kind 0: a block that is copied is copied in every kind."""
        sources, destinations = [], []
        for slot, beginning in hand.begun.items():
            source = beginning.more[each.kind - 1].source
            if source is not None:
                sources.append(source)
                destinations.append(int(each.tables.blocks[slot, beginning.num_whole]))
                each.pool.give_back(np.array([source], np.int32), hand.plan.step, self.device.completed_step)
        arrays = np.array(sources, np.int32), np.array(destinations, np.int32)
        hand.copies.append(BlockCopy(Direction.FORK, *arrays, each.kind))

    def copy_in(self, hand: PlanInHand) -> None:
        """Collects the copies from the host for the sequences that start in the plan."""
        if self._host is None:
            return
        step = hand.plan.step
        for slot, beginning in hand.begun.items():
            if len(beginning.on_host):
                first = len(beginning.shared)
                blocks = self.device.tables.blocks[slot, first : first + len(beginning.on_host)].copy()
                hand.copies.append(BlockCopy(Direction.IN, beginning.on_host, blocks))
            if not beginning.is_swapped:
                self._host.pool.give_back(beginning.on_host, step, self.device.completed_step)
            for each, match in zip(self.device.more, beginning.more, strict=True):
                if len(match.on_host):
                    first = match.first + len(match.shared)
                    blocks = each.tables.blocks[slot, first : first + len(match.on_host)].copy()
                    hand.copies.append(BlockCopy(Direction.IN, match.on_host, blocks, each.kind))
                if not beginning.is_swapped:
                    self._host.more[each.kind - 1].give_back(match.on_host, step, self.device.completed_step)
            if beginning.is_swapped and len(place := self._host.state(int(self.sequence_ids[slot]))):
                hand.copies.append(BlockCopy(Direction.IN, place, np.array([slot], np.int32), STATES))
            self._host.release(int(self.sequence_ids[slot]), step, self.device.completed_step)

    def restore_states(self, hand: PlanInHand) -> None:
        """Collects the copies of snapshots for the sequences that start in the plan behind cached prefixes."""
        found = {slot: each.snapshot for slot, each in hand.begun.items() if each.snapshot is not None}
        if found:
            arrays = np.array(list(found.values()), np.int32), np.array(list(found), np.int32)
            hand.copies.append(BlockCopy(Direction.FORK, *arrays, STATES))

    # -- what the device hears

    def take(self, hand: PlanInHand, slots: Indices) -> tuple[Started, ...]:
        """The starts of these slots that were not sent with a grant yet."""
        all_started = (self.started.pop(slot) for slot in slots.tolist() if slot in self.started)
        return tuple(self._with_beginning(hand, started) for started in all_started)

    def _with_beginning(self, hand: PlanInHand, started: Started) -> Started:
        beginning = hand.begun.get(started.slot)
        if beginning is None:
            return started
        num_shared = len(beginning.shared) * self.device.pool.block_size
        return replace(started, num_cached=beginning.num_tokens, num_shared=num_shared)

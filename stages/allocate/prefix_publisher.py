"""Publishes blocks to the prefix cache, and looks up blocks for starting sequences.

Columnar: a step in which no block is filled costs a few numpy operations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...kernels.layout.kv_layout import KVKind
from ..messages import Bools, Indices, Ints, Started, StepDone, StepPlan
from .kind_index import KindIndex
from .prefix_cache import BlockChain, PrefixCache, PrefixMatch
from .snapshot_publisher import SnapshotPublisher
from .state_snapshots import EndOfAnswer, SnapshotKey
from .tiers.block_pool import BlockPool
from .tiers.block_tables import BlockTables, WindowTables
from .tiers.plan_in_hand import PlanInHand

ROWS_READ_AT_ONCE = 1024  # more would save little, and block the event loop for longer
BLOCKS_PER_TAIL = 8  # blocks of the pool per tail; a tail saves half a block on average, a whole block more


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    """The known tokens that a granted step computes."""

    step: int
    rows: list[tuple[int, BlockChain, int]]  # (slot, chain, position after the last token)
    snapshots: dict[int, int]  # slot -> the place where it leaves the state behind its row


@dataclass(slots=True, eq=False)
class PublishedKind:
    """A kind of memory beside kind 0: its cached blocks, and the tables of running sequences.

    The table of a window keeps the ids of blocks that the window has passed. They stay quarantined until the step that
    was granted with their passing is done, and so are published as if they were still held.
    """

    kind: KVKind
    index: KindIndex
    pool: BlockPool
    tables: BlockTables
    firsts: Ints  # [S] place of the first block that the slot holds

    def first_seen(self, num_tokens: Any) -> Any:
        """The place of the first block that a query at these positions, [B], sees."""
        return self.kind.first_key(num_tokens) // self.tables.block_size

    def put(self, chain: BlockChain, block: int) -> bool:
        """Adds a block with the keys of the one added last to `chain`. Returns whether the pool is to keep it."""
        if chain.is_cut:
            return False
        assert isinstance(chain.last, int), "a chain without blocks has none of another kind"
        return self.index.put(chain.last, block, is_sample=chain.is_sample)


class PrefixPublisher:
    """Keeps the cache, the pool and the tables of running sequences consistent.

    A block is published when the step that filled it is done. For a prompt that is the step's outcome; for an answer it
    is the token after the block, since the block's last token has then been computed. A partly filled block is
    published as a tail: when the prompt is computed, and again when the sequence ends or loses its blocks. It is not
    published at every step, as continuations from the middle of an answer are unlikely.

    No sequence waits for a tail that is being computed. A tail is published with the blocks before it, in the same
    step; alone it is shorter than `min_tokens_to_wait_for`. With recurrent layers there are tails at the end of answers
    alone, with a snapshot behind them: the next turn of a chat goes on there.
    """

    def __init__(self, cache: PrefixCache, pool: BlockPool, tables: BlockTables) -> None:
        num_slots = len(tables.num_tokens)
        self.cache = cache
        self._snapshots = None if cache.snapshots is None else SnapshotPublisher(cache.snapshots, cache, pool)
        self._pool = pool
        self._tables = tables
        self._chains: list[BlockChain | None] = [None] * num_slots
        self._sequence_ids = np.full(num_slots, -1, np.int64)  # [S] of the chain; -1: none
        self._num_prompt = np.zeros(num_slots, np.intp)  # [S]
        self._num_known = np.zeros(num_slots, np.int32)  # [S] tokens in its `Started`
        self._num_completed = np.zeros(num_slots, np.intp)  # [S] tokens certainly computed; set once the prompt is
        # [S, 2 B] the newest tokens, by position modulo 2 B: the block being filled and the one before
        self._newest = np.zeros((num_slots, 2 * tables.block_size), np.int32)
        self._prefills: deque[_Prefill] = deque()
        self._unread: list[StepDone] = []
        self._num_unread = 0  # rows in them
        self._most_unread = 0  # tokens of one sequence in them; at most B
        self.kinds: list[PublishedKind] = []  # from kind 1 on
        self._num_begun = np.zeros(num_slots, np.int32)  # [S] tokens with which it started; set where there are kinds
        cache.partial_blocks.most_tails = max(1, pool.num_blocks // BLOCKS_PER_TAIL)

    def add_kind(self, kind: KVKind, pool: BlockPool, tables: BlockTables, host_pool: BlockPool | None = None) -> None:
        """Adds a kind, the next one from 1 on."""
        index = KindIndex(kind, tables.block_size, pool, host_pool)
        firsts = tables.num_retired if isinstance(tables, WindowTables) else np.zeros_like(tables.num_tokens)
        self.kinds.append(PublishedKind(kind, index, pool, tables, firsts))
        self.cache.kinds = [*self.cache.kinds, index]

    def forget_blocks_of(self, kind: int, blocks: Iterable[int]) -> None:
        """The pool of a kind from 1 on evicted these blocks. A tail without one of them cannot be copied any more."""
        for block in blocks:
            tail = self.kinds[kind - 1].index.evict(block)
            if tail is not None and self.cache.drop_tail(tail):
                self._pool.forget(tail)

    # -- a sequence

    def start(self, started: Started) -> None:
        """A sequence got a slot. It has no blocks yet."""
        slot, token_ids = started.slot, started.token_ids
        self._chains[slot] = self.cache.chain(
            started.sequence_id,
            token_ids,
            started.cache_salt,
            is_long=started.is_long,
            adapter=started.adapter,
        )
        self._sequence_ids[slot] = started.sequence_id
        self._num_prompt[slot], self._num_known[slot] = started.num_prompt, len(token_ids)
        self._num_completed[slot] = 0
        begin = len(token_ids) // self._tables.block_size * self._tables.block_size
        self._newest[slot, np.arange(begin, len(token_ids)) % self._newest.shape[1]] = token_ids[begin:]

    def forget_blocks(self, blocks: list[int], hand: PlanInHand | None) -> None:
        """The pool evicted these blocks: they are in the cache no more."""
        for block in blocks:
            self.cache.forget(block)

    def find(self, slot: int, *, may_wait: bool, may_fork: bool) -> PrefixMatch | None:
        """The cached blocks with which the sequence in `slot` can start.

        None if it should wait (`may_wait`) for its next block, which another sequence is computing.
        """
        chain = self._chain(slot)
        found = self.cache.find(chain, may_fork=may_fork)
        return None if may_wait and self.cache.is_coming(chain) else found

    def find_nothing(self, slot: int) -> None:
        """The sequence in `slot` starts without cached blocks."""
        self.cache.restart(self._chain(slot))

    def begin(self, slot: int, num_tokens: int) -> None:
        """Announces that the sequence computes its first `num_tokens` tokens: others may wait."""
        self.cache.begin(self._chain(slot), num_tokens)

    def begin_no_more(self, slot: int) -> None:
        """Withdraws what `begin` announced."""
        chain = self._chains[slot]
        if chain is not None:
            self.cache.drop(chain)

    def drop(self, slot: int) -> None:
        """The sequence is about to lose its blocks, which must still be in its table.

        Publishes its tail.
        """
        chain = self._chains[slot]
        if chain is not None and self._num_completed[slot]:
            self._put_tail(slot, chain)
        self.begin_no_more(slot)
        self._chains[slot] = None
        self._sequence_ids[slot] = -1

    def save_end(self, slot: int, plan: StepPlan) -> int | None:
        """The sequence in `slot` has ended and is about to be dropped: the place to which `plan` saves its state.

        A step in flight may have read the last token, which is then part of the state. None if another one has, whose
        token is not known here, if the sequence cannot be found, or if it ends within a block of the last snapshot.
        """
        chain, size = self._chains[slot], self._tables.block_size
        if self._snapshots is None or chain is None or chain.is_cut or plan.voided or not self._num_completed[slot]:
            return None
        num_tokens, last = int(self._tables.num_tokens[slot]), (int(self._num_known[slot]) - 1) // size * size
        place, count = divmod(num_tokens, size)
        if not last + size <= num_tokens <= self._num_completed[slot] + 1 or place != chain.num_blocks:
            return None
        assert isinstance(chain.last, int)
        key: SnapshotKey = chain.last
        if count:
            key = EndOfAnswer(chain.last, self._tokens_of_tail(slot, place, count))
        if key in self._snapshots.snapshots or (count and not self._publish_tail(slot, chain, place, count)):
            return None
        tail = int(self._tables.blocks[slot, place]) if count else None
        return self._snapshots.save_end(plan.step, key, tail, chain.snapshot)

    def cut(self, slot: int) -> None:
        """Stops publishing the blocks of the sequence."""
        self._chain(slot).is_cut = True

    def forget(self) -> None:
        """Empties the cache.

        Running sequences are no longer published either, as they may have started with blocks from it.
        """
        for slot in (self._sequence_ids >= 0).nonzero()[0].tolist():
            self.cut(slot)
        if self._snapshots is not None:
            self._snapshots.forget()
        self.cache.clear()

    def drop_all(self) -> None:
        """After a crash: forgets all sequences and all cached blocks."""
        self._chains = [None] * len(self._chains)
        self._sequence_ids[:] = -1
        self._prefills.clear()
        if self._snapshots is not None:
            self._snapshots.drop_all()
        self._unread.clear()
        self._num_unread = self._most_unread = 0
        self.cache.clear()

    # -- steps

    def end_at_snapshots(self, slots: Indices, granted: Ints) -> Ints:
        """`granted` [R], or fewer tokens where a row would pass the position of a snapshot; itself without any."""
        if self._snapshots is None:
            return granted
        return self._snapshots.snapshots.cut(self._tables.num_tokens[slots], granted, self._num_known[slots])

    def note_grant(self, step: int, slots: Indices, starts: Ints, ends: Ints, found: Ints) -> dict[int, int]:
        """Records a granted step.

        Row i computes positions `starts[i]` to `ends[i]`; `found[i]` were just found. Returns the places of the
        snapshots that the step takes, by slot.
        """
        rows = (starts < self._num_known[slots]).nonzero()[0].tolist()
        prefill = [(int(slots[row]), self._chain(int(slots[row])), int(ends[row])) for row in rows]
        for row, (_, chain, end) in zip(rows, prefill, strict=True):
            if starts[row] == found[row]:
                self.cache.note_hits(chain)
                self._num_begun[slots[row]] = starts[row]
            self.cache.begin(chain, end)
        snapshots = {} if self._snapshots is None else self._snapshots.take(prefill, self._num_known)
        if prefill:
            self._prefills.append(_Prefill(step, prefill, snapshots))
        return snapshots

    def complete_steps(self, plan: StepPlan) -> None:
        """Publishes the blocks filled by the steps completed since the last plan."""
        if self._snapshots is not None:
            self._snapshots.publish_ends(plan)
        while self._prefills and self._prefills[0].step <= plan.completed_step:
            prefill = self._prefills.popleft()
            if prefill.step in plan.voided:
                self._give_back(prefill)
                continue
            for slot, chain, end in prefill.rows:
                if self._chains[slot] is chain:
                    num_full = min(end // self._tables.block_size, chain.num_known)
                    if self.kinds:
                        self._put_prefilled(slot, chain, num_full)
                    else:
                        self._put_known(slot, chain, num_full)
                    if self._snapshots is not None and slot in prefill.snapshots:
                        is_at_end = chain.num_blocks * self._tables.block_size == end
                        self._snapshots.publish(prefill.snapshots.pop(slot), chain, is_at_end=is_at_end)
                    if end == self._num_known[slot]:
                        self._num_completed[slot] = end
                        self._put_tail(slot, chain)
            self._give_back(prefill)
        is_steady = not (plan.started or plan.ended or plan.preempted or plan.dropped)
        for done in plan.settled:
            if self._most_unread + done.most_tokens > self._tables.block_size:
                self._read_tokens()
            self._unread.append(done)
            self._num_unread += len(done.slots)
            self._most_unread += done.most_tokens
            if self._most_unread == self._tables.block_size or self._num_unread >= ROWS_READ_AT_ONCE:
                self._read_tokens()
        if self._unread and not is_steady:  # a sequence looks up blocks now, or leaves some
            self._read_tokens()

    def _give_back(self, prefill: _Prefill) -> None:
        """The snapshots of a step that was void, or whose sequences have lost their blocks since."""
        if self._snapshots is not None:
            self._snapshots.give_back(prefill.snapshots.values())

    def _read_tokens(self) -> None:
        """Reads the tokens of several steps at once, which takes hardly longer than one.

        NOTE: at most one block of tokens per sequence, or a token is overwritten before its block is published.
        """
        columns = [(done.slots, done.sequence_ids, done.places, done.token_ids) for done in self._unread]
        slots, sequence_ids, places, token_ids = (np.concatenate(column) for column in zip(*columns, strict=True))
        self._unread.clear()
        self._num_unread = self._most_unread = 0
        is_ours = self._sequence_ids[slots] == sequence_ids
        if np.count_nonzero(is_ours) < len(is_ours):
            slots, places, token_ids = slots[is_ours], places[is_ours], token_ids[is_ours]
        positions = self._num_prompt[slots] + places
        self._newest[slots, positions % self._newest.shape[1]] = token_ids
        self._num_completed[slots] = positions  # rows are in the order of steps, so the last one wins
        filled = (positions % self._tables.block_size == 0).nonzero()[0]
        self._put_filled(slots[filled], positions[filled] // self._tables.block_size - 1)

    def _put_filled(self, slots: Indices, places: Indices) -> None:
        """Publishes the complete block `places[i]` of `slots[i]`, [F], and the ones before it."""
        size = self._tables.block_size
        blocks = self._tables.blocks[slots, places]
        others: list[tuple[PublishedKind, Iterator[int], list[int]]]  # (kind, its blocks, -1: passed; those it keeps)
        others = [(kind, iter(kind.tables.blocks_at(slots, places)), []) for kind in self.kinds]
        halves = self._newest.reshape(len(self._newest), 2, size)[slots, places % 2]  # [F, B]
        contents, begin, new = halves.tobytes(), 0, []
        chains, put = self._chains, self._put
        for slot, place, block in zip(slots.tolist(), places.tolist(), blocks.tolist(), strict=True):
            chain, end = chains[slot], begin + 4 * size
            assert chain is not None, f"slot {slot} runs, and no sequence started in it"
            if chain.num_blocks < chain.num_known:
                self._put_known(slot, chain, min(place + 1, chain.num_known))
            if place >= chain.num_known:
                assert place == chain.num_blocks, f"block {chain.num_blocks} of slot {slot} was passed over"
                if put(chain, block, contents[begin:end]):
                    new.append(block)
                for kind, held, kept in others:
                    other = next(held)
                    if other >= 0 and kind.put(chain, other):
                        kept.append(other)
            else:
                for _, held, _ in others:
                    next(held)
            begin = end
        self._pool.keep(np.array(new, np.int32))
        for kind, _, kept in others:
            kind.pool.keep(np.array(kept, np.int32))

    def _put_known(self, slot: int, chain: BlockChain, num_full: int) -> None:
        """Publishes up to `num_full` complete blocks whose tokens the sequence started with."""
        if self.kinds:
            return self._put_known_of_kinds(slot, chain, num_full, [int(kind.firsts[slot]) for kind in self.kinds])
        blocks = self._tables.blocks[slot, chain.num_blocks : num_full]
        is_new = [self._put(chain, block) for block in blocks.tolist()]
        self._pool.keep(blocks[is_new])

    def _put_prefilled(self, slot: int, chain: BlockChain, num_full: int) -> None:
        """The same for blocks of several kinds that a step has just computed. Windows may have passed them since."""
        begun = self._num_begun[slot]
        self._put_known_of_kinds(slot, chain, num_full, [int(kind.first_seen(begun)) for kind in self.kinds])

    def _put_known_of_kinds(self, slot: int, chain: BlockChain, num_full: int, firsts: Sequence[int]) -> None:
        """The same, with the blocks of each further kind from its place in `firsts` on."""
        places = slice(chain.num_blocks, num_full)
        others: list[tuple[PublishedKind, list[int], list[int]]]  # (kind, its blocks, those it keeps)
        others = [(kind, kind.tables.blocks[slot, places].tolist(), []) for kind in self.kinds]
        new: list[int] = []
        for row, block in enumerate(self._tables.blocks[slot, places].tolist()):
            place = chain.num_blocks
            if self._put(chain, block):
                new.append(block)
            for (kind, held, kept), first in zip(others, firsts, strict=True):
                if place >= first and kind.put(chain, held[row]):
                    kept.append(held[row])
        self._pool.keep(np.array(new, np.int32))
        for kind, _, kept in others:
            kind.pool.keep(np.array(kept, np.int32))

    def _put(self, chain: BlockChain, block: int, tokens: bytes | None = None) -> bool:
        cache = self.cache
        if block in cache.partial_blocks.tails:
            cache.drop_tail(block)
            self._pool.forget(block)
        return cache.put(chain, block, tokens)

    def _put_tail(self, slot: int, chain: BlockChain) -> None:
        """Publishes the tokens in the last, partly filled block of a sequence."""
        place, count = divmod(int(self._num_completed[slot]), self._tables.block_size)
        if count and place == chain.num_blocks and self._snapshots is None:
            self._publish_tail(slot, chain, place, count)

    def _publish_tail(self, slot: int, chain: BlockChain, place: int, count: int) -> bool:
        """Publishes `count` tokens of the block at `place`. Returns whether they are a tail now."""
        if any(place < kind.firsts[slot] for kind in self.kinds):
            return False  # a window has passed the tail, and its block may be another's
        block = int(self._tables.blocks[slot, place])
        gone = self.cache.put_tail(chain, block, self._tokens_of_tail(slot, place, count))
        if gone is None:
            return False
        self._pool.keep(np.array([block], np.int32))
        for kind in self.kinds:
            kind.index.put_tail(block, int(kind.tables.blocks[slot, place]))
        for other in gone:
            if other != block:
                self._pool.forget(other)
        return block not in gone

    def _tokens_of_tail(self, slot: int, place: int, count: int) -> bytes:
        tokens: bytes = self._newest.reshape(len(self._newest), 2, -1)[slot, place % 2, :count].tobytes()
        return tokens

    def check(self) -> None:
        """Raises AssertionError unless the pool keeps exactly the blocks in the cache (I11)."""
        assert self._pool.kept() == self.cache.blocks(), "the pool keeps other blocks than the cache holds"

    def is_passed(self, kind: PublishedKind, slots: Indices, places: Indices) -> Bools:
        """[B] whether no start of a sequence is expected behind these blocks, which a window is passing.

        Starts are expected at the end of a prompt, and where a sequence found the blocks of another.
        """
        size, is_expected = self._tables.block_size, np.zeros(len(slots), np.bool_)
        for num_tokens in (self._num_prompt[slots], self._num_begun[slots]):
            least = np.maximum(num_tokens - 1, 0) // size * size  # as the last token is always computed
            is_expected |= (places < num_tokens // size) & (places >= kind.first_seen(least))
        return ~is_expected

    def is_of_answer(self, slots: Indices, places: Indices) -> Bools:
        """[B] whether these blocks are behind the prompt, and behind the tokens with which the sequence started."""
        is_behind: Bools = (
            places >= np.maximum(self._num_prompt[slots], self._num_begun[slots]) // self._tables.block_size
        )
        return is_behind

    def _chain(self, slot: int) -> BlockChain:
        chain = self._chains[slot]
        assert chain is not None, f"slot {slot} runs, and no sequence started in it"
        return chain

"""What the allocator does so that blocks are found again: the prefix cache, told of each sequence as it runs.

Columnar beside the allocator's own tables: a step in which no block is filled costs a few numpy operations.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ..messages import Indices, Ints, Started, StepDone, StepPlan
from .block_pool import BlockPool, BlockTables
from .prefix_cache import Chain, Found, PrefixCache

ROWS_READ_AT_ONCE = 1024  # more would save little, and hold the loop for longer at a time
BLOCKS_PER_TAIL = 8  # of the pool: a tail saves half a block of tokens, a whole one all of them and those behind it


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    """Known tokens that a granted step computes."""

    step: int
    rows: list[tuple[int, Chain, int]]  # (slot, chain, position behind the last token)


class Sharing:
    """Keeps the cache, the pool and the tables of running sequences in step.

    A block is put into the cache when the step that filled it is done: for prompts when the device says so, for answers
    when the token behind the block is known, as the block's last token has then been computed. Of a block that is not
    full, the tokens known so far are put in as a tail when the prompt is computed, and again when the sequence ends or
    loses its blocks: not at every step, as nobody is likely to go on from the middle of an answer.

    Nobody waits for a tail that is being computed. It comes with the blocks before it, in the same step, and whoever
    waits for those finds it too; alone it is less than `min_tokens_to_wait_for`.
    """

    def __init__(self, cache: PrefixCache, pool: BlockPool, tables: BlockTables) -> None:
        num_slots = len(tables.num_tokens)
        self.cache = cache
        self._pool = pool
        self._tables = tables
        self._chains: list[Chain | None] = [None] * num_slots
        self._sequence_ids = np.full(num_slots, -1, np.int64)  # [S] of the chain, -1 if there is none
        self._num_prompt = np.zeros(num_slots, np.intp)  # [S]
        self._num_known = np.zeros(num_slots, np.int32)  # [S] tokens that came with Started
        self._num_settled = np.zeros(num_slots, np.intp)  # [S] tokens in blocks for certain, once the prompt is
        # [S, 2 B] the newest tokens, by position: of the block that fills, and of the one before
        self._newest = np.zeros((num_slots, 2 * tables.block_size), np.int32)
        self._prefills: deque[_Prefill] = deque()
        self._unread: list[StepDone] = []
        self._num_unread = 0  # rows
        self._most_unread = 0  # tokens of one sequence, at most B
        cache.followers.most_tails = max(1, pool.num_blocks // BLOCKS_PER_TAIL)
        pool.on_evicted = self._forget

    # -- a sequence

    def start(self, started: Started) -> None:
        """A sequence took a slot, and has no blocks."""
        slot, token_ids = started.slot, started.token_ids
        self._chains[slot] = self.cache.chain(started.sequence_id, token_ids, started.cache_salt)
        self._sequence_ids[slot] = started.sequence_id
        self._num_prompt[slot], self._num_known[slot] = started.num_prompt, len(token_ids)
        self._num_settled[slot] = 0
        begin = len(token_ids) // self._tables.block_size * self._tables.block_size
        self._newest[slot, np.arange(begin, len(token_ids)) % self._newest.shape[1]] = token_ids[begin:]

    def _forget(self, blocks: list[int]) -> None:
        for block in blocks:
            self.cache.forget(block)

    def find(self, slot: int, *, may_wait: bool, may_fork: bool) -> Found | None:
        """What the sequence in `slot` can begin with; None if it may and should wait for the next block, which another
        sequence computes."""
        chain = self._chain(slot)
        found = self.cache.find(chain, may_fork=may_fork)
        return None if may_wait and self.cache.is_coming(chain) else found

    def begin(self, slot: int, num_tokens: int) -> None:
        """The sequence is about to have its first `num_tokens` tokens computed: others may wait for them."""
        self.cache.begin(self._chain(slot), num_tokens)

    def begin_no_more(self, slot: int) -> None:
        """It is not, after all."""
        chain = self._chains[slot]
        if chain is not None:
            self.cache.drop(chain)

    def drop(self, slot: int) -> None:
        """The sequence loses its blocks, which are still in its table."""
        chain = self._chains[slot]
        if chain is not None and self._num_settled[slot]:
            self._put_tail(slot, chain)
        self.begin_no_more(slot)
        self._chains[slot] = None
        self._sequence_ids[slot] = -1

    def cut(self, slot: int) -> None:
        """What the sequence has is not put in."""
        self._chain(slot).is_cut = True

    def forget(self) -> None:
        """Nothing that was computed so far is to be found. What runs is not put in any more either, as it may have
        begun with what was found."""
        for slot in (self._sequence_ids >= 0).nonzero()[0].tolist():
            self.cut(slot)
        self.cache.clear()

    def drop_all(self) -> None:
        """Nobody has blocks, and none holds anything."""
        self._chains = [None] * len(self._chains)
        self._sequence_ids[:] = -1
        self._prefills.clear()
        self._unread.clear()
        self._num_unread = self._most_unread = 0
        self.cache.clear()

    # -- steps

    def note_grant(self, step: int, slots: Indices, starts: Ints, ends: Ints, found: Ints) -> None:
        """A step was granted; row i begins at `starts[i]`, of which `found[i]` tokens were found just now."""
        rows = (starts < self._num_known[slots]).nonzero()[0].tolist()
        prefill = [(int(slots[row]), self._chain(int(slots[row])), int(ends[row])) for row in rows]
        for row, (_, chain, end) in zip(rows, prefill, strict=True):
            if starts[row] == found[row]:
                self.cache.note_found(chain)
            self.cache.begin(chain, end)
        if prefill:
            self._prefills.append(_Prefill(step, prefill))

    def settle(self, plan: StepPlan) -> None:
        """Puts in what the steps have filled that are done since the last plan."""
        while self._prefills and self._prefills[0].step <= plan.completed_step:
            prefill = self._prefills.popleft()
            if prefill.step in plan.voided:
                continue
            for slot, chain, end in prefill.rows:
                if self._chains[slot] is chain:
                    self._put_known(slot, chain, min(end // self._tables.block_size, chain.num_known))
                    if end == self._num_known[slot]:
                        self._num_settled[slot] = end
                        self._put_tail(slot, chain)
        is_steady = not (plan.started or plan.ended or plan.preempted or plan.dropped)
        for done in plan.settled:
            if self._most_unread + done.most_tokens > self._tables.block_size:
                self._read_tokens()
            self._unread.append(done)
            self._num_unread += len(done.slots)
            self._most_unread += done.most_tokens
            if self._most_unread == self._tables.block_size or self._num_unread >= ROWS_READ_AT_ONCE:
                self._read_tokens()
        if self._unread and not is_steady:  # somebody looks for blocks now, or leaves some
            self._read_tokens()

    def _read_tokens(self) -> None:
        """Some steps at once, as what it takes hardly depends on how many. NOTE: with no more tokens of a sequence than
        a block has, or one would be written over before it is put in."""
        columns = [(done.slots, done.sequence_ids, done.places, done.token_ids) for done in self._unread]
        slots, sequence_ids, places, token_ids = (np.concatenate(column) for column in zip(*columns, strict=True))
        self._unread.clear()
        self._num_unread = self._most_unread = 0
        is_ours = self._sequence_ids[slots] == sequence_ids
        if np.count_nonzero(is_ours) < len(is_ours):
            slots, places, token_ids = slots[is_ours], places[is_ours], token_ids[is_ours]
        positions = self._num_prompt[slots] + places
        self._newest[slots, positions % self._newest.shape[1]] = token_ids
        self._num_settled[slots] = positions  # in the order of the steps, so the last one stays
        filled = (positions % self._tables.block_size == 0).nonzero()[0]
        self._put_filled(slots[filled], positions[filled] // self._tables.block_size - 1)

    def _put_filled(self, slots: Indices, places: Indices) -> None:
        """Block `places[i]` of `slots[i]` is complete, [F]; so are those before it."""
        size = self._tables.block_size
        blocks = self._tables.blocks[slots, places]
        halves = self._newest.reshape(len(self._newest), 2, size)[slots, places % 2]  # [F, B]
        contents, begin, new = halves.tobytes(), 0, []
        chains, put = self._chains, self._put
        for slot, place, block in zip(slots.tolist(), places.tolist(), blocks.tolist(), strict=True):
            chain, end = chains[slot], begin + 4 * size
            assert chain is not None, f"slot {slot} runs, and nobody started in it"
            if chain.num_blocks < chain.num_known:
                self._put_known(slot, chain, min(place + 1, chain.num_known))
            if place >= chain.num_known:
                assert place == chain.num_blocks, f"block {chain.num_blocks} of slot {slot} was passed over"
                if put(chain, block, contents[begin:end]):
                    new.append(block)
            begin = end
        self._pool.keep(np.array(new, np.int32))

    def _put_known(self, slot: int, chain: Chain, num_full: int) -> None:
        """The first `num_full` blocks are complete; their tokens are among those that the sequence started with."""
        blocks = self._tables.blocks[slot, chain.num_blocks : num_full]
        is_new = [self._put(chain, block) for block in blocks.tolist()]
        self._pool.keep(blocks[is_new])

    def _put(self, chain: Chain, block: int, tokens: bytes | None = None) -> bool:
        cache = self.cache
        if block in cache.followers.tails:
            cache.drop_tail(block)
            self._pool.forget(block)
        return cache.put(chain, block, tokens)

    def _put_tail(self, slot: int, chain: Chain) -> None:
        """The tokens in the last block of a sequence can be found from now on."""
        place, count = divmod(int(self._num_settled[slot]), self._tables.block_size)
        if not count or place != chain.num_blocks:
            return
        block = int(self._tables.blocks[slot, place])
        tokens = self._newest.reshape(len(self._newest), 2, -1)[slot, place % 2, :count].tobytes()
        gone = self.cache.put_tail(chain, block, tokens)
        if gone is not None:
            self._pool.keep(np.array([block], np.int32))
            for other in gone:
                if other != block:
                    self._pool.forget(other)

    def check(self) -> None:
        """Raises AssertionError unless the pool keeps what the cache knows, and nothing else (I11)."""
        assert self._pool.kept() == self.cache.blocks(), "the pool keeps other blocks than the cache knows"

    def _chain(self, slot: int) -> Chain:
        chain = self._chains[slot]
        assert chain is not None, f"slot {slot} runs, and nobody started in it"
        return chain

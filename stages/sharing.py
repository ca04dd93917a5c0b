"""What the allocator does so that blocks are found again: the prefix cache, told of each sequence as it runs.

Columnar beside the allocator's own tables: a step in which no block is filled costs a few numpy operations.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from .blocks import BlockPool, BlockTables
from .messages import Indices, Ints, Started, StepDone, StepPlan
from .prefix import Chain, PrefixCache


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    """Known tokens that a granted step computes."""

    step: int
    rows: list[tuple[int, Chain, int]]  # (slot, chain, position behind the last token)


class Sharing:
    """Keeps the cache, the pool and the tables of running sequences in step.

    A block is put into the cache when the step that filled it is done: for prompts when the device says so, for answers
    when the token behind the block is known, as the block's last token has then been computed.
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
        self._tails = np.zeros((num_slots, tables.block_size), np.int32)  # [S, B] tokens of the block that fills
        self._prefills: deque[_Prefill] = deque()
        pool.on_evicted = cache.forget

    # -- a sequence

    def start(self, started: Started) -> None:
        """A sequence took a slot, and has no blocks."""
        slot, token_ids = started.slot, started.token_ids
        self._chains[slot] = self.cache.chain(started.sequence_id, token_ids, started.cache_salt)
        self._sequence_ids[slot] = started.sequence_id
        self._num_prompt[slot], self._num_known[slot] = started.num_prompt, len(token_ids)
        rest = len(token_ids) % self._tables.block_size
        self._tails[slot, :rest] = token_ids[len(token_ids) - rest :]

    def find(self, slot: int) -> Ints | None:
        """The blocks that the sequence in `slot` can begin with; None if it should wait for the next one, which
        another sequence computes."""
        chain = self._chain(slot)
        blocks = self.cache.find(chain)
        return None if self.cache.is_coming(chain) else blocks

    def drop(self, slot: int) -> None:
        """The sequence loses its blocks."""
        chain = self._chains[slot]
        if chain is not None:
            self.cache.drop(chain)
        self._chains[slot] = None
        self._sequence_ids[slot] = -1

    def forget(self) -> None:
        """Nothing that was computed so far is to be found. What runs is not put in any more either, as it may have
        begun with what was found."""
        for slot in np.flatnonzero(self._sequence_ids >= 0).tolist():
            self._chain(slot).is_cut = True
        self.cache.clear()

    def drop_all(self) -> None:
        """Nobody has blocks, and none holds anything."""
        self._chains = [None] * len(self._chains)
        self._sequence_ids[:] = -1
        self._prefills.clear()
        self.cache.clear()

    # -- steps

    def note_grant(self, step: int, slots: Indices, starts: Ints, ends: Ints, found: Ints) -> None:
        """A step was granted; row i begins at `starts[i]`, of which `found[i]` tokens were found just now."""
        rows = np.flatnonzero(starts < self._num_known[slots]).tolist()
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
                    self._put(slot, chain, min(end, len(chain.token_ids)) // self._tables.block_size)
        for done in plan.settled:
            self._note_tokens(done)

    def _note_tokens(self, done: StepDone) -> None:
        slots, token_ids = done.slots, done.token_ids
        places, offsets = np.divmod(self._num_prompt[slots] + done.places, self._tables.block_size)
        is_ours = self._sequence_ids[slots] == done.sequence_ids
        for row in np.flatnonzero((offsets == 0) & is_ours).tolist():
            slot = int(slots[row])
            self._put(slot, self._chain(slot), int(places[row]))
        if np.count_nonzero(is_ours) < len(is_ours):
            slots, offsets, token_ids = slots[is_ours], offsets[is_ours], token_ids[is_ours]
        self._tails[slots, offsets] = token_ids

    def _put(self, slot: int, chain: Chain, num_full: int) -> None:
        """The first `num_full` blocks of the sequence are complete."""
        num_known = len(chain.token_ids) // self._tables.block_size
        while chain.num_blocks < num_full:
            place = chain.num_blocks
            assert place < num_known or place == num_full - 1, f"block {place} of slot {slot} was passed over"
            block = int(self._tables.blocks[slot, place])
            if self.cache.put(chain, block, None if place < num_known else self._tails[slot].tobytes()):
                self._pool.keep(block)

    def check(self) -> None:
        """Raises AssertionError unless the pool keeps what the cache knows, and nothing else (I11)."""
        assert self._pool.kept() == self.cache.blocks(), "the pool keeps other blocks than the cache knows"

    def _chain(self, slot: int) -> Chain:
        chain = self._chains[slot]
        assert chain is not None, f"slot {slot} runs, and nobody started in it"
        return chain

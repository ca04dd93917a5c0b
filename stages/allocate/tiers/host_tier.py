"""The host tier: blocks of swapped sequences and evicted prefix-cache blocks in host memory.

It also decides whether copying a block is cheaper than recomputing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import mul

from ....kernels.layout.kv_layout import KVLayout
from ....kernels.layout.state_layout import StateLayout
from ...messages import NO_INTS, Ints, Rates
from .block_pool import BlockPool, BlockState
from .block_tables import index_blocks
from .offload_policy import OffloadPolicy


@dataclass(frozen=True, slots=True, eq=False)
class _Swapped:
    """The tokens of one swapped sequence on the host."""

    num_tokens: int
    blocks: Ints  # in token order; the last may be partly filled
    state: Ints  # [1] the place of its recurrent state; [0] of a model without recurrent layers
    more: tuple[Ints, ...] = ()  # the same of the kinds from 1 on: the last blocks, as far as queries see them
    is_stale: bool = False  # computed before a reset of the prefix cache: must not be shared


@dataclass(frozen=True, slots=True, eq=False)
class _Arriving:
    """Host blocks that a granted step writes."""

    step: int
    generation: int
    blocks: Ints
    kind: int  # of memory, 0 being the first


class HostTier:
    """A bounded pool of blocks in host memory, and their owners.

    Without `rates`, swapping always pays. A sequence's block is in use from the plan that copies into it until the
    sequence is copied back or given up. Then it is quarantined while a step in flight may still read it, as on the
    device. Blocks that no sequence uses may hold cached prefixes; the least recently used are evicted first.

    With several kinds of memory there is a pool of each. A sequence is copied with the blocks of all kinds, or not at
    all. `more_blocks` are the sizes of the pools from kind 1 on, and `weights` their blocks' bytes, those of kind 0
    being 1. With recurrent layers (`states`) a sequence's state is copied with its blocks. Blocks of an index kind
    (`has_index`: kind 0 is one, see `SlotBlocks`) have no bytes; those of kind 1 then have the weight 1.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        rates: Rates | None = None,
        more_blocks: Sequence[int] = (),
        weights: Sequence[float] = (),
        states: StateLayout | None = None,
        *,
        has_index: bool = False,
    ) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.more = tuple(BlockPool(count, block_size) for count in more_blocks)
        self.with_memory = self.more if has_index else (self.pool, *self.more)  # of each kind of the layout
        self._has_index = has_index
        self._weights = weights
        self.states = None if states is None else BlockPool(states.num_on_host, 1)
        self._state_weight = 0.0 if states is None else states.num_blocks
        self.rates = rates
        self.offload_policy = OffloadPolicy(block_size)  # of cached prefixes
        self.num_full = 0  # swap-outs that failed for lack of room
        self.num_dear = 0  # swap-outs skipped, as recomputing was cheaper
        self._swapped: dict[int, _Swapped] = {}  # by sequence id
        self._arriving: list[_Arriving] = []  # blocks of cached prefixes being copied here
        self._last_adopted = [-1] * (1 + len(self.more))  # of each kind
        self._lost: list[list[int]] = [[] for _ in self.more]  # of each kind from 1 on: blocks that are never written

    @classmethod
    def of(
        cls,
        num_blocks: int,
        block_size: int,
        more_blocks: Sequence[int] = (),
        layout: KVLayout | None = None,
        states: StateLayout | None = None,
        *,
        max_model_len: int = 1,
    ) -> HostTier | None:
        """The host tier of a cache; None without host blocks of each kind, or without places for recurrent states.

        `layout`: of a cache of several kinds, or of windows, with sequences of up to `max_model_len` tokens. `states`:
        of a model with recurrent layers.
        """
        if not num_blocks or 0 in more_blocks or (states is not None and not states.num_on_host):
            return None
        sizes = [] if layout is None else [kind.block_bytes for kind in layout.kinds]
        weights = [size / sizes[0] for size in sizes[1:]]
        if layout is None or layout.kinds[0].window is None:
            return cls(num_blocks, block_size, None, more_blocks, weights, states)
        numbers = index_blocks(layout, num_blocks, -(-max_model_len // block_size))
        return cls(numbers, block_size, None, (num_blocks, *more_blocks), (1.0, *weights), states, has_index=True)

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        """All pools: of each kind of blocks, and of states."""
        return (self.pool, *self.more, *(() if self.states is None else (self.states,)))

    def __len__(self) -> int:
        """Sequences that have blocks here."""
        return len(self._swapped)

    def swap_out(self, sequence_id: int, num_tokens: int, more: Sequence[int] = ()) -> Ints | None:
        """Allocates host blocks for the first `num_tokens` tokens; None: recompute them instead.

        `more` are the blocks of each further kind that the sequence holds: see `more_blocks`.
        """
        assert sequence_id not in self._swapped, f"sequence {sequence_id} is swapped out twice"
        num_blocks = -(-num_tokens // self.pool.block_size)
        num_copied = 0 if self._has_index else num_blocks
        num_copied += round(sum(map(mul, more, self._weights)) + self._state_weight)
        if self.rates is not None and not self.rates.favour_swap(num_copied, num_tokens):
            self.num_dear += 1
            return None
        is_full = self.states is not None and not self.states.num_available
        if is_full or num_blocks > self.pool.num_available or any(map(_is_over, more, self.more)):
            self.num_full += 1
            return None
        blocks = self.pool.take(num_blocks)
        taken = tuple(pool.take(count) for pool, count in zip(self.more, more, strict=True))
        state = NO_INTS if self.states is None else self.states.take(1)
        self._swapped[sequence_id] = _Swapped(num_tokens, blocks, state, taken)
        return blocks

    def sequence_ids(self) -> list[int]:
        """Sequences that have blocks here, in order."""
        return sorted(self._swapped)

    def num_tokens(self, sequence_id: int) -> int:
        """Tokens of the sequence on the host, 0 if none."""
        swapped = self._swapped.get(sequence_id)
        return 0 if swapped is None else swapped.num_tokens

    def blocks(self, sequence_id: int) -> Ints:
        """The host blocks of the sequence, in token order."""
        return self._swapped[sequence_id].blocks

    def blocks_with_memory(self, sequence_id: int) -> Ints:
        """The host blocks of the sequence of the layout's kind 0."""
        return self.more_blocks(sequence_id)[0] if self._has_index else self.blocks(sequence_id)

    def more_blocks(self, sequence_id: int) -> tuple[Ints, ...]:
        """The host blocks of the sequence, in token order, of each kind from 1 on."""
        return self._swapped[sequence_id].more

    def state(self, sequence_id: int) -> Ints:
        """The place of the sequence's recurrent state, [1]; [0] of a model without recurrent layers."""
        return self._swapped[sequence_id].state

    def release(self, sequence_id: int, last_step: int, completed_step: int) -> None:
        """Frees the sequence's blocks; step `last_step` may still touch them. Ignores unknown ids."""
        swapped = self._swapped.pop(sequence_id, None)
        if swapped is not None:
            self.pool.give_back(swapped.blocks, last_step, completed_step)
            for pool, blocks in zip(self.more, swapped.more, strict=True):
                pool.give_back(blocks, last_step, completed_step)
            if self.states is not None:
                self.states.give_back(swapped.state, last_step, completed_step)

    def is_stale(self, sequence_id: int) -> bool:
        """Whether the sequence's blocks were computed before a reset of the prefix cache."""
        return self._swapped[sequence_id].is_stale

    # -- cached prefixes

    def reset(self) -> None:
        """Forgets all cached blocks and marks swapped sequences as stale, as the cache was reset."""
        self._swapped = {key: replace(swapped, is_stale=True) for key, swapped in self._swapped.items()}
        self.pool.forget_kept()
        for pool in self.more:
            pool.forget_kept()

    def adopt(self, count: int, step: int, generation: int, completed_step: int, kind: int = 0) -> Ints:
        """Allocates up to `count` blocks of a kind for cached prefixes, which `step` copies.

        Evicts the least recently used. It continues after the blocks adopted last, so that many small copies touch no
        more memory than a large one.
        """
        if self.rates is not None and not self.rates.favour_swap(1, self.pool.block_size):
            return NO_INTS
        pool = self.more[kind - 1] if kind else self.pool
        count = min(count, pool.num_available)
        if not count:
            return NO_INTS
        last = self._last_adopted[kind]
        is_there = last >= 0 and pool.state[last] != BlockState.FREE  # then its run has been started
        places = pool.take_behind([last if is_there else -1], [count], count)
        self._last_adopted[kind] = int(places[-1])
        pool.keep(places)
        pool.give_back(places, step, completed_step)
        self._arriving.append(_Arriving(step, generation, places, kind))
        return places

    def complete_steps(self, completed_step: int, voided: Sequence[int], generation: int) -> list[int]:
        """Every step up to `completed_step` is done.

        Returns the blocks of cached prefixes that are never written: the step was voided, or is in flight with an older
        generation and will not run. They are those of kind 0; `take_lost` has the others.
        """
        for pool in self.pools:
            pool.complete_steps(completed_step)
        if not self._arriving:
            return []
        arriving, self._arriving = self._arriving, []
        lost: list[int] = []
        for one in arriving:
            is_over = one.step <= completed_step
            if one.step in voided or (not is_over and one.generation < generation):
                (self._lost[one.kind - 1] if one.kind else lost).extend(one.blocks.tolist())
            elif not is_over:
                self._arriving.append(one)
        for place in lost:
            self.pool.forget(place)
        return lost

    def take_lost(self, kind: int) -> list[int]:
        """The blocks of a kind from 1 on that are never written, since the last call."""
        lost, self._lost[kind - 1] = self._lost[kind - 1], []
        for place in lost:
            self.more[kind - 1].forget(place)
        return lost

    def weight(self, kind: int) -> float:
        """The bytes of a block of a kind, as a multiple of those of kind 0."""
        return self._weights[kind - 1] if kind else float(not self._has_index)

    # -- after a crash

    def forget_all(self, last_step: int) -> None:
        """Forgets everything after a crash. All blocks become free once step `last_step` is done."""
        self._swapped.clear()
        self._arriving.clear()
        self._lost = [[] for _ in self.more]
        for pool in self.pools:
            pool.seize_all(last_step)

    def check(self) -> None:
        """Raises AssertionError unless each block in use belongs to exactly one sequence (I3, I4)."""
        swapped = self._swapped.values()
        _check_held(self.pool, [each.blocks for each in swapped])
        for kind, pool in enumerate(self.more):
            _check_held(pool, [each.more[kind] for each in swapped])
        if self.states is not None:
            _check_held(self.states, [each.state for each in swapped])


def _check_held(pool: BlockPool, blocks: Sequence[Ints]) -> None:
    pool.check()
    held = sorted(block for each in blocks for block in each.tolist())
    assert len(set(held)) == len(held), "two sequences have one block on the host"
    assert len(held) == pool.num_in_use, f"{pool.num_in_use} host blocks are in use, {len(held)} are held"


def _is_over(count: int, pool: BlockPool) -> bool:
    return count > pool.num_available

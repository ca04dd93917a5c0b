"""The model runner: turns a grant into the decoder's input arrays, and runs it.

Used on the device thread only. Arrays are numpy's or torch's, of the same kind as `last_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...kernels.layout.state_layout import StateLayout
from ...model.decoder.step_inputs import KindTables, StepInputs
from ..device.arrays import Array, HostArray, arrays_of
from ..device.pooler import Pooler
from ..device.scored_prompts import LogitsWithPrompts, ScoredChunk, ScoredPrompts, rows_of
from ..messages import STATES, BlockCopy, Bools, Direction, Indices, Ints, Started, StepGrant

Longs = NDArray[np.int64]


class KVCacheProtocol(Protocol):
    """What a runner needs of a KV cache: copies of whole blocks of a kind, in all layers that it has.

    Block ids are [C] i64 on the host.
    """

    block_size: int
    blocks_of_kinds: tuple[int, ...]  # the number of blocks of each kind: see `KVLayout`

    def copy_blocks(self, source: Longs, destination: Longs, kind: int = 0) -> None: ...
    def make_host_blocks(self, num_blocks: int, kind: int = 0) -> Any: ...
    def copy_out(self, blocks: Longs, host: Any, places: Longs, kind: int = 0) -> None: ...
    def copy_in(self, host: Any, places: Longs, blocks: Longs, kind: int = 0) -> None: ...


class StatesProtocol(Protocol):
    """What a runner needs of the states of recurrent layers: copies of whole states, in all layers.

    Slots and places are [C] i64 on the host. Behind the slots are snapshots.
    """

    layout: StateLayout

    def make_host_states(self) -> Any: ...
    def copy(self, sources: Longs, destinations: Longs) -> None: ...
    def copy_out(self, slots: Longs, host: Any, places: Longs) -> None: ...
    def copy_in(self, host: Any, places: Longs, slots: Longs) -> None: ...


class DecoderProtocol(Protocol):
    """What a runner needs of a decoder."""

    def forward(self, inputs: StepInputs[Any], cache: Any) -> Array: ...
    def hidden(self, inputs: StepInputs[Any], cache: Any) -> Array: ...
    def normed(self, hidden: Array) -> Array: ...
    def logits(self, hidden: Array) -> Array: ...


class AdapterTable(Protocol):
    """What a runner needs of a decoder's adapters: see `LoraTable` and `LoraSlots`."""

    def load(self, slot: int, adapter: Any) -> None: ...
    def begin_step(self, slots: Longs | None) -> None: ...


class ModelRunner:
    """The decoder, and the columnar state of the running sequences, by slot.

    `last_tokens` [num_slots] i64 on the device is shared with the sampler. The sampler writes each slot's newest token
    there, and a decode row reads its input from it. All other input of a row comes with `Started`: its prompt, and
    after a preemption the tokens it had generated. The `pooler`, also shared with the sampler, sums the hidden states
    of pooled sequences.
    """

    def __init__(
        self,
        decoder: DecoderProtocol,
        cache: KVCacheProtocol,
        last_tokens: Array,
        max_blocks_per_slot: int,
        num_host_blocks: int | Sequence[int] = 0,
        pooler: Pooler | None = None,
        short_length: int = 0,
        adapters: AdapterTable | None = None,
        states: StatesProtocol | None = None,
    ) -> None:
        """A slot has at most `max_blocks_per_slot` blocks of a kind. `num_host_blocks`: of each kind, or of the only
        one. `short_length`: rows of the rotary tables before those of long sequences; 0 if the decoder's factors do not
        depend on the length. `states`: of the recurrent layers, by slot; None if the decoder has no such layers.
        """
        num_slots = len(last_tokens)
        self.decoder = decoder
        self.cache = cache
        num_each = [num_host_blocks] if isinstance(num_host_blocks, int) else num_host_blocks
        self.host_blocks = [cache.make_host_blocks(num, kind) if num else None for kind, num in enumerate(num_each)]
        self.last_tokens = last_tokens
        self.pooler = pooler
        self._arrays = arrays_of(last_tokens)
        self.block_size = cache.block_size
        # [K, S, M] block ids in token order, of each kind
        self.tables: Ints = np.zeros((len(cache.blocks_of_kinds), num_slots, max_blocks_per_slot), np.int32)
        self._device_tables = self._upload(self.tables)  # the same memory on a CPU
        self._keeps_tables = not self._arrays.is_on_host(last_tokens)
        self._num_known = np.zeros(num_slots, np.int64)  # tokens that came with Started
        self._known: list[Longs] = [np.zeros(0, np.int64)] * num_slots
        self.short_length = short_length
        self.states = states
        self.host_states = None if states is None else states.make_host_states()
        self._rope_offsets: Longs | None = np.zeros(num_slots, np.int64) if short_length else None  # for positions
        self._scored = ScoredPrompts(num_slots)
        self._adapters = adapters
        self._find_adapter: Callable[[str], Any] | None = None  # by digest
        self._failed_loads: dict[int, dict[str, Exception]] = {}  # by step, until taken: digest -> why
        self._adapter_slots: Longs = np.zeros(num_slots, np.int64)  # [S] of the sequence in each slot; 0: base model

    def find_adapters(self, find: Callable[[str], Any]) -> None:
        """Sets the function that returns the adapter of a digest, for those that steps load."""
        self._find_adapter = find

    def read_tables(self, tables: Array) -> None:
        """Reads block tables on the device from `tables` [K, S, M] i32 from now on.

        The caller keeps them up to date.
        """
        self._device_tables, self._keeps_tables = tables, False

    def forward(self, grant: StepGrant) -> Array | LogitsWithPrompts:
        """Runs one step.

        Returns [L, V] logits of the grant's sampled rows and their drafts, in their order. Pooled sequences have no
        logits: the pooler has their results. A grant of copies alone gives [0, 0]. A step that scores prompts returns
        `LogitsWithPrompts`.
        """
        self.apply_updates(grant)
        if grant.copies:
            with self._arrays.inference():
                for copy in grant.copies:
                    if copy.direction is not Direction.SAVE:
                        self._copy(copy)
        found = self.compute(grant)
        if grant.copies and grant.copies[-1].direction is Direction.SAVE:  # the last one, if any
            with self._arrays.inference():
                self._copy(grant.copies[-1])
        return found

    def compute(self, grant: StepGrant) -> Array | LogitsWithPrompts:
        """As `forward`, after `apply_updates` and the step's copies."""
        with self._arrays.inference():
            if not len(grant.slots):
                return self._upload(np.zeros((0, 0), np.float32))
            return self.run(grant, self.inputs(grant), self.scored_runs(grant))

    def scored_runs(self, grant: StepGrant) -> tuple[ScoredChunk, ...]:
        """The prompt tokens to score in a step, whose updates must be applied."""
        return self._scored.runs(grant)

    def run(
        self, grant: StepGrant, inputs: StepInputs[Any], runs: tuple[ScoredChunk, ...]
    ) -> Array | LogitsWithPrompts:
        """Runs a step with rows, of its inputs and the prompt tokens to score in it."""
        if not runs and (self.pooler is None or not self.pooler.num_pooled):
            return self.decoder.forward(inputs, self.cache)
        return self._forward_in_parts(grant, inputs, runs)

    def _forward_in_parts(
        self, grant: StepGrant, inputs: StepInputs[Any], runs: tuple[ScoredChunk, ...]
    ) -> Array | LogitsWithPrompts:
        """Runs a step with pooled rows or scored prompts.

        Computes hidden states first, then the logits that are needed.
        """
        hidden, rows = self.decoder.hidden(inputs, self.cache), inputs.logits_rows
        if self.pooler is not None and self.pooler.num_pooled:
            self._pool(grant, hidden, self.pooler)
            rows = rows[self._upload(~self.pooler.is_pooled[grant.logits_slots])]
        sampled = self.decoder.logits(hidden[rows])
        if not runs:
            return sampled
        wanted = self._arrays.take(hidden, rows_of(runs))
        return LogitsWithPrompts(sampled, runs, wanted, self.decoder.logits, max_rows=len(self._known))

    def _pool(self, grant: StepGrant, hidden: Array, pooler: Pooler) -> None:
        tokens, slots = pooler.tokens_of_interest(grant, _offsets(grant))
        if len(tokens):
            pooler.add(slots, self.decoder.normed(self._arrays.take(hidden, tokens)))

    def _copy(self, copy: BlockCopy) -> None:
        """Copies blocks after the writes of earlier steps and before the reads of this one."""
        sources = copy.sources.astype(np.int64)
        destinations = copy.destinations.astype(np.int64)
        if copy.kind == STATES:
            return self._copy_states(copy.direction, sources, destinations)
        if copy.direction is Direction.FORK:
            return self.cache.copy_blocks(sources, destinations, copy.kind)
        host = self.host_blocks[copy.kind]
        assert host is not None, "blocks are copied to or from the host, and the runner has no host blocks"
        if copy.direction is Direction.OUT:
            self.cache.copy_out(sources, host, destinations, copy.kind)
        else:
            self.cache.copy_in(host, sources, destinations, copy.kind)

    def _copy_states(self, direction: Direction, sources: Longs, destinations: Longs) -> None:
        assert self.states is not None, "states are copied, and the decoder has no recurrent layers"
        if direction is Direction.OUT:
            self.states.copy_out(sources, self.host_states, destinations)
        elif direction in (Direction.FORK, Direction.SAVE):
            self.states.copy(sources, destinations)
        else:
            self.states.copy_in(self.host_states, sources, destinations)

    def wants_more(self, grant: StepGrant) -> bool:
        """Whether a step has pooled rows or scored prompts.

        Its updates must be applied (`apply_updates`).
        """
        if self.pooler is not None and self.pooler.num_pooled and bool(self.pooler.is_pooled[grant.slots].any()):
            return True
        return len(self._scored.runs(grant)) > 0

    def has_adapters(self, grant: StepGrant) -> bool:
        """Whether some row of a step has a LoRA adapter. Its updates must be applied."""
        return self._adapters is not None and bool(self._adapter_slots[grant.slots].any())

    def apply_updates(self, grant: StepGrant) -> None:
        """Applies a grant's new sequences and new blocks, then loads its adapters.

        Called first: a step that fails must not lose them. A load that fails does not fail the step, whose rows read
        other slots.
        """
        for started in grant.started:
            self._adapter_slots[started.slot] = started.adapter_slot
            self._known[started.slot] = started.token_ids.astype(np.int64)
            self._num_known[started.slot] = len(started.token_ids)
            if self._rope_offsets is not None:
                self._rope_offsets[started.slot] = self.short_length if started.is_long else 0
            self._scored.start(started)
            self._start_pooling(started)
        if len(grant.table_slots):
            self._set_blocks(0, grant.table_slots, grant.table_places, grant.table_blocks)
        for entries in grant.more_tables:
            self._set_blocks(entries.kind, entries.slots, entries.places, entries.blocks)
        for number, digest in grant.adapter_loads:
            self._load_adapter(grant.step, number, digest)

    def _start_pooling(self, started: Started) -> None:
        if self.pooler is not None:
            self.pooler.start(started)

    def _set_blocks(self, kind: int, slots: Indices, places: Indices, blocks: Ints) -> None:
        self.tables[kind, slots, places] = blocks
        if self._keeps_tables:
            self._device_tables[kind, self._upload(slots), self._upload(places)] = self._upload(blocks)

    def _load_adapter(self, step: int, number: int, digest: str) -> None:
        assert self._adapters is not None and self._find_adapter is not None
        try:
            self._adapters.load(number, self._find_adapter(digest))
        except Exception as error:  # any error of a load concerns the requests that wait for it, not the step's rows
            self._failed_loads.setdefault(step, {})[digest] = error

    def take_failed_loads(self, step: int) -> dict[str, Exception]:
        """Returns the adapters that a finished step could not load, with the errors, and forgets them.

        Called on the event loop.
        """
        return self._failed_loads.pop(step, {})

    def inputs(self, grant: StepGrant) -> StepInputs[Any]:
        """The grant as decoder inputs.

        Rows with one token come first there; logits keep the grant's order.
        """
        slots, starts = grant.slots, grant.starts.astype(np.int64)
        is_fed = starts >= self._num_known[slots]  # its input is the newest token
        if np.count_nonzero(is_fed) == len(slots) and grant.drafts is None:
            return self._decode_inputs(slots, starts, grant.is_sampled)
        is_single = grant.num_tokens == 1
        order = np.argsort(~is_single, kind="stable")
        slots, starts, is_fed = slots[order], starts[order], is_fed[order]
        counts = grant.num_tokens[order].astype(np.int64)
        ends = np.cumsum(counts)
        offsets = ends - counts  # [S] of each row's first token in the step
        row_of = np.empty_like(order)
        row_of[order] = np.arange(len(order))
        input_ids = self._input_ids(slots, starts, counts, offsets, is_fed)
        logits_rows = ends[row_of[grant.is_sampled]] - 1
        if grant.drafts is not None:
            num_drafts = grant.drafts.counts.astype(np.int64)
            drafts = self._arrays.beside(self.last_tokens, grant.drafts.token_ids.astype(np.int64))
            self._arrays.put(input_ids, _ranges(ends[row_of] - num_drafts, num_drafts), drafts)
            num_drafts = num_drafts[grant.is_sampled]
            logits_rows = _ranges(logits_rows - num_drafts, 1 + num_drafts)
        return self._make(
            input_ids=input_ids,
            slots=slots,
            token_slots=np.repeat(slots, counts),
            positions=np.arange(ends[-1]) - np.repeat(offsets - starts, counts),
            query_starts=np.concatenate([offsets, ends[-1:]]),
            lengths=starts + counts,
            logits_rows=logits_rows,
            num_decode=int(np.count_nonzero(is_single)),
        )

    def _decode_inputs(self, slots: Longs, starts: Longs, is_sampled: Bools) -> StepInputs[Any]:
        """Inputs of a plain decode step, in which each row reads its newest token only."""
        return self._make(
            input_ids=self._arrays.take(self.last_tokens, slots),
            slots=slots,
            token_slots=slots,
            positions=starts,
            query_starts=np.arange(len(slots) + 1),
            lengths=starts + 1,
            logits_rows=np.flatnonzero(is_sampled),
            num_decode=len(slots),
        )

    def _input_ids(self, slots: Longs, starts: Longs, counts: Longs, offsets: Longs, is_fed: Bools) -> Array:
        """[T] i64 the step's input tokens. Rows without `is_fed` read those that came with `Started`."""
        ids = np.empty(int(counts.sum()), np.int64)
        for row in np.flatnonzero(~is_fed).tolist():
            start, count, offset = int(starts[row]), int(counts[row]), int(offsets[row])
            ids[offset : offset + count] = self._known[slots[row]][start : start + count]
        input_ids = self._upload(ids)
        if is_fed.any():
            newest = self._arrays.take(self.last_tokens, slots[is_fed])
            self._arrays.put(input_ids, offsets[is_fed], newest)
        return input_ids

    def _make(
        self,
        *,
        input_ids: Array,
        slots: Longs,
        token_slots: Longs,
        positions: Longs,
        query_starts: Longs,
        lengths: Longs,
        logits_rows: Longs,
        num_decode: int,
    ) -> StepInputs[Any]:
        if self._adapters is not None:
            adapter_slots = self._adapter_slots[token_slots]
            self._adapters.begin_step(adapter_slots if adapter_slots.any() else None)
        place, offset = np.divmod(positions, self.block_size)
        width = -(-int(lengths.max()) // self.block_size)
        first, *others = (
            KindTables(
                self._upload(self.tables[kind, token_slots, place].astype(np.int64) * self.block_size + offset),
                self._arrays.take(self._device_tables[kind, :, :width], slots),
            )
            for kind in range(len(self.tables))
        )
        return StepInputs(
            input_ids=input_ids,
            positions=self._upload(
                positions if self._rope_offsets is None else positions + self._rope_offsets[token_slots]
            ),
            slot_mapping=first.slot_mapping,
            block_tables=first.block_tables,
            query_starts=self._upload(query_starts.astype(np.int32)),
            lengths=self._upload(lengths.astype(np.int32)),
            logits_rows=self._upload(logits_rows),
            num_decode=num_decode,
            more_kinds=tuple(others),
            slots=self._upload(slots.astype(np.int64)) if self.states is not None else None,
        )

    def _upload(self, array: HostArray) -> Array:
        return self._arrays.beside(self.last_tokens, array)

    def wait(self) -> None:
        """Blocks until the device has finished all submitted work."""
        self._arrays.wait(self.last_tokens)


def _ranges(starts: Longs, counts: Longs) -> Longs:
    """[sum of counts] the ranges of `counts[i]` numbers from `starts[i]` on, concatenated."""
    ends = np.cumsum(counts)
    numbers: Longs = np.arange(ends[-1]) - np.repeat(ends - counts - starts, counts)
    return numbers


def _offsets(grant: StepGrant) -> Indices:
    """[R] index of each row's first token in the step, in which rows with one token come first."""
    counts = grant.num_tokens.astype(np.intp)
    order = np.argsort(counts != 1, kind="stable")
    offsets = np.empty_like(order)
    offsets[order] = np.cumsum(counts[order]) - counts[order]
    return offsets

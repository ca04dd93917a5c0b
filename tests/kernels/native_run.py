"""Sequences driven through a native model step by step, as a test wants them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from millrace.kernels.layout.state_layout import StateLayout
from millrace.kernels.native.cache import NativeCache, NativeStates
from millrace.kernels.native.model import NativeModel
from tests.kernels.native_weights import Array

NUM_STATES = 9


def state_of(sequence: int) -> int:
    """The slot of a sequence's state in a `Run`."""
    return (7 * sequence + 4) % NUM_STATES


@dataclass
class Run:
    """Sequences driven through a model step by step, in blocks that lie in no order, all logits kept."""

    model: NativeModel
    block_size: int = 16
    num_blocks: int = 0
    poison: float | None = None  # what all of the cache holds at first
    adapters: dict[int, int] = field(default_factory=dict)  # by sequence, the slot of its adapter
    cache: NativeCache = field(init=False)
    _free: list[int] = field(init=False)
    _tables: dict[int, list[int]] = field(default_factory=dict)
    _lengths: dict[int, int] = field(default_factory=dict)
    logits: dict[int, list[Array]] = field(default_factory=dict)  # by sequence, [V] of each token

    def __post_init__(self) -> None:
        count = self.num_blocks or 4096 // self.block_size
        shape, states = self.model.shape, None
        if size := shape.state_bytes(self.model.dtype):
            states = NativeStates(shape, StateLayout(size, NUM_STATES), self.model.dtype)
            states.memory[:] = 0x7F  # a sequence that begins reads none of it
        self.cache = NativeCache.uniform(shape, count, self.block_size, self.model.cache_dtype, states=states)
        self._free = np.random.default_rng(3).permutation(count).tolist()
        if self.poison is not None:
            bits = np.float32(self.poison).view(np.uint32) >> 16
            data = self.cache.data if self.cache.dtype == "float32" else self.cache.data.view(np.uint16)
            data[:] = self.poison if self.cache.dtype == "float32" else bits  # in int8: as scales

    def step(self, parts: dict[int, list[int]], asked: dict[int, list[int]] | None = None) -> dict[int, Array]:
        """One step: for each sequence its next tokens. Logits [n, V] of those of them that are asked for, by their
        numbers among these; of all, which are kept, by default."""
        positions, slots, starts = [], [], [0]
        for sequence, token_ids in parts.items():
            table, start = self._tables.setdefault(sequence, []), self._lengths.get(sequence, 0)
            end = self._lengths[sequence] = start + len(token_ids)
            while len(table) * self.block_size < end:
                table.append(self._free.pop())
            places = np.arange(start, end)
            positions.append(places)
            slots.append(np.array(table)[places // self.block_size] * self.block_size + places % self.block_size)
            starts.append(starts[-1] + len(token_ids))
        tables = np.zeros((len(parts), max(len(self._tables[s]) for s in parts)), np.int32)
        for row, sequence in enumerate(parts):
            tables[row, : len(self._tables[sequence])] = self._tables[sequence]
        begins = dict(zip(parts, starts, strict=False))
        wanted = asked or {sequence: list(range(len(token_ids))) for sequence, token_ids in parts.items()}
        rows = np.array([begins[sequence] + i for sequence, numbers in wanted.items() for i in numbers], np.int64)
        logits = np.empty((len(rows), self.model.shape.vocab_size), np.float32)
        adapters = [self.adapters.get(sequence, 0) for sequence, ids in parts.items() for _ in ids]
        self.model.step(
            self.cache,
            input_ids=np.concatenate([np.array(ids, np.int64) for ids in parts.values()]),
            positions=np.concatenate(positions),
            slot_mapping=np.concatenate(slots).astype(np.int64),
            block_tables=tables,
            query_starts=np.array(starts, np.int32),
            lengths=np.array([self._lengths[sequence] for sequence in parts], np.int32),
            logits_rows=rows,
            logits=logits,
            adapters=np.array(adapters, np.int64) if self.adapters else None,
            slots=None if self.cache.states is None else np.array([state_of(sequence) for sequence in parts], np.int64),
        )
        ends = np.cumsum([len(numbers) for numbers in wanted.values()])[:-1]
        given = dict(zip(wanted, np.split(logits, ends), strict=True))
        for sequence in parts if asked is None else ():
            self.logits.setdefault(sequence, []).extend(given[sequence])
        return given

    def whole(self, token_ids: list[int], chunks: Iterable[int] = ()) -> Array:
        """[T, V], of one sequence alone, in chunks of these sizes and then the rest."""
        sequence = len(self._tables)
        rest = list(token_ids)
        for size in chunks:
            if rest[:size]:
                self.step({sequence: rest[:size]})
                rest = rest[size:]
        if rest:
            self.step({sequence: rest})
        return np.array(self.logits[sequence])

"""The orders of rank 0 to the other ranks. Each is obeyed by all ranks, and most by rank 0 too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.layout.state_layout import StateLayout
from ...runtime.processes.order_line import order_codec
from ..config import EngineConfig

STEP_ARRAYS = ("input_ids", "positions", "slot_mapping", "query_starts", "lengths", "logits_rows")  # sent whole

LEAST_COMPARED = 8192  # entries; fewer are sent sooner than compared
MOST_CHANGED = 4  # a change is 12 bytes, an entry 4: with more than a fourth changed, all are sent

Longs = NDArray[np.int64]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RankSetup:
    """The first order: load the rank's share of the model."""

    config: EngineConfig  # resolved, as rank 0 has it
    root: str  # folder of the checkpoint
    rank: int
    size: int
    device: str
    num_threads: int  # on a CPU
    folder: str  # where processes find each other
    log: Mapping[str, Any] | None  # settings of the log; None: it is configured
    layers: Sequence[int] = ()  # (begin, end, count) of a pipeline's rank; empty: it has a share of every layer


@dataclass(frozen=True, slots=True, eq=False)
class JoinRanks:
    """Join the sums of all ranks. All do so at once, so they are told when all can."""


@dataclass(frozen=True, slots=True, eq=False)
class FirstSum:
    """Add up a number of all ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class MakeDecoder:
    """Make a decoder for sequences of up to `max_positions` tokens."""

    max_positions: int


@dataclass(frozen=True, slots=True, eq=False)
class MeasureScales:
    """Measure the scales of an fp8 KV cache, in a step that all ranks compute at once."""


@dataclass(frozen=True, slots=True, eq=False)
class MakeCache:
    """Make a KV cache, and memory for the states of recurrent layers, on the host too."""

    num_blocks: int
    is_block_major: bool
    states: StateLayout | None = None  # of a model with recurrent layers


@dataclass(frozen=True, slots=True, eq=False)
class MakeHostBlocks:
    """Make memory for blocks on the host."""

    num_blocks: int


@dataclass(frozen=True, slots=True, eq=False)
class TableChanges:
    """Block tables, as what differs from those of the step before, in most steps a few entries."""

    whole: Ints | None  # all of them, if they have another shape or differ in much; then the others are empty
    places: Longs  # of the entries that differ, in the order of rows
    blocks: Ints  # there


@dataclass(frozen=True, slots=True, eq=False)
class StepOrder:
    """Compute a step; the arrays are those of `StepInputs`. `adapters` are the adapter slots of its tokens.

    `slots` are those of its sequences, of a model with recurrent layers.
    """

    input_ids: Longs
    positions: Longs
    slot_mapping: Longs
    block_tables: TableChanges
    query_starts: Ints
    lengths: Ints
    logits_rows: Longs
    num_decode: int
    has_logits: bool  # False: hidden states only
    adapters: Longs | None
    slots: Longs | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LogitsOrder:
    """Compute the logits of `num_rows` hidden states, which rank 0 sends by `Comm.broadcast`."""

    num_rows: int


@dataclass(frozen=True, slots=True, eq=False)
class CopyOrder:
    """Copy whole blocks, or states of recurrent layers: "fork" on the device, "out" to the host, "in" from it."""

    kind: str
    sources: Longs
    destinations: Longs
    is_states: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPart:
    """Some rows of the rank's share of a LoRA adapter. The last part of an adapter has no linear: load it."""

    slot: int
    name: str
    dtype: str
    layer: int = 0
    linear: str = ""
    slices: Sequence[tuple[int, Any, Any]] = ()  # row_start, a, b


@dataclass(frozen=True, slots=True, eq=False)
class WeightBytes:
    """Say how many bytes the rank's weights take."""


@dataclass(frozen=True, slots=True, eq=False)
class FreeMemory:
    """Say how many bytes of the device are free."""


CODEC = order_codec(
    [
        *(RankSetup, EngineConfig, JoinRanks, FirstSum, MakeDecoder, MeasureScales, MakeCache, MakeHostBlocks),
        *(StateLayout, StepOrder, TableChanges, LogitsOrder, CopyOrder, AdapterPart, WeightBytes, FreeMemory),
    ]
)


class SentTables:
    """The block tables of the last step, as both ends of a line know them: `changes` for one, `apply` for the other."""

    def __init__(self) -> None:
        self._tables: Ints = np.zeros((0, 0), np.int32)  # [S, M]

    def changes(self, tables: Ints) -> TableChanges:
        """What to send of the tables of the next step. An array that changes later may be given."""
        if tables.size >= LEAST_COMPARED and tables.shape == self._tables.shape:
            places = np.flatnonzero(self._tables != tables)
            if len(places) * MOST_CHANGED < tables.size:
                blocks = tables.reshape(-1)[places]
                self._tables.reshape(-1)[places] = blocks
                return TableChanges(None, places, blocks)
        self._tables = tables.copy()
        return TableChanges(self._tables, np.zeros(0, np.int64), np.zeros(0, np.int32))

    def apply(self, changes: TableChanges) -> Ints:
        """The tables of the next step, [S, M]. They change with the next call."""
        if changes.whole is not None:
            self._tables = changes.whole.copy()
        else:
            self._tables.reshape(-1)[changes.places] = changes.blocks
        return self._tables

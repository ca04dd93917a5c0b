"""The status of an engine: all numbers that metrics, dashboard and inspection read, at one point in time.

Plain data. An engine makes it of itself when it is read; the part of the step loop also travels between processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...runtime.message import message
from ...runtime.pipeline_status import ChannelStatus, HistogramStatus, PipelineStatus, StageStatus
from ..messages import Ints
from ..schedule.sequence import State
from .front_status import FrontStatus

STATES = list(State)


@message
class AdapterSlotsStatus:
    """The device slots of adapters, and the sequences that wait for one."""

    slots: Sequence[tuple[str, str, int]]  # (state, digest, sequences that hold it), from slot 1 on
    num_loads: int
    waiting: Mapping[str, int]  # sequences by digest
    num_owed: int

    @property
    def num_waiting(self) -> int:
        return sum(self.waiting.values())

    @property
    def num_resident(self) -> int:
        """Slots whose adapter rows may use, draining ones included."""
        return sum(state in ("resident", "draining") for state, _, _ in self.slots)

    def state_of(self, digest: str) -> str | None:
        """The state of the slot that holds or loads an adapter; None if none does."""
        return next((state for state, held, _ in self.slots if held == digest), None)


@message
class DraftStatus:
    """The counters of speculative decoding."""

    num_tokens: int  # in a draft, at most
    num_drafting: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_at: Sequence[int]  # by position in the draft


@message
class SequencesStatus:
    """The live sequences, one row each."""

    ids: NDArray[np.int64]  # [L]
    states: NDArray[np.int8]  # [L] places in `STATES`
    slots: Ints  # [L]
    num_prompt: Ints  # [L]
    limits: Ints  # [L]
    num_preempted: Ints  # [L]
    is_parked: NDArray[np.bool_]  # [L]


@message
class SchedulerStatus:
    """The sequences by state, and what became of them."""

    num_running: int
    num_waiting: int
    num_swapped: int
    num_parked: int
    num_recomputed_tokens: int
    num_preemptions: int
    admission_blocked_reason: str
    step_token_budget: int
    last_granted: int  # step
    completed_step: int
    max_num_seqs: int
    preemptions: Mapping[tuple[str, str], int]  # by mode and cause
    drafts: DraftStatus
    adapters: AdapterSlotsStatus | None  # None: none are served


@message
class PoolStatus:
    """The numbers of blocks on the device or the host, by state."""

    num_blocks: int
    num_free: int
    num_in_use: int
    num_shared: int
    num_cached: int
    num_quarantined: int


@message
class KindStatus:
    """One kind of memory, where there are several (see `KVLayout`)."""

    name: str
    pool: PoolStatus  # `num_blocks`: if it had all slabs
    num_slabs: int  # that it has now


@message
class HostStatus:
    """The host tier."""

    pool: PoolStatus
    num_full: int  # preemptions that recompute as it was full
    num_dear: int  # or as a swap would be slower


@message
class PrefixStatus:
    """The counters of the prefix cache, in tokens."""

    num_queries: int
    num_hits: int
    num_host_hits: int


@message
class SlabStatus:
    """The slabs of a cache of several kinds (see `KVLayout`)."""

    kinds: tuple[str, ...]  # names
    cells_per_slab: int
    kind_of: NDArray[np.uint8]  # [slabs] the kind that has it; 255: none


@message
class BlockStatus:
    """The state and owner of each block. Read only on request."""

    state: NDArray[np.int8]  # [N]
    num_tables: Ints  # [N]
    num_held: Ints  # [S] blocks of each slot
    table_blocks: Ints  # [sum of num_held] slot by slot, in token order
    slabs: SlabStatus | None = None  # of a cache of several kinds, whose slabs are drawn as equal cells, [N] in all


@message
class CacheStatus:
    """The KV cache: its blocks on the device and the host, and who holds them."""

    pool: PoolStatus
    host: HostStatus | None
    prefixes: PrefixStatus | None  # None: prefix caching is off
    num_held: Ints  # [S] blocks of each slot
    waste: float  # unused share of the blocks held
    blocks: BlockStatus | None = None  # None: not asked for
    kinds: tuple[KindStatus, ...] = ()  # with several kinds of memory, of which `pool` is the first
    num_slabs: int = 0  # in all; 0: there is one kind

    @property
    def used_share(self) -> float:
        """The share of the memory that running sequences use."""
        pools = [kind.pool for kind in self.kinds] or [self.pool]
        return sum(pool.num_in_use / pool.num_blocks for pool in pools)

    @property
    def memory(self) -> PoolStatus:
        """All memory as one pool: of several kinds, in blocks of the smallest, all slabs included."""
        if not self.kinds:
            return self.pool
        most = max(kind.pool.num_blocks for kind in self.kinds)
        names = ("num_in_use", "num_shared", "num_cached", "num_quarantined")
        in_use, shared, cached, quarantined = (
            round(sum(getattr(kind.pool, name) * most / kind.pool.num_blocks for kind in self.kinds)) for name in names
        )
        return PoolStatus(most, most - in_use - cached - quarantined, in_use, shared, cached, quarantined)


@message
class CoreStatus:
    """The step loop, wherever it runs."""

    scheduler: SchedulerStatus
    cache: CacheStatus
    step_tokens: HistogramStatus
    idle_gaps_us: HistogramStatus | None  # None: the device is not asynchronous
    sequences: SequencesStatus | None = None  # None: not asked for


@message
class CoreReport:
    """What an engine process tells of its step loop: a few times a second, and when it is asked."""

    core: CoreStatus
    stages: Sequence[StageStatus]
    channels: Sequence[ChannelStatus]


STATUS_TYPES: tuple[type, ...] = (
    *(CoreReport, CoreStatus, SchedulerStatus, DraftStatus, AdapterSlotsStatus, SequencesStatus, CacheStatus),
    *(
        PoolStatus,
        KindStatus,
        HostStatus,
        PrefixStatus,
        BlockStatus,
        SlabStatus,
        HistogramStatus,
        StageStatus,
        ChannelStatus,
    ),
)


class SequenceRow(NamedTuple):
    """One live sequence."""

    sequence_id: int
    state: State
    slot: int
    num_prompt: int
    limit: int
    num_preempted: int
    is_parked: bool


@dataclass(frozen=True, eq=False)
class EngineStatus:
    """What one engine does and has done."""

    pipeline: PipelineStatus
    front: FrontStatus
    core: CoreStatus | None  # None: an encoder model has no step loop
    owners: Mapping[int, str]  # slot -> id of the request in it; {} unless the sequences are asked for

    def sequences_of(self, first_id: int, count: int) -> list[SequenceRow]:
        """Those of `count` sequence ids that live. Needs the sequences to be asked for."""
        places = (self._places.get(number) for number in range(first_id, first_id + count))
        return [self._row(place) for place in places if place is not None]

    def num_blocks_of(self, slots: Iterable[int]) -> int:
        """Blocks of these slots."""
        if self.core is None:
            return 0
        num_held = self.core.cache.num_held
        return sum(int(num_held[slot]) for slot in slots)  # faster than an array

    def _row(self, place: int) -> SequenceRow:
        number, state, *rest = (column[place] for column in self._columns)
        return SequenceRow(number, STATES[state], *rest)

    @cached_property
    def _columns(self) -> tuple[list[Any], ...]:
        if self.core is None or self.core.sequences is None:
            return ([],)
        some = self.core.sequences
        columns = (some.ids, some.states, some.slots, some.num_prompt, some.limits, some.num_preempted, some.is_parked)
        return tuple(column.tolist() for column in columns)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {number: place for place, number in enumerate(self._columns[0])}

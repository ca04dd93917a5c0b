"""Views of the engine process's state, for observers in the front process.

Their attributes have the names of the real objects. Updated from `CoreStatus` a few times a second, and on request.
Plain data.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...runtime.channel import ChannelStats
from ...runtime.fault_injection import Faults
from ...runtime.histogram import STAGE_BOUNDS_US, Histogram
from ...runtime.stage import Stage
from ...runtime.stage_runner import StageTimes
from ..allocate.stage import STEP_TOKENS
from ..backends.cuda.idle_time import BOUNDS_US
from ..config import EngineConfig
from ..outputs import ModelInfo
from ..schedule.adapter_slots import AdapterSlots, AdapterState
from ..schedule.sequence import State
from .protocol import AdapterSlotsStatus, BlockStatus, CoreStatus, EdgeStatus, PoolStatus, StageStatus
from .status import STATES

EMPTY_SLOT = (AdapterState.EMPTY.value, "", 0)  # as in `AdapterSlotsStatus.slots`


class RemoteChannelView:
    """The view of a channel of the engine process. It holds no items."""

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.num_waiting = 0
        self.num_promised = 0
        self.waiting_since = math.inf
        self.is_closed = False
        self._stats = ChannelStats(capacity, 0, 0, 0, 0, 0.0, 0.0)

    def update(self, status: EdgeStatus) -> None:
        self._stats, self.num_waiting, self.waiting_since = status.stats, status.num_waiting, status.waiting_since

    def __len__(self) -> int:
        return self._stats.depth

    def __bool__(self) -> bool:
        return True

    def stats(self) -> ChannelStats:
        return self._stats

    def peek(self, most: int) -> list[Any]:
        return []

    def close(self) -> None:
        """Does nothing: the engine process closes its channels."""


class RemoteStageView(Stage[Any, Any]):
    """The view of a stage of the engine process, with what stall detection reads."""

    def __init__(self, of: type[Stage[Any, Any]]) -> None:
        self.inputs, self.outputs = of.inputs, of.outputs  # type: ignore[misc]
        self.status: StageStatus | None = None

    @property
    def has_work(self) -> bool:
        return self.status is not None and self.status.has_work

    @property
    def expected_s(self) -> float:
        return 0.0 if self.status is None else self.status.expected_s

    @property
    def waits_for(self) -> str | None:
        return None if self.status is None else self.status.waits_for

    def wants(self, port: str) -> bool:
        return self.status is None or port in self.status.wants


class RemoteRunnerView:
    """The view of a stage runner of the engine process."""

    def __init__(self, name: str, stage: RemoteStageView, inputs: Mapping[str, Any], now_s: float) -> None:
        self.name = name
        self.stage = stage
        self.inputs = dict(inputs)
        self.outputs: dict[str, Any] = {}
        self.times = StageTimes()
        self.wait_us, self.service_us = Histogram(STAGE_BOUNDS_US), Histogram(STAGE_BOUNDS_US)
        self.num_restarts = self.num_dropped = 0
        self.is_busy = False
        self.last_progress_s = self.busy_since_s = now_s
        self.blocked_on: Any = None
        self.blocked_since_s = 0.0
        self.unwanted_ports: set[str] = set()
        self.faults: Faults | None = None

    def update(self, status: StageStatus, channels: Mapping[str, Any]) -> None:
        self.stage.status = status
        self.times = StageTimes(status.idle, status.busy, status.blocked)
        _fill(self.wait_us, status.wait_us)
        _fill(self.service_us, status.service_us)
        self.num_restarts, self.num_dropped, self.is_busy = status.num_restarts, status.num_dropped, status.is_busy
        self.last_progress_s, self.busy_since_s = status.last_progress_s, status.busy_since_s
        self.blocked_on = None if status.blocked_on is None else channels.get(status.blocked_on)
        self.blocked_since_s = status.blocked_since_s
        self.unwanted_ports = set(status.unwanted_ports)

    def request_ended(self, request_id: str, cause: str) -> None:
        """Does nothing: the engine process learns of ended requests from `RequestsEnded`."""


def _fill(histogram: Histogram, counts: Sequence[int]) -> None:
    *histogram.counts, histogram.total = counts


@dataclass(slots=True, eq=False)
class SequenceView:
    """The view of a sequence of the scheduler."""

    sequence_id: int
    request_id: str
    state: State
    slot: int
    num_prompt: int
    limit: int
    num_preempted: int
    is_parked: bool


@dataclass(eq=False)
class SlotTableView:
    """The view of the slot table."""

    num_generated: Any  # [S]
    sequences: list[SequenceView | None]

    def running(self) -> Any:
        return np.array([slot for slot, one in enumerate(self.sequences) if one is not None], np.intp)


@dataclass(eq=False)
class SpeculationView:
    """The counters of speculative decoding."""

    num_tokens: int
    num_drafting: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_at: Sequence[int] = ()


@dataclass(eq=False)
class LimitsView:
    max_num_seqs: int


class AdapterSlotsView(AdapterSlots):
    """The view of the device slots of adapters."""

    def update(self, status: AdapterSlotsStatus) -> None:
        self.num_loads = status.num_loads
        missing = [EMPTY_SLOT] * (len(self.slots) - len(status.slots))  # of engine processes that are being started
        for slot, (state, digest, num_running) in zip(self.slots, [*status.slots, *missing], strict=True):
            slot.state, slot.digest, slot.num_running = AdapterState(state), digest, num_running
        self._by_digest = {slot.digest: slot for slot in self.slots if slot.state is not AdapterState.EMPTY}


class AdapterLinesView:
    """The view of the sequences that wait for the device slot of their adapter."""

    def __init__(self, num_slots: int) -> None:
        self.slots = AdapterSlotsView(num_slots)
        self.num_owed = 0
        self._waiting: Mapping[str, int] = {}

    def update(self, status: AdapterSlotsStatus) -> None:
        self.slots.update(status)
        self.num_owed, self._waiting = status.num_owed, status.waiting

    def __len__(self) -> int:
        return sum(self._waiting.values())

    def num_waiting(self, digest: str) -> int:
        return self._waiting.get(digest, 0)

    def digests(self) -> list[str]:
        return list(self._waiting)


class SchedulerView:
    """The view of the scheduler's state."""

    num_running = num_waiting = num_swapped = num_parked = num_recomputed_tokens = num_preemptions = 0
    admission_blocked_reason = ""
    last_granted = completed_step = -1

    def __init__(self, config: EngineConfig, request_id: Callable[[int], str | None], num_drafts: int) -> None:
        self.limits = LimitsView(config.max_num_seqs)
        self.step_token_budget = config.max_num_batched_tokens or 0
        self.preemptions: Counter[tuple[str, str]] = Counter()
        self.speculation = SpeculationView(config.num_speculative_tokens if num_drafts else 0)
        self.speculation.num_accepted_at = [0] * self.speculation.num_tokens
        self.adapters = AdapterLinesView(config.max_loras) if config.enable_lora else None
        self._request_id = request_id
        self._columns: Sequence[Any] = ()
        self._num_generated = np.zeros(config.max_num_seqs, np.intp)

    def update(self, status: CoreStatus) -> None:
        for name, value in status.figures.items():
            setattr(self, name, value)
        self.preemptions, self.speculation = Counter(status.preemptions), SpeculationView(**status.drafts)
        self._columns, self._num_generated = status.sequences, status.num_generated
        if self.adapters is not None and status.adapters is not None:
            self.adapters.update(status.adapters)
        for name in ("sequences", "slots"):
            self.__dict__.pop(name, None)

    @cached_property
    def sequences(self) -> dict[int, SequenceView]:
        """All live sequences, by id. Built on first access after an update."""
        rows = zip(*(column.tolist() for column in self._columns), strict=True)
        return {one: SequenceView(one, self._request_id(one) or "", STATES[state], *rest) for one, state, *rest in rows}

    @cached_property
    def slots(self) -> SlotTableView:
        holders: list[SequenceView | None] = [None] * len(self._num_generated)
        for one in self.sequences.values():
            if one.state is State.RUNNING:
                holders[one.slot] = one
        return SlotTableView(self._num_generated, holders)


class PoolView:
    """The view of a block pool, of the device or the host."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_blocks = self.num_free = num_blocks
        self.num_in_use = self.num_shared = self.num_cached = self.num_quarantined = 0
        self.state = np.zeros(num_blocks, np.int8)  # [N] at the last request with blocks, as `num_tables`
        self.num_tables = np.zeros(num_blocks, np.int32)

    def update(self, status: PoolStatus, blocks: BlockStatus | None) -> None:
        self.num_blocks, self.num_free, self.num_in_use = status.num_blocks, status.num_free, status.num_in_use
        self.num_shared, self.num_cached = status.num_shared, status.num_cached
        self.num_quarantined = status.num_quarantined
        if blocks is not None:
            self.state, self.num_tables = blocks.state, blocks.num_tables


class TablesView:
    """The view of the block tables."""

    def __init__(self, num_slots: int) -> None:
        self.num_blocks = np.zeros(num_slots, np.int32)  # [S]
        self.blocks = np.zeros((num_slots, 0), np.int32)  # [S, M] at the last request with blocks
        self.waste = 0.0

    def update(self, status: CoreStatus) -> None:
        self.num_blocks, self.waste = status.num_held, status.waste
        counts = status.num_held
        if status.blocks is not None:
            self.blocks = np.zeros((len(counts), int(counts.max(initial=0))), np.int32)
            self.blocks[np.arange(self.blocks.shape[1]) < counts[:, None]] = status.blocks.table_blocks
        elif (widest := int(counts.max(initial=0))) > self.blocks.shape[1]:
            self.blocks = np.pad(self.blocks, ((0, 0), (0, widest - self.blocks.shape[1])))


@dataclass(eq=False)
class CacheView:
    """The counters of the prefix cache, in tokens."""

    num_queries: int = 0
    num_hits: int = 0
    num_host_hits: int = 0


@dataclass(eq=False)
class HostView:
    """The view of the host tier."""

    pool: PoolView
    num_full: int = 0
    num_dear: int = 0


@dataclass(eq=False)
class RemoteCoreView:
    """All views of the engine process. Call `update` with each `CoreStatus`."""

    config: EngineConfig
    info: ModelInfo
    runners: Mapping[str, RemoteRunnerView]
    channels: Mapping[str, Any]  # of the whole pipeline, by name
    request_id: Callable[[int], str | None]
    cache: CacheView | None = field(init=False)
    host: HostView | None = field(init=False)

    def __post_init__(self) -> None:
        info = self.info
        has_drafts = self.config.speculation != "off"
        self.scheduler = SchedulerView(self.config, self.request_id, has_drafts)
        self.pool = PoolView(info.num_blocks, info.block_size)
        self.tables = TablesView(self.config.max_num_seqs)
        self.host = HostView(PoolView(info.num_host_blocks, info.block_size)) if info.num_host_blocks else None
        self.cache = CacheView() if self.config.enable_prefix_caching else None
        self.step_tokens = Histogram(STEP_TOKENS)
        self.idle_gaps_us: Histogram | None = None  # None until the engine process reports them

    def update(self, status: CoreStatus) -> None:
        for stage in status.stages:
            self.runners[stage.name].update(stage, self.channels)
        for edge in status.edges:
            channel = self.channels.get(edge.name)  # None: this process sees it by itself
            if isinstance(channel, RemoteChannelView):
                channel.update(edge)
        self.scheduler.update(status)
        self.tables.update(status)
        self.pool.update(status.pool, status.blocks)
        if self.host is not None and status.host_pool is not None:
            self.host.pool.update(status.host_pool, None)
            self.host.num_full, self.host.num_dear = status.swaps_refused
        if self.cache is not None and status.prefixes is not None:
            self.cache.num_queries, self.cache.num_hits, self.cache.num_host_hits = status.prefixes
        _fill(self.step_tokens, status.step_tokens)
        if status.idle_gaps is not None:
            self.idle_gaps_us = self.idle_gaps_us or Histogram(BOUNDS_US)
            _fill(self.idle_gaps_us, status.idle_gaps)

"""The status of several engine processes as that of one, for observers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from ...runtime.channel import ChannelStats
from ...runtime.pipeline_status import ChannelStatus, HistogramStatus, StageStatus
from ..engine.engine_status import (
    AdapterSlotsStatus,
    BlockStatus,
    CacheStatus,
    CoreReport,
    CoreStatus,
    DraftStatus,
    HostStatus,
    KindStatus,
    PoolStatus,
    PrefixStatus,
    SchedulerStatus,
    SequencesStatus,
    SlabStatus,
)
from ..messages import Ints

EMPTY_SLOT = ("empty", "", 0)  # as in `AdapterSlotsStatus.slots`
HIGHEST = ("step_token_budget", "last_granted", "completed_step")
COUNTED = ("num_recomputed_tokens", "num_preemptions")  # also of processes that have died
PRESENT = ("num_running", "num_waiting", "num_swapped", "num_parked")
COUNTED_DRAFTS = ("num_drafting", "num_drafts", "num_draft_tokens", "num_accepted_tokens")

StatusT = TypeVar("StatusT")


def merged(
    reports: Mapping[int, CoreReport], ended: Sequence[CoreReport], num_slots: int, num_cores: int = 1
) -> CoreReport:
    """The report of the processes with these indices, at least one of `num_cores`, together.

    Each process has `num_slots` slots of its own, and blocks behind those of the processes before it. `ended` are the
    `remains` of processes that have died: their counts are added, so that no counter falls.
    """
    present = list(reports.values())
    every = [*present, *ended]
    cores = {index: report.core for index, report in reports.items()}
    all_cores = [report.core for report in every]
    gaps = [core.idle_gaps_us for core in all_cores if core.idle_gaps_us is not None]
    return CoreReport(
        core=CoreStatus(
            scheduler=_scheduler(cores, [report.core.scheduler for report in ended], num_slots, num_cores),
            cache=_cache(cores, [report.core.cache for report in ended], num_slots),
            step_tokens=_histogram([core.step_tokens for core in all_cores]),
            idle_gaps_us=_histogram(gaps) if gaps else None,
            sequences=_sequences(cores, num_slots),
        ),
        stages=[_stage(named, len(present)) for named in _by_name(report.stages for report in every)],
        channels=[_channel(named) for named in _by_name(report.channels for report in every)],
    )


def remains(report: CoreReport) -> CoreReport:
    """What stays of a process that has died: its counts, without what it held."""
    core = report.core
    scheduler, cache, adapters = core.scheduler, core.cache, core.scheduler.adapters
    nothing = np.zeros(0, np.int32)
    return CoreReport(
        core=replace(
            core,
            scheduler=replace(
                scheduler,
                drafts=replace(scheduler.drafts, num_drafting=0),
                adapters=None if adapters is None else AdapterSlotsStatus((), adapters.num_loads, {}, 0),
            ),
            cache=replace(
                cache,
                pool=_nothing(cache.pool),
                host=None if cache.host is None else replace(cache.host, pool=_nothing(cache.host.pool)),
                num_held=nothing,
                waste=0.0,
                blocks=None,
            ),
            sequences=None,
        ),
        stages=[replace(one, is_busy=False, has_work=False) for one in report.stages],
        channels=[
            replace(one, stats=replace(one.stats, depth=0), num_waiting=0, waiting_since=math.inf)
            for one in report.channels
        ],
    )


def _nothing(pool: PoolStatus) -> PoolStatus:
    return PoolStatus(*(0 for _ in fields(pool)))


def _by_name(lists: Iterable[Sequence[Any]]) -> list[list[Any]]:
    """The statuses of one name, from all processes."""
    named: dict[str, list[Any]] = {}
    for some in lists:
        for status in some:
            named.setdefault(status.name, []).append(status)
    return list(named.values())


@cache
def _values_of(kind: type[Any]) -> attrgetter[tuple[Any, ...]]:
    """Reads all fields of a status. `fields` takes longer than the sums."""
    return attrgetter(*(field.name for field in fields(kind)))


def _sum(kind: type[StatusT], rows: Sequence[StatusT]) -> StatusT:
    values = _values_of(kind)  # type: ignore[arg-type]
    return kind(*(sum(column) for column in zip(*map(values, rows), strict=True)))


def _sum_rows(rows: Iterable[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)]


def _histogram(some: Sequence[HistogramStatus]) -> HistogramStatus:
    counts = _sum_rows(one.counts for one in some)
    return HistogramStatus(some[0].bounds, counts, sum(one.total for one in some))


def _stage(statuses: Sequence[StageStatus], num_present: int) -> StageStatus:
    """One stage: its counts in all processes, and the state of the one that has made progress last."""
    present = statuses[:num_present]
    last = max(present, key=lambda status: status.last_progress_s)
    return replace(
        last,
        idle=sum(status.idle for status in statuses),
        busy=sum(status.busy for status in statuses),
        blocked=sum(status.blocked for status in statuses),
        num_restarts=sum(status.num_restarts for status in statuses),
        num_dropped=sum(status.num_dropped for status in statuses),
        wait_us=_histogram([status.wait_us for status in statuses]),
        service_us=_histogram([status.service_us for status in statuses]),
    )


def _channel(statuses: Sequence[ChannelStatus]) -> ChannelStatus:
    stats = _sum(ChannelStats, [status.stats for status in statuses])
    return ChannelStatus(
        statuses[0].name,
        replace(stats, high_water=max(status.stats.high_water for status in statuses)),
        sum(status.num_waiting for status in statuses),
        min((status.waiting_since for status in statuses if status.stats.depth), default=math.inf),
    )


def _scheduler(
    cores: Mapping[int, CoreStatus], ended: Sequence[SchedulerStatus], num_slots: int, num_cores: int
) -> SchedulerStatus:
    """Sums; of numbers of steps the highest; the first reason why a request waits."""
    by_core = {index: core.scheduler for index, core in cores.items()}
    present = list(by_core.values())
    every = [*present, *ended]
    figures: dict[str, Any] = {name: max(getattr(one, name) for one in present) for name in HIGHEST}
    figures |= {name: sum(getattr(one, name) for one in present) for name in PRESENT}
    figures |= {name: sum(getattr(one, name) for one in every) for name in COUNTED}
    drafts = [one.drafts for one in every]
    counted = {name: sum(getattr(one, name) for one in drafts) for name in COUNTED_DRAFTS}
    return SchedulerStatus(
        **figures,
        admission_blocked_reason=next(filter(None, (one.admission_blocked_reason for one in present)), ""),
        max_num_seqs=num_cores * num_slots,
        preemptions=dict(sum((Counter(one.preemptions) for one in every), Counter())),
        drafts=DraftStatus(
            drafts[0].num_tokens, **counted, num_accepted_at=_sum_rows(one.num_accepted_at for one in drafts)
        ),
        adapters=_adapters({index: one.adapters for index, one in by_core.items()}, ended, num_cores),
    )


def _cache(cores: Mapping[int, CoreStatus], ended: Sequence[CacheStatus], num_slots: int) -> CacheStatus:
    by_core = {index: core.cache for index, core in cores.items()}
    present = list(by_core.values())
    every = [*present, *ended]
    in_use = sum(one.pool.num_in_use for one in present)
    hosts = [one.host for one in every if one.host is not None]
    prefixes = [one.prefixes for one in every if one.prefixes is not None]
    pools = [one.host.pool for one in present if one.host is not None]
    refused = (sum(one.num_full for one in hosts), sum(one.num_dear for one in hosts))
    return CacheStatus(
        pool=_sum(PoolStatus, [one.pool for one in present]),
        host=HostStatus(_sum(PoolStatus, pools), *refused) if pools else None,
        prefixes=_sum(PrefixStatus, prefixes) if present[0].prefixes is not None else None,
        num_held=_by_slot({index: one.num_held for index, one in by_core.items()}, num_slots),
        waste=sum(one.waste * one.pool.num_in_use for one in present) / in_use if in_use else 0.0,
        blocks=_blocks({index: one.blocks for index, one in by_core.items()}, num_slots),
        kinds=_kinds(present),
        num_slabs=sum(one.num_slabs for one in present),
    )


def _sequences(cores: Mapping[int, CoreStatus], num_slots: int) -> SequencesStatus | None:
    parts = []
    for index, core in cores.items():
        if (some := core.sequences) is not None:
            slots = np.where(some.slots >= 0, some.slots + index * num_slots, some.slots).astype(np.int32)
            parts.append(replace(some, slots=slots))
    if not parts:
        return None
    columns = zip(*map(_values_of(SequencesStatus), parts), strict=True)
    return SequencesStatus(*map(np.concatenate, columns))


def _by_slot(columns: Mapping[int, Ints], num_slots: int) -> Ints:
    """A column with a row for each slot of all processes up to the last of these."""
    found = np.zeros((max(columns) + 1) * num_slots, np.int32)
    for index, column in columns.items():
        found[index * num_slots :][: len(column)] = column
    return found


def _blocks(by_core: Mapping[int, BlockStatus | None], num_slots: int) -> BlockStatus | None:
    """The blocks of all processes; None unless all have told theirs."""
    known = {index: blocks for index, blocks in by_core.items() if blocks is not None}
    if len(known) < len(by_core):
        return None
    some = list(known.values())
    starts = np.cumsum([0, *(len(one.state) for one in some)]).tolist()
    tables = [one.table_blocks + start for one, start in zip(some, starts, strict=False)]
    return BlockStatus(
        np.concatenate([one.state for one in some]),
        np.concatenate([one.num_tables for one in some]),
        _by_slot({index: one.num_held for index, one in known.items()}, num_slots),
        np.concatenate(tables).astype(np.int32),
        _slabs([one.slabs for one in some if one.slabs is not None]),
    )


def _slabs(parts: Sequence[SlabStatus]) -> SlabStatus | None:
    return replace(parts[0], kind_of=np.concatenate([one.kind_of for one in parts])) if parts else None


def _kinds(present: Sequence[CacheStatus]) -> tuple[KindStatus, ...]:
    """The kinds of memory of all processes, which have the same."""
    by_kind = zip(*(one.kinds for one in present), strict=True)
    return tuple(
        KindStatus(some[0].name, _sum(PoolStatus, [one.pool for one in some]), sum(one.num_slabs for one in some))
        for some in by_kind
    )


def _adapters(
    present: Mapping[int, AdapterSlotsStatus | None], ended: Sequence[SchedulerStatus], num_cores: int
) -> AdapterSlotsStatus | None:
    """The device slots of all processes, each with its own behind those before it; those of a missing one are empty."""
    by_core = {index: status for index, status in present.items() if status is not None}
    if not by_core:
        return None
    every = [*by_core.values(), *(one.adapters for one in ended if one.adapters is not None)]
    missing = [EMPTY_SLOT] * len(next(iter(by_core.values())).slots)
    indices = range(max(num_cores, max(by_core) + 1))
    told = [by_core[index].slots if index in by_core else missing for index in indices]
    waiting: Counter[str] = Counter()
    for status in every:
        waiting.update(status.waiting)
    return AdapterSlotsStatus(
        slots=[slot for slots in told for slot in slots],
        num_loads=sum(status.num_loads for status in every),
        waiting=dict(waiting),
        num_owed=sum(status.num_owed for status in every),
    )

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
from ..messages import Ints
from ..split.protocol import AdapterSlotsStatus, BlockStatus, CoreStatus, EdgeStatus, PoolStatus, StageStatus
from ..split.remote_views import EMPTY_SLOT

SLOT_COLUMN = 2  # of `CoreStatus.sequences`
COUNTED_FIGURES = ("num_recomputed_tokens", "num_preemptions")
HIGHEST = ("step_token_budget", "last_granted", "completed_step")
COUNTED_DRAFTS = ("num_drafting", "num_drafts", "num_draft_tokens", "num_accepted_tokens")

StatusT = TypeVar("StatusT")


def merged(statuses: Mapping[int, CoreStatus], ended: Sequence[CoreStatus], num_slots: int) -> CoreStatus:
    """The status of the processes with these indices, at least one, together.

    Each process has `num_slots` slots of its own, and blocks behind those of the processes before it. `ended` are the
    `remains` of processes that have died: their counts are added, so that no counter falls.
    """
    present = list(statuses.values())
    every = [*present, *ended]
    first = present[0]
    in_use = sum(status.pool.num_in_use for status in present)
    waste = sum(status.waste * status.pool.num_in_use for status in present) / in_use if in_use else 0.0
    host_pools = [status.host_pool for status in present if status.host_pool is not None]
    refused, prefixes = (_sum_rows(status.swaps_refused for status in every), [one.prefixes for one in every])
    gaps = [status.idle_gaps for status in every if status.idle_gaps is not None]
    return CoreStatus(
        stages=[_stage(named, len(present)) for named in _by_name(status.stages for status in every)],
        edges=[_edge(named) for named in _by_name(status.edges for status in every)],
        figures=_figures(present, ended),
        preemptions=dict(sum((Counter(status.preemptions) for status in every), Counter())),
        drafts=_drafts(every),
        sequences=_sequences(statuses, num_slots),
        num_generated=_by_slot(statuses, num_slots, lambda status: status.num_generated),
        num_held=_by_slot(statuses, num_slots, lambda status: status.num_held),
        waste=waste,
        pool=_sum(PoolStatus, [status.pool for status in present]),
        host_pool=_sum(PoolStatus, host_pools) if host_pools else None,
        swaps_refused=tuple(refused),  # type: ignore[arg-type]
        prefixes=None if first.prefixes is None else tuple(_sum_rows(filter(None, prefixes))),  # type: ignore[arg-type]
        step_tokens=_sum_rows(status.step_tokens for status in every),
        idle_gaps=_sum_rows(gaps) if gaps else None,
        blocks=_blocks(present),
        adapters=_adapters(statuses, ended),
    )


def remains(status: CoreStatus) -> CoreStatus:
    """What stays of a process that has died: its counts, without what it held."""
    nothing = np.zeros(0, np.intp)
    adapters = status.adapters
    return replace(
        status,
        stages=[replace(one, is_busy=False, has_work=False) for one in status.stages],
        edges=[
            replace(one, stats=replace(one.stats, depth=0), num_waiting=0, waiting_since=math.inf)
            for one in status.edges
        ],
        sequences=[column[:0] for column in status.sequences],
        drafts=dict(status.drafts) | {"num_drafting": 0},
        num_generated=nothing,
        num_held=nothing.astype(np.int32),
        waste=0.0,
        pool=_nothing(status.pool),
        host_pool=None if status.host_pool is None else _nothing(status.host_pool),
        blocks=None,
        adapters=None if adapters is None else AdapterSlotsStatus((), adapters.num_loads, {}, 0),
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
        wait_us=_sum_rows(status.wait_us for status in statuses),
        service_us=_sum_rows(status.service_us for status in statuses),
    )


def _edge(statuses: Sequence[EdgeStatus]) -> EdgeStatus:
    stats = _sum(ChannelStats, [status.stats for status in statuses])
    return EdgeStatus(
        statuses[0].name,
        replace(stats, high_water=max(status.stats.high_water for status in statuses)),
        sum(status.num_waiting for status in statuses),
        min((status.waiting_since for status in statuses if status.stats.depth), default=math.inf),
    )


def _figures(present: Sequence[CoreStatus], ended: Sequence[CoreStatus]) -> dict[str, Any]:
    """The scheduler's figures: sums; of numbers of steps the highest; the first reason why a request waits."""
    found: dict[str, Any] = {}
    for name in present[0].figures:
        some = [status.figures[name] for status in (*present, *(ended if name in COUNTED_FIGURES else ()))]
        if isinstance(some[0], str):
            found[name] = next(filter(None, some), "")
        else:
            found[name] = max(some) if name in HIGHEST else sum(some)
    return found


def _drafts(every: Sequence[CoreStatus]) -> dict[str, Any]:
    drafts = [status.drafts for status in every]
    counted = {name: sum(one[name] for one in drafts) for name in COUNTED_DRAFTS}
    return dict(drafts[0]) | counted | {"num_accepted_at": _sum_rows(one["num_accepted_at"] for one in drafts)}


def _sequences(statuses: Mapping[int, CoreStatus], num_slots: int) -> list[Any]:
    parts = []
    for index, status in statuses.items():
        columns = list(status.sequences)
        slots = columns[SLOT_COLUMN]
        columns[SLOT_COLUMN] = np.where(slots >= 0, slots + index * num_slots, slots).astype(slots.dtype)
        parts.append(columns)
    return [np.concatenate(columns) for columns in zip(*parts, strict=True)]


def _by_slot(statuses: Mapping[int, CoreStatus], num_slots: int, column: Any) -> Any:
    """A column with a row for each slot of all processes up to the last of these."""
    first = column(next(iter(statuses.values())))
    found = np.zeros((max(statuses) + 1) * num_slots, first.dtype)
    for index, status in statuses.items():
        found[index * num_slots :][: len(column(status))] = column(status)
    return found


def _blocks(present: Sequence[CoreStatus]) -> BlockStatus | None:
    """The blocks of all processes; None unless all have told theirs."""
    blocks = [status.blocks for status in present]
    if any(one is None for one in blocks):
        return None
    known = [one for one in blocks if one is not None]
    starts = np.cumsum([0, *(len(one.state) for one in known)]).tolist()
    tables: list[Ints] = [one.table_blocks + start for one, start in zip(known, starts, strict=False)]
    return BlockStatus(
        np.concatenate([one.state for one in known]),
        np.concatenate([one.num_tables for one in known]),
        np.concatenate(tables).astype(np.int32),
    )


def _adapters(statuses: Mapping[int, CoreStatus], ended: Sequence[CoreStatus]) -> AdapterSlotsStatus | None:
    """The device slots of all processes, each with its own behind those before it; those of a missing one are empty."""
    by_core = {index: status.adapters for index, status in statuses.items() if status.adapters is not None}
    if not by_core:
        return None
    every = [*by_core.values(), *(status.adapters for status in ended if status.adapters is not None)]
    num_each = len(next(iter(by_core.values())).slots)
    missing = [EMPTY_SLOT] * num_each
    told = [by_core[index].slots if index in by_core else missing for index in range(max(by_core) + 1)]
    waiting: Counter[str] = Counter()
    for status in every:
        waiting.update(status.waiting)
    return AdapterSlotsStatus(
        slots=[slot for slots in told for slot in slots],
        num_loads=sum(status.num_loads for status in every),
        waiting=dict(waiting),
        num_owed=sum(status.num_owed for status in every),
    )

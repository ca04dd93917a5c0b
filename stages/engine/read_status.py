"""Reads the status of a step loop that runs in this process. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...runtime.pipeline_status import HistogramStatus
from ..schedule.sequence import State
from .engine_status import (
    STATES,
    AdapterSlotsStatus,
    BlockStatus,
    CacheStatus,
    CoreStatus,
    DraftStatus,
    HostStatus,
    KindStatus,
    PoolStatus,
    PrefixStatus,
    SchedulerStatus,
    SequencesStatus,
)
from .slab_cells import read_slab_cells

if TYPE_CHECKING:
    from ..allocate.allocator import Allocator
    from ..allocate.tiers.block_pool import BlockPool
    from ..schedule.adapter_lines import AdapterLines
    from ..schedule.scheduler import Scheduler
    from .wiring import CoreStages


def read_core(core: CoreStages, *, with_sequences: bool = False, with_blocks: bool = False) -> CoreStatus:
    """The current status. The sequences take about a microsecond each, the blocks a copy of their states."""
    gaps = core.execute.device.idle_gaps_us
    return CoreStatus(
        scheduler=read_scheduler(core.schedule.scheduler),
        cache=read_cache(core.allocate.allocator, with_blocks=with_blocks),
        step_tokens=HistogramStatus.of(core.allocate.step_tokens),
        idle_gaps_us=None if gaps is None else HistogramStatus.of(gaps),
        sequences=_sequences(core.schedule.scheduler) if with_sequences else None,
    )


def read_scheduler(scheduler: Scheduler) -> SchedulerStatus:
    drafts = scheduler.speculation
    return SchedulerStatus(
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_swapped=scheduler.num_swapped,
        num_parked=scheduler.num_parked,
        num_recomputed_tokens=scheduler.num_recomputed_tokens,
        num_preemptions=scheduler.num_preemptions,
        admission_blocked_reason=scheduler.admission_blocked_reason,
        step_token_budget=scheduler.step_token_budget,
        last_granted=scheduler.last_granted,
        completed_step=scheduler.completed_step,
        max_num_seqs=scheduler.limits.max_num_seqs,
        preemptions=dict(scheduler.preemptions),
        drafts=DraftStatus(
            drafts.num_tokens,
            drafts.num_drafting,
            drafts.num_drafts,
            drafts.num_draft_tokens,
            drafts.num_accepted_tokens,
            tuple(drafts.num_accepted_at),
        ),
        adapters=None if scheduler.adapters is None else _adapters(scheduler.adapters),
    )


def read_cache(allocator: Allocator, *, with_blocks: bool = False) -> CacheStatus:
    tables, cache, host = allocator.tables, allocator.cache, allocator.host
    return CacheStatus(
        pool=_pool(allocator.pool),
        host=None if host is None else HostStatus(_pool(host.with_memory[0]), host.num_full, host.num_dear),
        prefixes=None if cache is None else PrefixStatus(cache.num_queries, cache.num_hits, cache.num_host_hits),
        num_held=np.array(tables.num_held, np.int32),
        waste=float(tables.waste),
        blocks=read_blocks(allocator) if with_blocks else None,
        kinds=_kinds(allocator),
        num_slabs=0 if allocator.layout is None or len(allocator.kinds) == 1 else allocator.layout.num_slabs,
    )


def read_blocks(allocator: Allocator) -> BlockStatus:
    tables, pool = allocator.tables, allocator.pool
    if len(allocator.kinds) > 1:
        return read_slab_cells(allocator)
    num_held = np.array(tables.num_held, np.int32)
    held = [tables.held_by(slot) for slot in np.flatnonzero(num_held).tolist()]
    table_blocks = np.concatenate(held) if held else np.zeros(0, np.int32)
    return BlockStatus(pool.state.copy(), pool.num_tables.copy(), num_held, table_blocks)


def read_owners(scheduler: Scheduler) -> Mapping[int, str]:
    """slot -> id of the request in it."""
    slots = scheduler.slots
    found = ((slot, slots.sequences[slot]) for slot in slots.running().tolist())
    return {slot: sequence.request_id for slot, sequence in found if sequence is not None}


def owners_of(sequences: SequencesStatus, request_id: Callable[[int], str | None]) -> Mapping[int, str]:
    """As `read_owners`, of sequences in another process, by the requests of their ids."""
    rows = np.flatnonzero(sequences.states == STATES.index(State.RUNNING))
    pairs = zip(sequences.slots[rows].tolist(), sequences.ids[rows].tolist(), strict=True)
    return {slot: request_id(number) or "" for slot, number in pairs}


def _pool(pool: BlockPool) -> PoolStatus:
    counts = (pool.num_free, pool.num_in_use, pool.num_shared, pool.num_cached, pool.num_quarantined)
    return PoolStatus(pool.num_blocks, *counts)


def _kinds(allocator: Allocator) -> tuple[KindStatus, ...]:
    layout = allocator.layout
    if layout is None or len(layout.kinds) == 1:
        return ()
    sizes = zip(layout.kinds, allocator.kinds, layout.blocks_per_slab, strict=True)
    return tuple(
        KindStatus(kind.name, _pool(each.pool), (each.pool.num_blocks - each.pool.num_absent) // size)
        for kind, each, size in sizes
    )


def _adapters(lines: AdapterLines) -> AdapterSlotsStatus:
    return AdapterSlotsStatus(
        slots=[(slot.state.value, slot.digest, slot.num_running) for slot in lines.slots.slots],
        num_loads=lines.slots.num_loads,
        waiting=Counter(sequence.adapter for sequence in lines),
        num_owed=lines.num_owed,
    )


def _sequences(scheduler: Scheduler) -> SequencesStatus:
    known = list(scheduler.sequences.values())
    states = {state: code for code, state in enumerate(STATES)}
    return SequencesStatus(
        ids=np.array([one.sequence_id for one in known], np.int64),
        states=np.array([states[one.state] for one in known], np.int8),
        slots=np.array([one.slot for one in known], np.int32),
        num_prompt=np.array([one.num_prompt for one in known], np.int32),
        limits=np.array([one.limit for one in known], np.int32),
        num_preempted=np.array([one.num_preempted for one in known], np.int32),
        is_parked=np.array([one.is_parked for one in known], np.bool_),
    )

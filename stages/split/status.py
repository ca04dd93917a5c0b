"""Reads the status of the engine process, for observers in the front process.

Changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np

from ...runtime.channel import Channel
from ...runtime.histogram import Histogram
from ...runtime.pipeline import Pipeline
from ...runtime.stage_runner import StageRunner
from ..allocate.block_pool import BlockPool
from ..engine.wiring import CoreStages
from ..schedule.adapter_lines import AdapterLines
from ..schedule.scheduler import Scheduler
from ..schedule.sequence import State
from .protocol import AdapterSlotsStatus, BlockStatus, CoreStatus, EdgeStatus, PoolStatus, StageStatus

STATES = list(State)
FIGURES = (
    "num_running",
    "num_waiting",
    "num_swapped",
    "num_parked",
    "num_recomputed_tokens",
    "num_preemptions",
    "admission_blocked_reason",
    "step_token_budget",
    "last_granted",
    "completed_step",
)
DRAFT_FIGURES = ("num_tokens", "num_drafting", "num_drafts", "num_draft_tokens", "num_accepted_tokens")


def read_status(
    core: CoreStages, pipeline: Pipeline, counted_here: Collection[str], *, with_blocks: bool = False
) -> CoreStatus:
    """The current status.

    `counted_here` names the channels that the front process cannot see by itself.
    """
    scheduler, allocator = core.schedule.scheduler, core.allocate.allocator
    tables, cache, host = allocator.tables, allocator.cache, allocator.host
    num_held = np.asarray(tables.num_blocks, np.int32)
    blocks = None
    if with_blocks:
        held = [tables.blocks[slot, : num_held[slot]] for slot in np.flatnonzero(num_held).tolist()]
        table_blocks = np.concatenate(held) if held else np.zeros(0, np.int32)
        blocks = BlockStatus(allocator.pool.state.copy(), allocator.pool.num_tables.copy(), table_blocks)
    return CoreStatus(
        stages=[_stage(name, runner) for name, runner in pipeline.runners.items()],
        edges=[_edge(channel) for name, channel in pipeline.channels.items() if name in counted_here],
        figures={name: getattr(scheduler, name) for name in FIGURES},
        preemptions=dict(scheduler.preemptions),
        drafts={name: getattr(scheduler.speculation, name) for name in DRAFT_FIGURES}
        | {"num_accepted_at": list(scheduler.speculation.num_accepted_at)},
        sequences=_sequences(scheduler),
        num_generated=scheduler.slots.num_generated.copy(),
        num_held=num_held,
        waste=float(tables.waste),
        pool=_pool(allocator.pool),
        host_pool=None if host is None else _pool(host.pool),
        swaps_refused=(0, 0) if host is None else (host.num_full, host.num_dear),
        prefixes=None if cache is None else (cache.num_queries, cache.num_hits, cache.num_host_hits),
        step_tokens=_counts(core.allocate.step_tokens),
        idle_gaps=None if (gaps := core.execute.device.idle_gaps_us) is None else _counts(gaps),
        blocks=blocks,
        adapters=None if scheduler.adapters is None else _adapters(scheduler.adapters),
    )


def _adapters(lines: AdapterLines) -> AdapterSlotsStatus:
    return AdapterSlotsStatus(
        slots=[(slot.state.value, slot.digest, slot.num_running) for slot in lines.slots.slots],
        num_loads=lines.slots.num_loads,
        waiting=Counter(sequence.adapter for sequence in lines),
        num_owed=lines.num_owed,
    )


def _stage(name: str, runner: StageRunner) -> StageStatus:
    stage, times = runner.stage, runner.times
    return StageStatus(
        name=name,
        idle=times.idle,
        busy=times.busy,
        blocked=times.blocked,
        num_restarts=runner.num_restarts,
        num_dropped=runner.num_dropped,
        is_busy=runner.is_busy,
        last_progress_s=runner.last_progress_s,
        busy_since_s=runner.busy_since_s,
        blocked_on=None if runner.blocked_on is None else runner.blocked_on.name,
        blocked_since_s=runner.blocked_since_s,
        expected_s=float(stage.expected_s),
        waits_for=stage.waits_for,
        has_work=stage.has_work,
        unwanted_ports=tuple(sorted(runner.unwanted_ports)),
        wants=tuple(port for port in runner.inputs if stage.wants(port)),
        wait_us=_counts(runner.wait_us),
        service_us=_counts(runner.service_us),
    )


def _edge(channel: Channel[Any]) -> EdgeStatus:
    return EdgeStatus(channel.name, channel.stats(), channel.num_waiting, channel.waiting_since)


def _counts(histogram: Histogram) -> list[int]:
    return [*histogram.counts, histogram.total]


def _pool(pool: BlockPool) -> PoolStatus:
    counts = (pool.num_free, pool.num_in_use, pool.num_shared, pool.num_cached, pool.num_quarantined)
    return PoolStatus(pool.num_blocks, *counts)


def _sequences(scheduler: Scheduler) -> list[Any]:
    """The columns of `CoreStatus.sequences`."""
    known = list(scheduler.sequences.values())
    states = {state: code for code, state in enumerate(STATES)}
    return [
        np.array([one.sequence_id for one in known], np.int64),
        np.array([states[one.state] for one in known], np.int8),
        np.array([one.slot for one in known], np.int32),
        np.array([one.num_prompt for one in known], np.int32),
        np.array([one.limit for one in known], np.int32),
        np.array([one.num_preempted for one in known], np.int32),
        np.array([one.is_parked for one in known], np.bool_),
    ]

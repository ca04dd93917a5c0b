"""Stall detection: finds stages that do not finish a batch, and edges that do not deliver.

It uses the times of progress that stages and channels record, so a check is exact and nothing runs between checks.
Waiting work is not a stall while any of it makes progress.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..pipeline import Pipeline
from ..pipeline_status import ChannelStatus, PipelineStatus, StageStatus

PATIENCE = 5.0  # a batch may take this many times what its stage expects


@dataclass(frozen=True, slots=True)
class Stall:
    """What blocks the pipeline: a stage, or an edge if `is_edge`."""

    name: str
    is_edge: bool
    waited_s: float  # since its last progress
    num_waiting: int  # items queued before it
    reason: str


def find_stall(pipeline: Pipeline, timeout_s: float, status: PipelineStatus | None = None) -> Stall | None:
    """The stage or edge with work and no progress for `timeout_s`; None if there is none.

    Of several, the one that the others wait for. Time in which the whole loop stood still, as in a suspended process,
    does not count. With a `status` it looks at that one only.
    """
    now = pipeline.env.now()
    if pipeline.watch is not None and now - pipeline.watch.resumed_s < timeout_s:
        return None
    status = pipeline.status() if status is None else status
    for stalls in (_stages, _edges, _keepers):
        found = [stall for stall in stalls(status, now, timeout_s) if stall.waited_s >= timeout_s]
        if found:
            return max(found, key=lambda stall: stall.waited_s)  # the first of equals
    return None


def _stages(status: PipelineStatus, now: float, timeout_s: float) -> Iterator[Stall]:
    """Stages that have had a batch for too long and do not wait for room."""
    for name, stage in status.stages.items():
        if not stage.is_busy or stage.blocked_on is not None:
            continue
        waited_s = now - max(stage.busy_since_s, stage.last_progress_s)
        if waited_s < max(timeout_s, PATIENCE * stage.expected_s):
            continue
        stalled_stage = stage.waits_for or name
        stalled_stage = stalled_stage if stalled_stage in status.stages else name
        reason = f"stage {stalled_stage} has had a batch for {waited_s:.1f} s"
        yield Stall(stalled_stage, False, waited_s, status.num_queued(name), reason)


def _edges(status: PipelineStatus, now: float, timeout_s: float) -> Iterator[Stall]:
    """Edges whose idle receiver does not get wanted items, or whose sender gets no room."""
    for stage in status.stages.values():
        for port, channel in _inputs(status, stage):
            if stage.is_busy or port not in stage.wants:
                continue
            came_s = _came_s(status, channel)
            if came_s is not None:
                had_its_chance = came_s < stage.busy_since_s and port not in stage.unwanted_ports
                yield _edge(channel, now - (came_s if had_its_chance else max(came_s, stage.last_progress_s)))


def _inputs(status: PipelineStatus, stage: StageStatus) -> Iterator[tuple[str, ChannelStatus]]:
    """(port, channel) of a stage's inputs."""
    for port, name in stage.inputs.items():
        if (channel := status.channels.get(name)) is not None:
            yield port, channel


def _came_s(status: PipelineStatus, channel: ChannelStatus) -> float | None:
    """When the first queued item came, or else the first sender began to wait; None if none did.

    An item that did not wake its receiver may stay until something else arrives.
    """
    if channel.stats.depth:
        return channel.waiting_since if channel.waiting_since != math.inf else None
    blocked = (stage.blocked_since_s for stage in status.stages.values() if stage.blocked_on == channel.name)
    return min(blocked, default=None)


def _edge(channel: ChannelStatus, waited_s: float) -> Stall:
    reason = f"edge {channel.name} has not delivered for {waited_s:.1f} s"
    return Stall(channel.name, True, waited_s, channel.stats.depth, reason)


def _keepers(status: PipelineStatus, now: float, timeout_s: float) -> Iterator[Stall]:
    """Stages that hold work while no stage is busy.

    What they wait for is on an edge, or was lost. An item that arrives after a long idle time counts from its arrival.
    """
    stages = status.stages.values()
    if any(stage.is_busy for stage in stages):
        return
    since = max((stage.last_progress_s for stage in stages), default=now)
    for stage in stages:
        for _, channel in _inputs(status, stage):
            if channel.stats.depth:
                came_s = channel.waiting_since if channel.waiting_since != math.inf else since
                yield _edge(channel, now - max(since, came_s))
    for name, stage in status.stages.items():
        if stage.has_work:
            reason = f"stage {name} has work and has made no progress for {now - since:.1f} s"
            yield Stall(name, False, now - since, status.num_queued(name), reason)

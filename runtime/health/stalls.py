"""Stall detection: finds stages that do not finish a batch, and edges that do not deliver.

It uses the times of progress that stages and channels record, so a check is exact and nothing runs between checks.
Waiting work is not a stall while any of it makes progress.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..channel import Channel
from ..pipeline import Pipeline
from ..stage_runner import StageRunner

PATIENCE = 5.0  # a batch may take this many times what its stage expects


@dataclass(frozen=True, slots=True)
class Stall:
    """What blocks the pipeline: a stage, or an edge if `is_edge`."""

    name: str
    is_edge: bool
    waited_s: float  # since its last progress
    num_waiting: int  # items queued before it
    reason: str


def find_stall(pipeline: Pipeline, timeout_s: float) -> Stall | None:
    """The stage or edge with work and no progress for `timeout_s`; None if there is none.

    Of several, the one that the others wait for. Time in which the whole loop stood still, as in a suspended process,
    does not count.
    """
    now = pipeline.env.now()
    if pipeline.watch is not None and now - pipeline.watch.resumed_s < timeout_s:
        return None
    for stalls in (_stages, _edges, _keepers):
        found = [stall for stall in stalls(pipeline, now, timeout_s) if stall.waited_s >= timeout_s]
        if found:
            return max(found, key=lambda stall: stall.waited_s)  # the first of equals
    return None


def _stages(pipeline: Pipeline, now: float, timeout_s: float) -> Iterator[Stall]:
    """Stages that have had a batch for too long and do not wait for room."""
    for name, runner in pipeline.runners.items():
        if not runner.is_busy or runner.blocked_on is not None:
            continue
        waited_s = now - max(runner.busy_since_s, runner.last_progress_s)
        if waited_s < max(timeout_s, PATIENCE * runner.stage.expected_s):
            continue
        stalled_stage = runner.stage.waits_for or name
        stalled_stage = stalled_stage if stalled_stage in pipeline.runners else name
        num_waiting = sum(len(channel) for channel in runner.inputs.values())
        yield Stall(
            stalled_stage, False, waited_s, num_waiting, f"stage {stalled_stage} has had a batch for {waited_s:.1f} s"
        )


def _edges(pipeline: Pipeline, now: float, timeout_s: float) -> Iterator[Stall]:
    """Edges whose idle receiver does not get wanted items, or whose sender gets no room."""
    for runner in pipeline.runners.values():
        for port, channel in runner.inputs.items():
            if runner.is_busy or not runner.stage.wants(port):
                continue
            came_s = _came_s(pipeline, channel)
            if came_s is not None:
                had_its_chance = came_s < runner.busy_since_s and port not in runner.unwanted_ports
                yield _edge(channel, now - (came_s if had_its_chance else max(came_s, runner.last_progress_s)))


def _came_s(pipeline: Pipeline, channel: Channel[object]) -> float | None:
    """When the first queued item came, or else the first sender began to wait; None if none did.

    An item that did not wake its receiver may stay until something else arrives.
    """
    if len(channel):
        return channel.waiting_since if channel.waiting_since != math.inf else None
    return min((sender.blocked_since_s for sender in _senders(pipeline, channel)), default=None)


def _edge(channel: Channel[object], waited_s: float) -> Stall:
    reason = f"edge {channel.name} has not delivered for {waited_s:.1f} s"
    return Stall(channel.name, True, waited_s, len(channel), reason)


def _senders(pipeline: Pipeline, channel: Channel[object]) -> list[StageRunner]:
    return [runner for runner in pipeline.runners.values() if runner.blocked_on is channel]


def _keepers(pipeline: Pipeline, now: float, timeout_s: float) -> Iterator[Stall]:
    """Stages that hold work while no stage is busy.

    What they wait for is on an edge, or was lost. An item that arrives after a long idle time counts from its arrival.
    """
    runners = pipeline.runners.values()
    if any(runner.is_busy for runner in runners):
        return
    since = max((runner.last_progress_s for runner in runners), default=now)
    for runner in runners:
        for channel in runner.inputs.values():
            if len(channel):
                came_s = channel.waiting_since if channel.waiting_since != math.inf else since
                yield _edge(channel, now - max(since, came_s))
    for name, runner in pipeline.runners.items():
        if runner.stage.has_work:
            reason = f"stage {name} has work and has made no progress for {now - since:.1f} s"
            yield Stall(name, False, now - since, sum(map(len, runner.inputs.values())), reason)

"""Finds what does not move although it should: a stage that does not come to its end, an edge that does not deliver.

Judged by progress alone, from moments that stages and channels note in passing, so looking costs nothing in between and
is exact: no sampling, no timer. Work that waits is no stall while anything of it moves. Knows stages and channels;
refuses to know what to do about it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..channel import Channel
from ..pipeline import Pipeline
from ..stage_runner import StageRunner

PATIENCE = 5.0  # a batch may take so many times what its stage expects of it


@dataclass(frozen=True, slots=True)
class Stall:
    """Who holds the others up. `name` is a stage's, or an edge's if `is_edge`."""

    name: str
    is_edge: bool
    waited_s: float  # since it last moved
    num_waiting: int  # items before it
    reason: str


def find_stall(pipeline: Pipeline, timeout_s: float) -> Stall | None:
    """What has not moved for `timeout_s` though there is work for it; None if all is well. Of several the one that the
    others wait for. While the loop stood still, as in a process that was suspended, nothing could move: that time does
    not count."""
    now = pipeline.env.now()
    if pipeline.watch is not None and now - pipeline.watch.resumed_s < timeout_s:
        return None
    for stalls in (_stages, _edges, _keepers):
        found = [stall for stall in stalls(pipeline, now, timeout_s) if stall.waited_s >= timeout_s]
        if found:
            return max(found, key=lambda stall: stall.waited_s)  # of equals the first
    return None


def _stages(pipeline: Pipeline, now: float, timeout_s: float) -> Iterator[Stall]:
    """Stages that have a batch and do not come to its end, and wait for no room."""
    for name, runner in pipeline.runners.items():
        if not runner.is_busy or runner.blocked_on is not None:
            continue
        waited_s = now - max(runner.busy_since_s, runner.last_progress_s)
        if waited_s < max(timeout_s, PATIENCE * runner.stage.expected_s):
            continue
        guilty = runner.stage.waits_for or name
        guilty = guilty if guilty in pipeline.runners else name
        num_waiting = sum(len(channel) for channel in runner.inputs.values())
        yield Stall(guilty, False, waited_s, num_waiting, f"stage {guilty} has had a batch for {waited_s:.1f} s")


def _edges(pipeline: Pipeline, now: float, timeout_s: float) -> Iterator[Stall]:
    """Edges whose receiver is idle, wants what is on them and does not get it; or whose sender gets no room."""
    for runner in pipeline.runners.values():
        for port, channel in runner.inputs.items():
            if runner.is_busy or not runner.stage.wants(port):
                continue
            came_s = _came_s(pipeline, channel)
            if came_s is not None:
                had_its_chance = came_s < runner.busy_since_s and port not in runner.unwanted_ports
                yield _edge(channel, now - (came_s if had_its_chance else max(came_s, runner.last_progress_s)))


def _came_s(pipeline: Pipeline, channel: Channel[object]) -> float | None:
    """When the first that is there came, or the first sender that finds no room; None if nobody is kept waiting. What
    was to wake nobody may lie there for as long as nothing else comes."""
    if len(channel):
        return channel.waiting_since if channel.waiting_since != math.inf else None
    return min((sender.blocked_since_s for sender in _senders(pipeline, channel)), default=None)


def _edge(channel: Channel[object], waited_s: float) -> Stall:
    reason = f"edge {channel.name} has not delivered for {waited_s:.1f} s"
    return Stall(channel.name, True, waited_s, len(channel), reason)


def _senders(pipeline: Pipeline, channel: Channel[object]) -> list[StageRunner]:
    return [runner for runner in pipeline.runners.values() if runner.blocked_on is channel]


def _keepers(pipeline: Pipeline, now: float, timeout_s: float) -> Iterator[Stall]:
    """Stages that keep work which should be moving, while nobody is at work: what they wait for lies on an edge, or was
    lost. What comes from outside after a long rest has waited since it came, not since the rest began."""
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
            reason = f"stage {name} has work and has heard nothing for {now - since:.1f} s"
            yield Stall(name, False, now - since, sum(map(len, runner.inputs.values())), reason)

"""The status of a pipeline: what its stages and channels do and have done, at one point in time.

Plain data that observers read, and that travels between processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from .channel import Channel, ChannelStats
from .graph import Edge
from .histogram import Histogram
from .message import Moment, message
from .stage_runner import StageRunner


@message
class HistogramStatus:
    """One reading of a `Histogram`."""

    bounds: Sequence[int]
    counts: Sequence[int]  # by bucket
    total: int  # sum of all values

    @classmethod
    def of(cls, histogram: Histogram) -> HistogramStatus:
        return cls(histogram.bounds, tuple(histogram.counts), histogram.total)

    @property
    def num_observed(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def cumulative(self) -> list[int]:
        """As `Histogram.cumulative`."""
        return list(accumulate(self.counts))


@message
class StageStatus:
    """The status of one stage."""

    name: str
    idle: float  # seconds so far, as `StageTimes` has them
    busy: float
    blocked: float
    num_restarts: int
    num_dropped: int
    is_busy: bool
    last_progress_s: Moment
    busy_since_s: Moment
    blocked_on: str | None  # channel
    blocked_since_s: Moment
    expected_s: float
    waits_for: str | None
    has_work: bool
    unwanted_ports: Sequence[str]
    wants: Sequence[str]  # ports
    inputs: Mapping[str, str]  # port -> channel
    wait_us: HistogramStatus
    service_us: HistogramStatus


@message
class ChannelStatus:
    """The status of one channel."""

    name: str
    stats: ChannelStats
    num_waiting: int  # senders
    waiting_since: Moment


@message
class PipelineStatus:
    """The status of a pipeline. Stages and edges are in the order of the data flow."""

    stages: Mapping[str, StageStatus]
    channels: Mapping[str, ChannelStatus]
    edges: Sequence[Edge]

    def num_queued(self, stage: str) -> int:
        """Items that wait for a stage."""
        channels = self.stages[stage].inputs.values()
        return sum(self.channels[name].stats.depth for name in channels if name in self.channels)


def read_status(
    runners: Mapping[str, StageRunner], channels: Mapping[str, Channel[Any]], edges: Sequence[Edge]
) -> PipelineStatus:
    """The current status of stages and channels of this process."""
    return PipelineStatus(
        {name: stage_status(runner) for name, runner in runners.items()},
        {name: channel_status(channel) for name, channel in channels.items()},
        tuple(edges),
    )


def stage_status(runner: StageRunner) -> StageStatus:
    stage, times = runner.stage, runner.times
    return StageStatus(
        name=runner.name,
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
        inputs={port: channel.name for port, channel in runner.inputs.items()},
        wait_us=HistogramStatus.of(runner.wait_us),
        service_us=HistogramStatus.of(runner.service_us),
    )


def channel_status(channel: Channel[Any]) -> ChannelStatus:
    return ChannelStatus(channel.name, channel.stats(), channel.num_waiting, channel.waiting_since)

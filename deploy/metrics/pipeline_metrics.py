"""Prometheus metrics of stages and channels.

Labels are the names of stages and edges, fixed at the start.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from ...runtime.pipeline_status import PipelineStatus
from .families import US, add_histogram


def stages(pipeline: PipelineStatus) -> Iterator[Metric]:
    """Yields time by state, restarts, queue depth, waiting time and service time of each stage."""
    seconds = CounterMetricFamily(
        "millrace:stage_seconds", "Time of a stage by state: idle, busy, blocked.", labels=["stage", "state"]
    )
    restarts = CounterMetricFamily("millrace:stage_restarts", "Restarts of a stage after a crash.", labels=["stage"])
    depth = GaugeMetricFamily("millrace:stage_queue_depth", "Items waiting for a stage.", labels=["stage"])
    wait = HistogramMetricFamily(
        "millrace:stage_wait_seconds", "Waiting time of the oldest item of a batch.", labels=["stage"]
    )
    service = HistogramMetricFamily(
        "millrace:stage_service_seconds",
        "Time of a stage on a batch, without waits for channels or for another stage.",
        labels=["stage"],
    )
    for name, stage in pipeline.stages.items():
        for state in ("idle", "busy", "blocked"):
            seconds.add_metric([name, state], getattr(stage, state))
        restarts.add_metric([name], stage.num_restarts)
        depth.add_metric([name], pipeline.num_queued(name))
        add_histogram(wait, [name], stage.wait_us, US)
        add_histogram(service, [name], stage.service_us, US)
    yield from (seconds, restarts, depth, wait, service)


def channels(pipeline: PipelineStatus) -> Iterator[Metric]:
    """Yields depth, high-water mark, capacity, items sent and time full of each channel."""
    depth = GaugeMetricFamily("millrace:channel_depth", "Items in a channel.", labels=["edge"])
    high = GaugeMetricFamily("millrace:channel_high_water", "Most items so far in a channel.", labels=["edge"])
    capacity = GaugeMetricFamily("millrace:channel_capacity", "Capacity of a channel in items.", labels=["edge"])
    sent = CounterMetricFamily("millrace:channel_items", "Items sent over a channel.", labels=["edge"])
    blocked = CounterMetricFamily("millrace:channel_blocked_seconds", "Time a channel was full.", labels=["edge"])
    for name, channel in pipeline.channels.items():
        stats = channel.stats
        depth.add_metric([name], stats.depth)
        high.add_metric([name], stats.high_water)
        capacity.add_metric([name], stats.capacity)
        sent.add_metric([name], stats.num_sent)
        blocked.add_metric([name], stats.seconds_full)
    yield from (depth, high, capacity, sent, blocked)

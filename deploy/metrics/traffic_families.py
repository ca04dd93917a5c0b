"""Metrics of what goes by labels: both sides of a split with errors and times, and copies of a shadow."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric

from ...stages.traffic.traffic_rules import Traffic
from .families import US, add_histogram, gauge

COUNTS = {  # field of `SideCounts` -> its family and help
    "num_requests": ("millrace:split_requests", "Requests that were sent to a side of the split."),
    "num_moved": ("millrace:split_requests_moved", "Requests drawn for the side that only the other one could take."),
    "num_finished": ("millrace:split_requests_finished", "Requests of the side with a whole answer."),
    "num_failed": ("millrace:split_requests_failed", "Requests of the side that ended by an error."),
}


def traffic_families(traffic: Traffic | None) -> Iterator[Metric]:
    """Those of a front with a split or a shadow; none else. `side`: labelled, the engines with the label, or rest."""
    if traffic is not None:
        yield from _split(traffic)
        yield from _shadow(traffic)


def _shadow(traffic: Traffic) -> Iterator[Metric]:
    if (shadow := traffic.rules.shadow) is None:
        return
    yield gauge(
        "millrace:shadow_percent", "Share of requests that are copied.", shadow.percent, {"shadow": shadow.label}
    )
    text = "Copies of requests, by how their answers compare with the real ones, or why they do not."
    family = CounterMetricFamily("millrace:shadow_copies", text, labels=["shadow", "result"])
    for result, count in traffic.copy_results.items():
        family.add_metric([shadow.label, result], count)
    yield family


def _split(traffic: Traffic) -> Iterator[Metric]:
    if (split := traffic.rules.split) is None:
        return
    yield gauge("millrace:split_percent", "Share of requests for the label.", split.percent, {"split": split.label})
    for field, (name, text) in COUNTS.items():
        family = CounterMetricFamily(name, text, labels=["split", "side"])
        for side, counts in traffic.counts.sides.items():
            family.add_metric([split.label, side], getattr(counts, field))
        yield family
    text = "Time from a request's arrival to its first token, by side."
    times = HistogramMetricFamily("millrace:split_time_to_first_token_seconds", text, labels=["split", "side"])
    for side, counts in traffic.counts.sides.items():
        add_histogram(times, [split.label, side], counts.first_token_us, US)
    yield times

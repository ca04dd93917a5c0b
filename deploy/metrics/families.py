"""Builds Prometheus metric families from single values, histograms, and the engine processes of a fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from ...runtime.histogram import Histogram
from ...runtime.pipeline_status import HistogramStatus

US = 1e-6  # unit of histograms that count microseconds and are exported in seconds


def gauge(name: str, text: str, value: float, labels: Mapping[str, str]) -> GaugeMetricFamily:
    """A gauge with one value."""
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counter(name: str, text: str, value: float, labels: Mapping[str, str]) -> CounterMetricFamily:
    """A counter with one value; the exposition appends `_total` to its name."""
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def histogram(
    name: str, text: str, value: Histogram | HistogramStatus, labels: Mapping[str, str], unit: float = 1
) -> HistogramMetricFamily:
    """A histogram; its bounds and its sum are multiplied by `unit`."""
    family = HistogramMetricFamily(name, text, labels=list(labels))
    add_histogram(family, list(labels.values()), value, unit)
    return family


def add_histogram(
    family: HistogramMetricFamily, labels: list[str], value: Histogram | HistogramStatus, unit: float = 1
) -> None:
    """Adds a histogram to `family`; `labels` are the values of its labels."""
    names = [*(str(floatToGoString(round(bound * unit, 9))) for bound in value.bounds), "+Inf"]  # type: ignore[no-untyped-call]
    buckets = list(zip(names, map(float, value.cumulative()), strict=True))
    family.add_metric(labels, buckets, value.total * unit)


def engines(fleet: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """What each engine process of a fleet does; nothing of a single one."""
    if not fleet:
        return
    figures = (
        (GaugeMetricFamily, "millrace:engine_up", "1 if the engine process takes requests.", "state"),
        (GaugeMetricFamily, "millrace:engine_requests", "Requests in the engine process.", "num_requests"),
        (CounterMetricFamily, "millrace:engine_deaths", "Unexpected ends of the engine process.", "num_deaths"),
        (
            CounterMetricFamily,
            "millrace:engine_expected_cached_tokens",
            "Tokens of prompts that the router expected in the prefix cache of the engine process.",
            "num_expected_cached_tokens",
        ),
    )
    for kind, name, text, field in figures:
        family = kind(name, text, labels=["engine"])
        for one in fleet:
            value = one[field] == "ready" if field == "state" else one[field]
            family.add_metric([str(one["index"])], float(value))
        yield family
    yield _engine_labels(fleet)


def label_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The labels of an engine as those of a metric, which has names of its own."""
    return {f"label_{name}": value for name, value in labels.items()}


def _engine_labels(fleet: Sequence[Mapping[str, Any]]) -> Metric:
    """To join with the other families by `engine`. A label that an engine lacks is empty, which means the same."""
    rows = [
        {"engine": str(one["index"]), "address": one["address"] or ""} | label_labels(one["labels"]) for one in fleet
    ]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = "What is said of the engine process, as labels; the value is 1."
    family = GaugeMetricFamily("millrace:engine_labels", text, labels=names)
    for row in rows:
        family.add_metric([row.get(name, "") for name in names], 1.0)
    return family

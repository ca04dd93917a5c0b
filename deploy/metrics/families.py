"""How one number, or one histogram, is put for Prometheus. Knows names and labels; refuses to know what is measured."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from ...runtime.histogram import Histogram

US = 1e-6  # of histograms that count microseconds, and are told in seconds


def gauge(name: str, text: str, value: float, labels: Mapping[str, str]) -> GaugeMetricFamily:
    """One value that goes up and down."""
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def counter(name: str, text: str, value: float, labels: Mapping[str, str]) -> CounterMetricFamily:
    """One value that only goes up; `_total` is put behind its name."""
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def histogram(
    name: str, text: str, value: Histogram, labels: Mapping[str, str], unit: float = 1
) -> HistogramMetricFamily:
    """One histogram; what it counts is told times `unit`."""
    family = HistogramMetricFamily(name, text, labels=list(labels))
    add_histogram(family, list(labels.values()), value, unit)
    return family


def add_histogram(family: HistogramMetricFamily, labels: list[str], value: Histogram, unit: float = 1) -> None:
    """A histogram more, with these labels' values."""
    names = [*(str(floatToGoString(round(bound * unit, 9))) for bound in value.bounds), "+Inf"]  # type: ignore[no-untyped-call]
    buckets = list(zip(names, map(float, value.cumulative()), strict=True))
    family.add_metric(labels, buckets, value.total * unit)

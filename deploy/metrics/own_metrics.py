"""Prometheus metrics that stages of one's own keep: `millrace:stage:STAGE:NAME`, with the stage's labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from ...runtime.stage_metrics import StageGauge, StageHistogram, StageMetrics


def own_metrics(stages: Mapping[str, StageMetrics]) -> Iterator[Metric]:
    """Yields every metric of every stage, those without a value too."""
    for stage, metrics in stages.items():
        for name, family in metrics.families.items():
            full = f"millrace:stage:{stage}:{name}"
            if isinstance(family, StageHistogram):
                yield _distribution(full, family)
                continue
            kind = GaugeMetricFamily if isinstance(family, StageGauge) else CounterMetricFamily
            made = kind(full, family.text, labels=family.labels)
            for labels, value in family.values.items():
                made.add_metric(labels, value)
            yield made


def _distribution(name: str, family: StageHistogram) -> Metric:
    made = HistogramMetricFamily(name, family.text, labels=family.labels)
    names = [*(str(floatToGoString(bound)) for bound in family.bounds), "+Inf"]  # type: ignore[no-untyped-call]
    for labels, total in family.sums.items():
        made.add_metric(labels, list(zip(names, map(float, family.cumulative(labels)), strict=True)), total)
    return made

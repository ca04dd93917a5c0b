"""Metrics of a stage: counters, gauges and histograms with labels, read when they are exported.

    async def setup(self, context):
        self.tokens = context.metrics.counter("tokens", "Tokens by owner.", labels=("owner",))

    self.tokens.add(3, owner="a")

A family has at most `max_series` sets of label values. Further ones count together, with the value "other" for each
label, so that clients cannot make a server remember without bound.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Literal, TypeVar

MAX_SERIES = 200  # sets of label values of a family, unless the stage says otherwise
MAX_LABEL_CHARS = 128  # of a value; longer ones are cut
OTHER = "other"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_SUFFIXES = ("_total", "_bucket", "_sum", "_count", "_created")  # the exposition adds them

Kind = Literal["counter", "gauge", "histogram"]
Labels = tuple[str, ...]


class StageMetric:
    """One metric of a stage, with a series for each set of label values."""

    kind: Kind

    def __init__(self, name: str, text: str, labels: Sequence[str], max_series: int) -> None:
        self.name, self.text, self.labels, self.max_series = name, text, tuple(labels), max_series

    def _key(self, known: object, values: dict[str, object]) -> Labels:
        """The label values of a series, or those of `other` if there is no room for another one."""
        if values.keys() != set(self.labels):
            wanted = ", ".join(self.labels) or "none"
            raise ValueError(f"metric {self.name}: got the labels {', '.join(values) or 'none'}: must be {wanted}")
        key = tuple(str(values[name])[:MAX_LABEL_CHARS] for name in self.labels)
        assert isinstance(known, dict)
        return key if key in known or len(known) < self.max_series else (OTHER,) * len(self.labels)


class StageCounter(StageMetric):
    """A number that only grows."""

    kind = "counter"

    def __init__(self, name: str, text: str, labels: Sequence[str], max_series: int) -> None:
        super().__init__(name, text, labels, max_series)
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def add(self, amount: float = 1, **labels: object) -> None:
        """Adds `amount`, at least 0, to the series of these labels."""
        if amount < 0:
            raise ValueError(f"metric {self.name}: a counter grows, so {amount} must be at least 0; use a gauge")
        key = self._key(self.values, labels)
        self.values[key] = self.values.get(key, 0.0) + amount


class StageGauge(StageMetric):
    """A number that goes up and down."""

    kind = "gauge"

    def __init__(self, name: str, text: str, labels: Sequence[str], max_series: int) -> None:
        super().__init__(name, text, labels, max_series)
        self.values: dict[Labels, float] = {} if labels else {(): 0.0}

    def set(self, value: float, **labels: object) -> None:
        """Sets the series of these labels."""
        self.values[self._key(self.values, labels)] = value

    def add(self, amount: float = 1, **labels: object) -> None:
        """Adds `amount`, which may be below 0."""
        key = self._key(self.values, labels)
        self.values[key] = self.values.get(key, 0.0) + amount

    def remove(self, **labels: object) -> None:
        """Forgets the series of these labels."""
        self.values.pop(self._key(self.values, labels), None)


class StageHistogram(StageMetric):
    """Counts by bucket, and a sum: `bounds` are the upper bounds of the buckets, rising."""

    kind = "histogram"

    def __init__(self, name: str, text: str, labels: Sequence[str], max_series: int, bounds: Sequence[float]) -> None:
        super().__init__(name, text, labels, max_series)
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"metric {name}: bounds {list(bounds)}: must be rising, and at least one")
        self.bounds = tuple(bounds)
        self.counts: dict[Labels, list[int]] = {}
        self.sums: dict[Labels, float] = {}

    def observe(self, value: float, **labels: object) -> None:
        """Counts `value` in the series of these labels."""
        key = self._key(self.counts, labels)
        counts = self.counts.setdefault(key, [0] * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, value)] += 1
        self.sums[key] = self.sums.get(key, 0.0) + value

    def cumulative(self, key: Labels) -> list[int]:
        """For each bound the number of values at most that; last the number of all values."""
        return list(accumulate(self.counts[key]))


MetricT = TypeVar("MetricT", StageCounter, StageGauge, StageHistogram)


class StageMetrics:
    """The metrics of one stage, by name. A name that is asked for again, as after a restart, gives the same metric."""

    def __init__(self) -> None:
        self.families: dict[str, StageCounter | StageGauge | StageHistogram] = {}

    def counter(
        self, name: str, text: str, labels: Sequence[str] = (), *, max_series: int = MAX_SERIES
    ) -> StageCounter:
        """A counter. Its exported name ends in `_total`, which `name` leaves out."""
        return self._kept(StageCounter(name, text, labels, max_series))

    def gauge(self, name: str, text: str, labels: Sequence[str] = (), *, max_series: int = MAX_SERIES) -> StageGauge:
        """A gauge."""
        return self._kept(StageGauge(name, text, labels, max_series))

    def histogram(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        *,
        bounds: Sequence[float] = SECONDS,
        max_series: int = MAX_SERIES,
    ) -> StageHistogram:
        """A histogram. The default bounds are of seconds."""
        return self._kept(StageHistogram(name, text, labels, max_series, bounds))

    def _kept(self, made: MetricT) -> MetricT:
        for name in (made.name, *made.labels):
            if not _NAME.fullmatch(name) or name == "le":
                raise ValueError(f"metric {made.name}: {name!r} must be lower-case letters, digits and _")
        if made.name.endswith(_SUFFIXES):
            raise ValueError(f"metric {made.name}: must not end in {', '.join(_SUFFIXES)}, which the exposition adds")
        if made.max_series < 1:
            raise ValueError(f"metric {made.name}: max_series = {made.max_series}: must be at least 1")
        known = self.families.setdefault(made.name, made)
        if type(known) is not type(made) or known.labels != made.labels:
            labels = ", ".join(known.labels) or "none"
            raise ValueError(f"metric {made.name}: is a {known.kind} with the labels {labels} already")
        return known

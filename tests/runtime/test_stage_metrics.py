"""Metrics that a stage keeps itself."""

from __future__ import annotations

import pytest

from millrace.runtime.stage_metrics import MAX_LABEL_CHARS, StageMetrics


def test_series_are_kept_by_label_values_and_a_name_asked_again_is_the_same_metric() -> None:
    metrics = StageMetrics()
    tokens = metrics.counter("tokens", "Tokens by owner.", labels=("owner", "kind"))
    tokens.add(3, owner="a", kind=1)
    metrics.counter("tokens", "Tokens by owner.", labels=("owner", "kind")).add(owner="a", kind="1")
    assert tokens.values == {("a", "1"): 4.0}
    held = metrics.gauge("held", "Items held.")
    held.add(5)
    held.add(-2)
    assert held.values == {(): 3.0}
    held.set(1)
    assert held.values == {(): 1.0}
    sizes = metrics.histogram("sizes", "Sizes.", labels=("owner",), bounds=(1, 10))
    for size in (1, 2, 11):
        sizes.observe(size, owner="a")
    assert sizes.cumulative(("a",)) == [1, 2, 3] and sizes.sums == {("a",): 14.0}


def test_label_values_beyond_the_bound_count_together_and_long_ones_are_cut() -> None:
    metrics = StageMetrics()
    count = metrics.counter("count", "By user.", labels=("user", "key"), max_series=3)
    for number in range(1000):
        count.add(user=number, key="k" * 1000)
    key = "k" * MAX_LABEL_CHARS
    assert count.values == {("0", key): 1, ("1", key): 1, ("2", key): 1, ("other", "other"): 997}
    gauge = metrics.gauge("gauge", "By user.", labels=("user",), max_series=1)
    gauge.set(1, user="a")
    gauge.remove(user="a")
    gauge.set(2, user="b")
    assert gauge.values == {("b",): 2}


@pytest.mark.parametrize("name", ["Tokens", "tokens_total", "a-b", "", "9", "x" * 65])
def test_a_name_that_would_not_be_exported_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="metric "):
        StageMetrics().counter(name, "")


def test_wrong_labels_kinds_and_amounts_are_refused_with_what_is_right() -> None:
    metrics = StageMetrics()
    count = metrics.counter("count", "", labels=("owner",))
    with pytest.raises(ValueError, match="got the labels user: must be owner"):
        count.add(user="a")
    with pytest.raises(ValueError, match="got the labels none: must be owner"):
        count.add()
    with pytest.raises(ValueError, match="a counter grows, so -1 must be at least 0"):
        count.add(-1, owner="a")
    with pytest.raises(ValueError, match="is a counter with the labels owner already"):
        metrics.gauge("count", "", labels=("owner",))
    with pytest.raises(ValueError, match="is a counter with the labels owner already"):
        metrics.counter("count", "", labels=())
    with pytest.raises(ValueError, match="'le' must be lower-case"):
        metrics.histogram("sizes", "", labels=("le",))
    with pytest.raises(ValueError, match="bounds .*: must be rising"):
        metrics.histogram("sizes", "", bounds=(2, 1))
    with pytest.raises(ValueError, match="max_series = 0: must be at least 1"):
        metrics.counter("more", "", max_series=0)

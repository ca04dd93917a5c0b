"""How many replicas there are to be, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millrace.deploy.ray.scaling import BUSY, WORK, QueuedWorkPolicy
from millrace.stages.routing.scaling import engines_wanted


@pytest.mark.parametrize(
    ("work_s", "busy", "num_now", "wanted"),
    [
        ([0.0], [0.0], 1, 0),  # Serve raises this to `min_replicas`
        ([0.0], [0.5], 1, 1),
        ([10.0], [1.0], 1, 2),  # all that runs fills more than its share of one
        ([10.0], [0.8], 1, 1),
        ([10.1], [0.8], 1, 2),
        ([95.0], [1.0], 1, 10),  # as many as the work asks for, at once
        ([95.0], [1.0], 10, 10),  # nine of which start: they count
        ([95.0], [1.0], 12, 12),  # ten would do, though with more than half of the target
        ([45.0], [1.0], 12, 9),
        ([10.0, 0.0], [0.5, 0.3], 2, 2),
        ([4.9, 0.0], [0.5, 0.3], 2, 1),
        ([0.0, 0.0, 0.0], [0.8, 0.8, 0.1], 3, 3),  # no queue, and nothing to spare
        ([0.0, 0.0, 0.0], [0.8, 0.8, 0.0], 3, 2),
        ([0.0] * 4, [0.0] * 4, 4, 0),
    ],
)
def test_replicas_follow_the_seconds_of_work_that_wait(work_s: Any, busy: Any, num_now: int, wanted: int) -> None:
    assert engines_wanted(work_s, busy, 10.0, num_now) == wanted


def test_an_unchanged_load_never_makes_replicas_come_and_go() -> None:
    for tenths in range(0, 1200, 7):
        work_s, num_now = [tenths / 10], 1
        busy = [min(1.0, tenths / 100)]
        counts = [num_now := engines_wanted(work_s, busy, 10.0, num_now) for _ in range(4)]
        assert len(set(counts)) == 1, (work_s, counts)


def test_the_policy_reads_what_replicas_report_and_keeps_their_number_before() -> None:
    policy = QueuedWorkPolicy(target_s=5.0)
    context: Any = SimpleNamespace(aggregated_metrics=None, target_num_replicas=3)
    assert policy(context) == (3, {})
    context.aggregated_metrics = {WORK: {"a": 20.0, "b": 11.0}, BUSY: {"a": 1.0, "b": 1.0}}
    assert policy(context) == (7, {})

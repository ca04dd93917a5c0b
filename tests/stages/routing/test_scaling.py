"""How many engines there are to be: our rule, and what Kubernetes makes of the chart's metrics."""

from __future__ import annotations

import random

import pytest

from millrace.stages.routing.scaling import EngineWork, HorizontalPodAutoscaler, QueuedWork, RecentMaximum


def works(count: int, work_s: float, num_running: int = 0) -> list[EngineWork]:
    return [EngineWork(work_s, num_running, 16)] * count


def test_our_rule_goes_up_at_once_and_down_after_five_quiet_minutes():
    rule = QueuedWork(10.0)
    assert rule.wanted(works(1, 0.0), 1, 0.0) == 0
    assert rule.wanted(works(1, 75.0, 16), 1, 1.0) == 8, "as many as the work asks for"
    assert rule.wanted(works(8, 0.0, 2), 8, 2.0) == 8
    assert rule.wanted(works(8, 0.0, 2), 8, 301.0) == 8, "eight were wanted five minutes ago"
    assert rule.wanted(works(8, 0.0, 2), 8, 301.5) == 2, "a sixteenth of eight runs, and 0.8 of one may"


@pytest.mark.parametrize(
    ("work_s", "num_running", "num_now", "wanted"),
    [
        # desired = ceil(total / target per pod), of two metrics the larger; within a tenth nothing changes
        (10.0, 0, 4, 4),
        (10.9, 0, 4, 4),
        (11.1, 0, 4, 5),
        (0.0, 12, 4, 6),
        (100.0, 0, 4, 8),  # twice as many in a quarter of a minute
        (100.0, 0, 1, 3),  # or two more
        (1.0, 0, 4, 3),  # one less a minute
    ],
)
def test_a_pod_autoscaler_computes_what_kubernetes_documents(
    work_s: float, num_running: int, num_now: int, wanted: int
):
    rule = HorizontalPodAutoscaler(10.0, 8.0)
    assert rule.wanted(works(num_now, work_s, num_running), num_now, 0.0) == wanted


def test_a_pod_autoscaler_ends_one_pod_a_minute_once_five_minutes_needed_less():
    rule, pods, counts = HorizontalPodAutoscaler(10.0, 8.0), 4, []
    assert rule.wanted(works(4, 10.0), 4, 0.0) == 4
    for at_s in range(15, 700, 15):
        pods = max(1, rule.wanted(works(pods, 0.0), pods, float(at_s)))
        counts.append(pods)
    moments = [15 * (at + 1) for at in range(1, len(counts)) if counts[at] < counts[at - 1]]
    assert counts[0] == 4 and counts[-1] == 1 and moments[0] == 315
    assert all(later - earlier >= 60 for earlier, later in zip(moments, moments[1:], strict=False))


def test_the_recent_maximum_is_that_of_all_in_the_window():
    draw, noted, recent, now_s = random.Random(3), [], RecentMaximum(10.0), 0.0
    for _ in range(300):
        now_s += draw.random() * 3
        noted.append((now_s, draw.randrange(20)))
        assert recent.note(*noted[-1]) == max(number for at_s, number in noted if at_s >= now_s - 10.0)

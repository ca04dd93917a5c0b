"""The loads in short form. Times and memory have their bounds in the full counts: here other tests share the cores."""

from __future__ import annotations

import pytest

from tests.load import burst, overload, soak, streams
from tests.load.process import slope

pytestmark = pytest.mark.slow
BUSY = ("p99", "goodput", "memory", "after it")  # complaints of times, on a machine that others use


def wrong(complaints: list[str]) -> list[str]:
    """The complaints that no busy machine explains."""
    return [text for text in complaints if not any(word in text for word in BUSY)]


def test_requests_of_all_kinds_leave_no_thread_task_or_descriptor() -> None:
    figures = soak.run(160, pieces=2, num_before=120)
    assert figures["requests"] == 160 and figures["left by their clients"] and figures["bad"]
    assert wrong(figures["complaints"]) == []


def test_streams_beside_each_other_lose_and_repeat_nothing() -> None:
    figures = streams.run(num_streams=40, seconds=1.6)
    assert wrong(figures["complaints"]) == []


def test_an_overloaded_server_refuses_with_retry_after_and_loses_nothing() -> None:
    figures = overload.run(seconds=0.6, least_s=0.3)
    assert figures["refused"] > 0
    assert wrong(figures["complaints"]) == []


def test_a_burst_is_served_or_refused_and_nothing_else() -> None:
    figures = burst.run(400, seconds=0.5)
    assert set(figures["answers"]) <= {"200", "429", "503", "refused"}
    assert wrong(figures["complaints"]) == []


def test_growth_is_told_from_noise() -> None:
    growth, margin = slope([0, 10_000, 20_000, 30_000], [100.0, 103.0, 103.9, 107.1])
    assert growth == pytest.approx(2.22) and 0.3 < margin < 0.8

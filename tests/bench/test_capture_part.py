"""What a timed run does where a captured step does not hold on a card: it goes on without what does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from millrace.kernels.triton.launch import SWITCHES, LaunchSwitches
from tests.bench.gpu.parts import capture
from tests.bench.gpu.place import Place

BOTH, EARLY, NEITHER = capture.TRIED


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    early, branches = SWITCHES.early, SWITCHES.branches
    yield
    SWITCHES.early, SWITCHES.branches = early, branches


@pytest.mark.parametrize(
    ("broken", "holds"), [([], BOTH), ([BOTH], EARLY), ([BOTH, EARLY], NEITHER), ([BOTH, EARLY, NEITHER], None)]
)
def test_what_does_not_hold_is_complained_of_and_left_out(
    broken: list[LaunchSwitches], holds: LaunchSwitches | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(place: Place, switches: LaunchSwitches) -> Iterator[str]:
        if switches == BOTH and BOTH in broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        yield from ["a number is off"] if switches in broken else []

    rows: list[dict[str, Any]] = []
    complaints: list[str] = []
    monkeypatch.setattr(capture, "wrong", wrong)
    capture.run(Place(torch.device("cpu"), 0, rows.append, complaints.append))
    assert [row["holds"] for row in rows] == [False] * len(broken) + [True] * (holds is not None)
    assert len(complaints) == len(broken) and all("captured step with" in complaint for complaint in complaints)
    if holds is not None:
        assert holds == SWITCHES
    said = [{"part": "capture", "began": 20.0}, *({"part": "capture", "row": row} for row in rows)]
    assert capture.held(said) == (NEITHER if holds is None else holds)


def test_what_the_environment_turns_off_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[LaunchSwitches] = []
    monkeypatch.setenv("MILLRACE_GRAPH_BRANCHES", "0")
    monkeypatch.setattr(capture, "wrong", lambda place, switches: tried.append(switches) or ())
    capture.run(Place(torch.device("cpu"), 0, lambda row: None, lambda complaint: None))
    assert tried == [EARLY] == [SWITCHES]


def test_a_card_that_was_lost_meanwhile_leaves_neither_and_a_run_without_the_part_both() -> None:
    assert capture.held([{"part": "capture", "began": 20.0}]) == NEITHER
    assert capture.held([{"part": "card", "began": 15.0}]) is None

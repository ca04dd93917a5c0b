"""Early launches: where they are used, and where not."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton.launch import SWITCHES, LaunchSwitches

EARLY, LATE = {"IS_EARLY": True, "launch_pdl": True}, {"IS_EARLY": False}


@pytest.mark.parametrize(
    ("capability", "is_interpreted", "is_allowed", "want"),
    [(90, False, True, EARLY), (100, False, True, EARLY), (89, False, True, LATE), (90, True, True, LATE),
     (90, False, False, LATE)],
)  # fmt: skip
def test_launches_are_early_from_capability_9_on_unless_forbidden(
    capability: int, is_interpreted: bool, is_allowed: bool, want: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "capability", lambda device: capability)
    monkeypatch.setattr(triton_launch, "IS_INTERPRETED", is_interpreted)
    monkeypatch.setattr(SWITCHES, "early", is_allowed)
    assert triton_launch.early_launch(torch.device("cuda")) == want


@pytest.mark.parametrize(
    ("environment", "want"),
    [({}, (True, True)), ({"MILLRACE_EARLY_LAUNCH": "0"}, (False, True)),
     ({"MILLRACE_GRAPH_BRANCHES": "0", "MILLRACE_EARLY_LAUNCH": "1"}, (True, False))],
)  # fmt: skip
def test_a_variable_of_the_environment_turns_each_switch_off(
    environment: dict[str, str], want: tuple[bool, bool]
) -> None:
    switches = LaunchSwitches.of(environment)
    assert (switches.early, switches.branches) == want

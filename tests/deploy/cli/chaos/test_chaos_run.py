"""`millrace chaos` itself, with few requests: a link that is cut, one frame in halves, and no violation."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.deploy.cli.chaos.chaos_run import ChaosOptions, run_chaos
from millrace.deploy.cli.chaos.fleet import FleetSize
from millrace.deploy.cli.chaos.plan import PLANS, Plan, parse_strike
from tests.deploy.running import ROOT

IS_FULL = bool(os.environ.get("MILLRACE_FULL"))
CHAOS = [sys.executable, "-m", "millrace.deploy", "chaos"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_answers_stay_right_while_links_are_cut_and_frames_torn(tmp_path: Path) -> None:
    size = FleetSize(1, 2)
    strikes = tuple(
        parse_strike(one, size) for one in ("cut engine0@0.3+0.2", "half engine1@0.8", "cut engine1@1.3+0.2")
    )
    options = ChaosOptions(
        size=size,
        seed=1,
        minutes=1.0,
        plan=Plan(strikes=strikes, num_requests=24),
        num_clients=8,
        rate=16.0,
        num_cases=5,  # without a schema, which takes a process of its own
        has_reference=False,
    )
    result = asyncio.run(run_chaos(options, tmp_path))
    assert result.violations == [], "\n".join(result.lines)
    assert len(result.requests) >= 24 and len(result.spans) == 3
    assert sum(one.end == "done" for one in result.requests) >= 12


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
@pytest.mark.parametrize("seed", range(4))
def test_drawn_strikes_violate_nothing(tmp_path: Path, seed: int) -> None:
    done = subprocess.run(
        [*CHAOS, "--fleet", "2x3", "--seed", str(seed), "--minutes", "1", "--log-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
@pytest.mark.parametrize("plan", sorted(PLANS))
def test_plans_by_name_violate_nothing_and_an_upgrade_fails_no_request(tmp_path: Path, plan: str) -> None:
    done = subprocess.run(
        [*CHAOS, "--fleet", "1x2", "--plan", plan, "--log-dir", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if plan in ("upgrade", "versions"):
        assert "refused" not in done.stdout and "broken" not in done.stdout


@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_the_processes_of_a_fleet_end_with_the_command_that_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen([*CHAOS, "--fleet", "1x1", "--log-dir", str(tmp_path)], cwd=ROOT) as chaos:
        deadline = time.monotonic() + 120.0
        while time.monotonic() < deadline and not (tmp_path / "front0-0.log").exists():
            time.sleep(0.05)
        assert processes_with(str(tmp_path))
        chaos.send_signal(signal.SIGKILL)
        chaos.wait()
        while time.monotonic() < deadline and processes_with(str(tmp_path)):
            time.sleep(0.05)
        assert processes_with(str(tmp_path)) == []


def processes_with(text: str) -> list[int]:
    """The ids of processes whose command has this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended
    return found

"""`millrace top`: the feed of a server, as a terminal shows it."""

from __future__ import annotations

import io
import subprocess
import sys
from typing import Any

import pytest

from millrace.deploy.cli.top import DashboardState, draw
from tests.deploy.running import RunningServer, free_port

rich = pytest.importorskip("rich.console", reason="rich is not installed: pip install -e '.[top]'")


def shown(readings: DashboardState) -> str:
    console = rich.Console(file=io.StringIO(), width=160)
    console.print(draw(readings))
    text: str = console.file.getvalue()
    return text


def update(now_s: float, *, patch: dict[str, Any] | None = None, **full: Any) -> dict[str, Any]:
    return {"type": "update", "now_s": now_s, "full": full, "patch": patch or {}}


def stage(busy: float, blocked: float) -> dict[str, float]:
    return {"busy": busy, "blocked": blocked}


def test_shares_are_those_of_the_server_and_rates_of_steps():
    readings = DashboardState()
    edges = {
        "in": {"source": "client", "target": "tokenize", "depth": 3, "capacity": 8, "high_water": 5, "num_sent": 9}
    }
    readings.take(update(100.0, pipeline={"stages": {"tokenize": stage(0.1, 0.2)}, "edges": edges}))
    assert readings.shares("tokenize") == (0.1, 0.2)
    rows = [[1, 101_000_000, 500, 0, 4, 30, 4, 0, 0, 0, 0, 9, 0], [2, 102_000_000, 900, 0, 4, 0, 6, 0, 0, 0, 0, 9, 0]]
    told = {"pipeline": {"stages": {"tokenize": stage(0.5, 0.25)}}, "steps": {"rows": rows}}
    readings.take(update(102.0, patch=told))
    assert readings.shares("tokenize") == (0.5, 0.25)
    assert readings.rate("num_decode_tokens") == 2.0 and readings.rate("num_prefill_tokens") == 6.0
    text = shown(readings)
    line = next(line for line in text.splitlines() if line.startswith("tokenize"))
    assert "█" * 12 in line and "50%" in line and "25%" in line and " 3 " in line
    assert "to 0.9 ms" in text


def test_a_server_without_an_engine_is_told_as_it_is_and_nothing_is_taken_for_markup():
    readings = DashboardState()
    readings.take(update(1.0, overview={"health": {"state": "loading", "reason": "[bold]the model is loading"}}))
    assert shown(readings).strip() == "loading [bold]the model is loading"


@pytest.mark.slow
def test_it_shows_a_server_once_and_says_when_there_is_none(server: RunningServer):
    server.post("/v1/completions", {"prompt": "a", "max_tokens": 4})
    command = [sys.executable, "-m", "millrace.deploy", "top", "--once", "--url"]
    done = subprocess.run([*command, server.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "ready" in done.stdout and "detokenize" in done.stdout, done.stderr
    nowhere = f"http://127.0.0.1:{free_port()}"
    failed = subprocess.run([*command, nowhere], capture_output=True, text=True, timeout=60)
    assert failed.returncode == 1 and "cannot be reached" in failed.stderr and nowhere in failed.stderr
    assert failed.stdout == ""

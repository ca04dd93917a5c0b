"""How far loading is, told by a log or on a terminal."""

import asyncio
import io
import sys
from collections.abc import Callable

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.runtime.simulation.env import SimEnv
from millrace.runtime.simulation.run import run
from millrace.runtime.startup.load_progress import LoadProgress
from millrace.stages.loading.load_report import report_loading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(progress: LoadProgress, seconds: float, change: Callable[[], object] = lambda: None) -> None:
    async def main(env: SimEnv) -> None:
        reporting = asyncio.ensure_future(report_loading(progress, env))
        await env.sleep(seconds / 2)
        change()
        await env.sleep(seconds / 2)
        reporting.cancel()
        await asyncio.wait([reporting])

    run(main, seed=0)


def test_a_log_has_one_line_a_second():
    progress = LoadProgress(lambda: 0.0)
    progress.begin("read", {"a": 4})
    with captured_logs() as logs:
        report(progress, 3.1, lambda: progress.add("a", 3))
    lines = [line for line in logs if line["event"] == "model.loading"]
    assert [line["percent"] for line in lines] == [0.0, 75.0, 75.0]
    assert lines[0]["phase"] == "read" and lines[0]["total_bytes"] == 4


def test_a_start_of_less_than_a_second_has_no_line():
    with captured_logs() as logs:
        report(LoadProgress(lambda: 0.0), 0.9)
    assert logs == []


def test_a_terminal_has_a_bar_for_each_phase_with_bytes(monkeypatch: pytest.MonkeyPatch):
    terminal, progress = Terminal(), LoadProgress(lambda: 0.0)
    monkeypatch.setattr(sys, "stderr", terminal)
    progress.begin("download", {"m": 4})

    def change() -> None:
        progress.add("m", 2)
        shown.append(terminal.getvalue())
        progress.begin("read", {"a": 8})
        progress.add("a", 2)

    shown: list[str] = []
    with captured_logs() as logs:
        report(progress, 1.0, change)
    assert "downloading files:   0%" in shown[0] and "reading weights:  25%" in terminal.getvalue()
    assert logs == []


def test_a_terminal_shows_the_seconds_of_a_phase_without_bytes(monkeypatch: pytest.MonkeyPatch):
    terminal, seconds = Terminal(), [0.0]
    progress = LoadProgress(lambda: seconds[0])
    monkeypatch.setattr(sys, "stderr", terminal)
    progress.begin("probe")
    report(progress, 0.5)
    assert terminal.getvalue() == "", "a short phase shows nothing"

    def change() -> None:
        seconds[0] = 3.0

    report(progress, 1.0, change)
    assert "measuring steps, 3 s" in terminal.getvalue()

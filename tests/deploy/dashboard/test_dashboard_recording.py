"""The dashboard over a recording, in a real browser: every view, its figures, the bar, and the keyboard."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.stages.allocate.tiers.block_pool import BlockState
from millrace.stages.recordings.reader import Recording
from millrace.stages.recordings.replay import Replay
from millrace.stages.recordings.time_machine import TimeMachine
from tests.counts import count
from tests.deploy.browser import VIEWS, accessibility, check_that_it_stayed_at_home, opened, show, until
from tests.stages.recorded_runs import record

pytestmark = pytest.mark.slow

BAR = "input[type=range]"
WORDS = {  # texts of views with no or partial data in a recording
    "pipeline": "Not in a recording",
    "playground": "Not available for a recording",
    "health": "The stacks of stages",
    "recorder": "Flight files and the trace for Perfetto need a running server",
    "waterfall": "Select a request",
}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shown") / "incident.jsonl"
    record(path, 20, seed=3)
    return path


@pytest.fixture(scope="module")
def page(recording: Path) -> Iterator[Any]:
    """The page that the command serves."""
    command = [sys.executable, "-m", "millrace.deploy", "replay", str(recording), "--dashboard", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            match = re.search(r"(http://\S+/dashboard) shows it", line)
            assert match, line
            with opened(match[1]) as page:
                page.locator("[data-figure=time_s]").wait_for()
                yield page
        finally:
            process.terminate()
            assert process.wait(60) == 0


def go(page: Any, time_s: float) -> None:
    """Moves the bar there, as a hand does, and waits until the page shows that moment."""
    page.evaluate(
        f"""() => {{
          const bar = document.querySelector('{BAR}');
          bar.value = {time_s};
          bar.dispatchEvent(new Event('input', {{ bubbles: true }}));
        }}"""
    )
    until(page, f"Math.abs(millraceDashboard.feed.data.position.time_s - {time_s}) < 2e-6")


def figure(page: Any, name: str) -> int:
    """A figure of the page, as a number."""
    return int(page.locator(f"[data-figure='{name}']").first.text_content().split(" ")[0].replace(",", ""))


def test_every_view_shows_a_recording_to_everybody_and_stays_at_home(page: Any, tmp_path: Path):
    check_access = accessibility(page)
    duration_s = page.evaluate("millraceDashboard.feed.recording.duration_s")
    go(page, round(duration_s * 0.6, 6))
    looks = itertools.cycle(itertools.product((1280, 390), ("light", "dark")))
    for view, (width, scheme) in zip(VIEWS * count(1, 4), itertools.islice(looks, 1, None), strict=False):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        show(page, view)
        until(page, "document.querySelectorAll('main > *').length >= 4")
        if view in WORDS:
            page.locator("main", has_text=WORDS[view]).wait_for()
        check_access(f"{view}, {width} pixels, {scheme}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, f"{view} is wider than {width} pixels"
        page.screenshot(path=str(tmp_path / f"{view}-{width}-{scheme}.png"))  # to look at: pytest keeps it for a while
    page.set_viewport_size({"width": 1280, "height": 900})
    show(page, "pipeline")  # the wall has no bar of the time
    check_that_it_stayed_at_home(page)


def test_its_figures_are_those_of_the_time_machine(page: Any, recording: Path):
    machine = TimeMachine(Recording(recording))
    times = list(machine.times())
    for time_s in (times[len(times) // 4], times[-1], times[len(times) // 2]):
        go(page, time_s)
        moment = machine.at(time_s)
        show(page, "blocks")
        until(page, "document.querySelector('[data-figure=\"blocks.free\"]') !== null")
        names = {"free": "FREE", "in_use": "IN_USE", "cached": "CACHED", "quarantined": "QUARANTINED"}
        for name, state in names.items():
            assert figure(page, f"blocks.{name}") == moment.memory.device.count(BlockState[state]), (name, time_s)
        expected = [str(each) for each in reversed(moment.preemptions)][:40]
        told = page.locator("[data-preemption] .free")
        deadline = time.monotonic() + 60  # the figures are drawn before the list
        while told.all_text_contents() != expected and time.monotonic() < deadline:
            page.wait_for_timeout(20)
        assert told.all_text_contents() == expected
        assert figure(page, "num_preemptions") == len(moment.preemptions)
        assert figure(page, "num_running") == sum(each.state == "running" for each in moment.memory.sequences)
        show(page, "requests")
        ids = sorted({each.request_id for each in moment.memory.sequences})
        rows = "[...document.querySelectorAll('tr[data-request]')].map((row) => row.dataset.request)"
        shown = f"JSON.stringify([...new Set({rows})].sort())"  # what was there before may be drawn first
        until(page, f"{shown} === JSON.stringify({json.dumps(ids)})")
        show(page, "pipeline")
        page.locator("[data-figure='position.last_granted']").wait_for()
        assert figure(page, "position.last_granted") == moment.memory.last_granted
        assert figure(page, "position.completed_step") == moment.memory.completed_step


def test_it_tells_what_replay_tells(page: Any, recording: Path):
    replay = Replay(Recording(recording)).run()
    show(page, "recorder")
    assert page.locator("[data-figure=decision_hash]").text_content() == replay.decision_hash
    assert figure(page, "recording.num_decisions") == replay.num_decisions
    show(page, "config")
    engine = replay.recording.engine
    row = page.locator("tr[data-setting=max_num_seqs] td").first
    row.wait_for()
    assert int(row.text_content()) == engine.max_num_seqs


def test_a_request_of_a_recording_has_its_waterfall(page: Any, recording: Path):
    go(page, page.evaluate("millraceDashboard.feed.recording.duration_s"))
    show(page, "waterfall")
    page.locator("th a").first.click()
    page.locator(".waterfall .sentence", has_text="The request took").first.wait_for()
    explained = page.evaluate("millraceDashboard.feed.data.request.explained")
    assert sum(row["total_us"] for row in explained["rows"]) == pytest.approx(explained["total_us"], abs=2)
    assert page.locator("[data-service]").count() >= 2


def test_steps_are_drawn_as_they_were(page: Any, recording: Path):
    """What the strip counts of the whole recording is what its grants say."""
    go(page, page.evaluate("millraceDashboard.feed.recording.duration_s"))
    show(page, "steps")
    page.locator("[data-figure=tokens_computed]").wait_for()
    shown = page.evaluate("millraceDashboard.feed.data.steps.rows.map((row) => [row[0], row[5] + row[6]])")
    granted, done = {}, set()
    for call in Recording(recording):
        for grant in getattr(call, "grants", ()):
            if grant is not None:
                granted[grant["step"]] = sum(grant["num_tokens"])
        done |= {message.step for message in getattr(call, "taken", ()) if hasattr(message, "places")}
    expected = [[step, granted[step]] for step in sorted(done)][-600:]
    assert shown == expected
    assert figure(page, "tokens_computed") == sum(count for _, count in expected)


def test_the_bar_is_moved_by_keys_and_plays(page: Any):
    duration_s = page.evaluate("millraceDashboard.feed.recording.duration_s")
    go(page, round(duration_s / 2, 6))
    step = page.evaluate("millraceDashboard.feed.data.position.completed_step")
    page.locator(BAR).focus()
    page.keyboard.press("ArrowRight")
    until(page, f"millraceDashboard.feed.data.position.completed_step === {step + 1}")
    page.keyboard.press("ArrowLeft")
    until(page, f"millraceDashboard.feed.data.position.completed_step === {step}")
    page.get_by_label("One step on").focus()
    page.keyboard.press("Enter")
    until(page, f"millraceDashboard.feed.data.position.completed_step === {step + 1}")
    page.locator(BAR).focus()
    page.keyboard.press("Space")
    began = time.monotonic(), page.evaluate("millraceDashboard.feed.data.position.time_s")
    page.locator("text=Pause").wait_for()
    until(page, f"millraceDashboard.feed.data.position.time_s > {began[1] + 0.4}")
    assert time.monotonic() - began[0] > 0.1  # it plays, and does not jump
    page.keyboard.press("Space")
    page.locator("button.play", has_text="Play").wait_for()
    assert page.evaluate("millraceDashboard.feed.data.position.speed") == 0
    page.get_by_label("Speed").select_option("50")
    page.locator("button.play").click()
    until(page, f"millraceDashboard.feed.data.position.time_s === {duration_s}")
    page.locator("button.play", has_text="Play").wait_for()

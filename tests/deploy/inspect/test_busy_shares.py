"""One server under load, and every view of how busy its stages are."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping

import aiohttp
import pytest

from millrace.deploy.cli import top
from millrace.deploy.config import ServerConfig
from millrace.stages.config import EngineConfig
from tests.deploy.running import RunningServer

SERVE = [sys.executable, "-m", "millrace.deploy", "serve", "--port", "0", "--log-format", "json"]
NUM_STREAMS, WARM_S, WINDOW_S = 6, 1.5, 5.0
POINTS = 0.03
ATTEMPTS = 5  # the views are read one after the other, and a machine's other work changes meanwhile


@contextlib.asynccontextmanager
async def streaming(http: aiohttp.ClientSession, url: str) -> AsyncIterator[None]:
    """So many answers at a time, one after the other."""

    async def stream(number: int) -> None:
        body = {"prompt": f"Once upon a time {number}", "max_tokens": 300, "ignore_eos": True, "stream": True}
        while True:
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200
                async for _ in answer.content:
                    pass

    tasks = [asyncio.create_task(stream(number)) for number in range(NUM_STREAMS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError), outcome


async def counters(http: aiohttp.ClientSession, url: str) -> tuple[float, dict[str, float]]:
    """When, and `millrace:stage_seconds_total` of busy by stage."""
    async with http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    found = re.findall(r'^millrace:stage_seconds_total\{stage="(\w+)",state="busy"\} (\S+)$', text, re.MULTILINE)
    return time.monotonic(), {stage: float(value) for stage, value in found}


class Feed:
    """The dashboard's subscription, as the page reads it."""

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}

    async def read(self, url: str) -> None:
        state = top.DashboardState()
        async for update in top.watch(url, None):
            state.take(update)
            self.shares = {name: one["busy"] for name, one in state.data["pipeline"]["stages"].items()}


def shown_by_top(url: str) -> dict[str, float]:
    """The column `busy` of `millrace top --once`."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert top.run(argparse.Namespace(url=url, once=True), EngineConfig(), ServerConfig()) == 0
    rows = re.findall(r"^(\w+) +[█░ ]*?(\d+)% +\d+%", out.getvalue(), re.MULTILINE)
    return {name: int(percent) / 100 for name, percent in rows}


async def look(url: str) -> dict[str, Mapping[str, float]]:
    """The share of each stage, by view, at the end of the same seconds under load."""
    feed = Feed()
    async with aiohttp.ClientSession() as http, streaming(http, url):
        await asyncio.sleep(WARM_S)
        reading = asyncio.create_task(feed.read(url))
        began_s, before = await counters(http, url)
        await asyncio.sleep(WINDOW_S)
        ended_s, after = await counters(http, url)
        async with http.get(f"{url}/v1/stages") as answer:
            stages = (await answer.json())["stages"]
        from_top = await asyncio.to_thread(shown_by_top, url)
        reading.cancel()
    return {
        "/metrics": {name: (after[name] - before[name]) / (ended_s - began_s) for name in after},
        "/v1/stages": {stage["name"]: stage["busy"] for stage in stages},
        "feed": feed.shares,
        "top": from_top,
    }


def far_apart(views: Mapping[str, Mapping[str, float]]) -> set[str]:
    """The stages whose shares differ by more than `POINTS`."""
    stages = {name: [of.get(name, 0.0) for of in views.values()] for name in views["/metrics"]}
    return {name for name, shares in stages.items() if max(shares) - min(shares) > POINTS}


@pytest.mark.slow
def test_every_view_says_the_same_of_how_busy_each_stage_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")  # of the terminal
    pytest.importorskip("rich", reason="rich is not installed: pip install 'millrace[top]'")
    with RunningServer(command=SERVE) as server:
        always_apart: set[str] | None = None
        for _ in range(ATTEMPTS):
            views = asyncio.run(look(server.url))
            print(views)
            names = set(views["/metrics"])
            assert len(names) == 8 and names == set(views["top"]) == set(views["feed"])
            apart = far_apart(views)
            always_apart = apart if always_apart is None else always_apart & apart
            if not always_apart:
                break
    assert not always_apart, views
    assert views["/metrics"]["execute"] > 0.5 * views["/metrics"]["sample"], views  # the device is waited for


@pytest.mark.slow
def test_lines_about_the_whole_engine_name_no_client():
    command = [*SERVE, "--stats-interval-s", "0.2", "--log-requests"]
    with RunningServer(command=command) as server:
        for number in range(3):
            headers = {"X-Request-Id": f"mine-{number}"}
            body = {"prompt": "Once upon a time", "max_tokens": 150, "ignore_eos": True}
            assert server.post("/v1/completions", body, headers).status == 200
            time.sleep(0.4)
        lines = [json.loads(line) for line in server.errors().splitlines() if line.startswith("{")]
    told = {line["event"] for line in lines if "mine" in str(line.get("request_id", ""))}
    assert told and all(event.startswith("request.") for event in told), told
    stats = [line for line in lines if line["event"] == "engine.stats"]
    assert stats and not [line for line in stats if "request_id" in line or "trace_id" in line]

"""The last 15 minutes of a server: what is kept, and a viewer that goes back."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

from millrace.deploy.dashboard import history as history_module
from millrace.deploy.dashboard.history import MAX_ROWS, Counts, HistoryLog, news_of
from millrace.deploy.dashboard.messages import Topics
from millrace.deploy.dashboard.past import Past
from millrace.runtime.trace.tracer import Tracer
from tests.deploy.dashboard.test_dashboard_feed import EVERYTHING, Looking, complete, looking
from tests.deploy.sockets import ENDLESS, on_loop, serving, until

NOTHING = Counts(num_running=0, num_waiting=0, held=0.0, num_generated=0, num_prompt=0, num_preemptions=0)


def log() -> HistoryLog:
    return HistoryLog(ThreadPoolExecutor(1))


def test_a_row_a_second_has_the_rates_since_the_row_before():
    history, counts = log(), NOTHING
    for time_s in (10.0, 10.5, 11.0, 13.0):
        counts = replace(counts, num_running=3, num_generated=counts.num_generated + 40, num_preemptions=2)
        history.note(time_s, lambda counts=counts: counts)  # type: ignore[misc]
    assert list(history.rows) == [(11.0, 3, 0, 0.0, 80.0, 0.0, 0), (13.0, 3, 0, 0.0, 20.0, 0.0, 0)]
    assert history.rows_since(1) == ([history.rows[-1]], 2) and history.rows_since(2) == ([], 2)


def test_rows_of_fifteen_minutes_are_kept():
    history = log()
    for time_s in range(1_500):
        history.note(float(time_s), lambda: NOTHING)
    assert len(history.rows) == MAX_ROWS and history.rows[0][0] == 600.0 and history.num_rows == 1_499


async def taken(history: HistoryLog, time_s: float, state: dict[str, Any], num_steps: int = 0) -> bool:
    if not history.claim(time_s):
        return False
    rows = [(step, 0) for step in range(num_steps)]
    await history.take(time_s, state, 0.0, lambda number: (rows[number:], num_steps), lambda number: ([], 0))
    return True


@on_loop
async def test_frames_are_kept_for_fifteen_minutes_and_up_to_so_many_bytes():
    history = log()
    assert await taken(history, 0.0, {"a": 1}) and not await taken(history, 1.0, {"a": 2})
    for time_s in range(2, 2_000, 2):
        await taken(history, float(time_s), {"a": time_s})
    assert len(history.frames) == 450 + 1 and history.frames[0].time_s == 1_998 - 900
    assert history.frames_until(1_100.9)[-1].topics() == {"a": 1_100}
    assert [frame.time_s for frame in history.frames_until(0.0)] == [1_098.0]  # the first that there is
    num_bytes = history.frames[0].num_bytes
    before, history_module.MAX_BYTES = history_module.MAX_BYTES, 10 * num_bytes
    try:
        await taken(history, 2_000.0, {"a": 2_000})
    finally:
        history_module.MAX_BYTES = before
    assert 8 <= len(history.frames) <= 10 and history.frames[-1].time_s == 2_000.0


@on_loop
async def test_the_steps_of_a_past_moment_are_those_up_to_it():
    history = log()
    for time_s, num_steps in ((0.0, 300), (2.0, 700), (4.0, 701)):
        await taken(history, time_s, {}, num_steps)
    assert [row[0] for row in news_of(history.frames_until(2.0))["steps"]] == list(range(100, 700))
    assert news_of(history.frames_until(4.0))["steps"][-1][0] == 700


@on_loop
async def test_a_viewer_that_moves_while_a_moment_is_read_is_shown_where_it_went():
    history, pipeline = log(), SimpleNamespace(tracer=Tracer())
    for time_s in (0.0, 2.0, 4.0):
        await taken(history, time_s, {"overview": {"at": time_s}})
    engine: Any = SimpleNamespace(pipeline=pipeline)
    mine = Topics.model_validate({"request": {"id": "cmpl-mine"}})
    for goes_to, reads_frame in ((2.0, True), (None, True), (2.0, False), (None, False)):
        past = Past(ThreadPoolExecutor(1), lambda owner: True)
        past.seek(4.0)
        if not reads_frame:  # but the details of a request
            await past.load(engine, history, Topics())
        loading = asyncio.create_task(past.load(engine, history, mine))
        await asyncio.sleep(0)  # a thread reads, and its result is not taken yet
        past.seek(goes_to)
        await loading
        assert past.shown_s == past.time_s == goes_to
        assert goes_to is None or past.tree("overview", None, None) == {"at": goes_to}


async def seen(viewer: Looking, is_past: bool) -> Any:
    while ("past" in (message := await viewer.update())) != is_past:
        pass
    return message


@on_loop
async def test_a_viewer_goes_back_in_all_views_and_returns():
    async with serving(step_s=0.002, script=ENDLESS) as running, looking(running) as viewer:
        await viewer.hear()
        await viewer.say("subscribe", topics=EVERYTHING | {"request": {"id": "cmpl-mine"}})
        url, headers = f"{running.server.url}/v1/completions", {"X-Request-Id": "mine"}
        body = {"prompt": "x" * 40, "max_tokens": 450, "ignore_eos": True, "stream": True}
        history = running.server._routes.feed._sources.history
        async with running.http.post(url, json=body, headers=headers) as answer:
            await answer.content.readline()
            history._due_s = 0.0  # a frame now, not up to two seconds later
            num_frames = len(history.frames)
            await until(lambda: len(history.frames) > num_frames)
            moment_s, history._due_s = history.frames[-1].time_s, inf  # and none after it, however long this takes
            await answer.read()
        await viewer.say("seek", time_s=moment_s + 0.01)
        message = await seen(viewer, is_past=True)
        assert message["now_s"] == moment_s < message["live_s"]
        shown = viewer.data
        assert [row["id"] for row in shown["requests"]["rows"]] == ["cmpl-mine"]
        assert shown["overview"]["num_running"] == 1 and shown["recent"]["rows"] == []
        assert list(shown["blocks"]["owners"].values()) == ["cmpl-mine"] and len(shown["blocks"]["cells"]) > 100
        assert shown["request"].get("ended_us") is None and shown["request"]["sequences"][0]["ticks_us"]
        steps = shown["steps"]["rows"]
        assert steps and all(row[1] <= 1e6 * moment_s for row in steps)
        assert set(shown["pipeline"]["stages"]) >= {"schedule", "execute"} and shown["loop"]["stacks"] == {}
        assert "rows" in shown["config"] and shown["history"]["first_frame_s"] <= moment_s
        await viewer.say("seek", steps=100)  # past the last frame
        assert (await seen(viewer, is_past=False))["full"]["requests"]["rows"] == []
        await viewer.say("seek", steps=-1)
        assert (await seen(viewer, is_past=True))["now_s"] == moment_s == history.frames[-1].time_s
        await viewer.say("seek")
        await seen(viewer, is_past=False)


@on_loop
async def test_requests_of_other_keys_are_not_shown_in_the_past_either():
    keys: dict[str, Any] = {"api_key": ("mine", "yours"), "admin_key": ("boss",)}
    async with serving(step_s=0.005, script=ENDLESS, **keys) as running:
        headers = {"Authorization": "Bearer mine", "X-Request-Id": "1"}
        body = {"prompt": "a", "max_tokens": 400, "stream": True}
        url, history = f"{running.server.url}/v1/completions", running.server._routes.feed._sources.history
        async with running.http.post(url, json=body, headers=headers) as answer:
            await answer.content.readline()
            for hello, sees in (({"key": "yours"}, False), ({"key": "mine"}, True), ({"admin_key": "boss"}, True)):
                async with looking(running, hello) as viewer:
                    await viewer.hear()
                    topics = {"requests": {}, "request": {"id": "cmpl-1"}, "blocks": {}, "history": {}}
                    await viewer.say("subscribe", topics=topics)
                    await until(lambda: history.frames)
                    await viewer.say("seek", time_s=history.frames[-1].time_s)
                    await seen(viewer, is_past=True)
                    assert [row["id"] for row in viewer.data["requests"]["rows"]] == ["cmpl-1"] * sees
                    assert ("sequences" in viewer.data["request"]) == sees
                    assert list(viewer.data["blocks"]["owners"].values()) == ["cmpl-1"] * sees
        await running.check_quiet()


@on_loop
async def test_a_server_without_a_page_keeps_rows_and_no_frames():
    async with serving() as running:
        history = running.server._routes.feed._sources.history
        await asyncio.gather(*(complete(running, f"p{i}", 5) for i in range(3)))
        await until(lambda: history.num_rows)
        assert not history.frames

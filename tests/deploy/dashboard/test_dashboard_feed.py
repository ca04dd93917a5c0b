"""The dashboard's WebSocket: access, updates and their rate."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.deploy.dashboard.block_map import FIRST_SLOT, BlockMap
from millrace.deploy.dashboard.messages import Topics
from millrace.deploy.dashboard.patch import merge_patch
from millrace.deploy.dashboard.snapshots import block_owners
from millrace.deploy.dashboard.trace_log import StepFold, TraceLog
from millrace.runtime.trace.tracer import EventKind, Tracer
from millrace.stages.testing.scripted.engine import SMALL
from tests.deploy.sockets import ENDLESS, Serving, on_loop, serving, until

EVERYTHING: dict[str, Any] = {name: {} for name in Topics.model_fields if name != "request"}


class Looking:
    """A viewer. `data` is what it knows, as the page has it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.data: dict[str, Any] = {}

    async def say(self, type: str, **members: Any) -> None:
        await self.socket.send_str(json.dumps({"type": type, **members}))

    async def hear(self) -> Any:
        return json.loads(await self.socket.receive_str(timeout=60))

    async def update(self) -> Any:
        """The next update, merged into what is known."""
        while (message := await self.hear())["type"] != "update":
            assert message["type"] != "error", message
        self.data.update(message["full"])
        for topic, patch in message["patch"].items():
            if topic not in ("steps", "incidents", "blocks"):
                self.data[topic] = apply(self.data[topic], patch)
        return message

    async def until_over(self) -> tuple[list[Any], int | None]:
        """All that still comes, and the code with which it closes."""
        told = []
        while (message := await self.socket.receive(timeout=60)).type is aiohttp.WSMsgType.TEXT:
            told.append(json.loads(message.data))
        return told, self.socket.close_code


@asynccontextmanager
async def looking(running: Serving, hello: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Looking]:
    async with running.http.ws_connect(f"{running.server.url}/dashboard/feed", autoclose=False, **options) as socket:
        viewer = Looking(socket)
        await viewer.say("hello", **(hello or {}))
        yield viewer


def apply(target: Any, patch: Any) -> Any:
    """RFC 7386, straight from its text."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = apply(merged.get(name), value)
    return merged


trees = st.recursive(
    st.none() | st.integers(0, 3) | st.lists(st.integers(0, 3), max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


def without_none(tree: Any) -> Any:
    return {k: without_none(v) for k, v in tree.items() if v is not None} if isinstance(tree, dict) else tree


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from("abc"), trees), st.dictionaries(st.sampled_from("abc"), trees))
def test_a_patch_merged_into_what_was_gives_what_is(before: dict[str, Any], after: dict[str, Any]):
    patch = merge_patch(before, after)
    assert without_none(apply(without_none(before), patch)) == without_none(after)
    assert bool(patch) == (without_none(before) != without_none(after)) or not patch


# -- access


@on_loop
async def test_without_the_key_nothing_is_told():
    async with serving(api_key=("sesame",)) as running:
        for hello, words in (({}, "is missing"), ({"key": "wrong"}, "is wrong")):
            async with looking(running, hello) as viewer:
                told, code = await viewer.until_over()
                assert [message["type"] for message in told] == ["error"] and words in told[0]["error"]["message"]
                assert told[0]["error"]["code"] == "invalid_api_key" and code == 1008
        async with looking(running, {"key": "sesame"}) as viewer:
            assert (await viewer.hear())["models"] == ["scripted"]


@on_loop
async def test_the_admin_key_alone_opens_the_dashboard():
    for api_key in ((), ("sesame",)):
        async with serving(api_key=api_key, admin_key=("boss",)) as running:
            async with looking(running, {"admin_key": "boss"}) as viewer:
                hello = await viewer.hear()
                assert hello["can_cancel"] and hello["has_admin_key"]
                facts = {"has_template": True, "shows_tools": True, "has_auto_tools": True, "max_logprobs": 20}
                assert hello["chat"] == facts
            for wrong in (
                {"admin_key": "sesame"},
                {"admin_key": "boss", "key": "wrong"} if api_key else {"admin_key": "x"},
            ):
                async with looking(running, wrong) as viewer:
                    (told,), code = await viewer.until_over()
                    assert "is wrong" in told["error"]["message"] and code == 1008


@on_loop
async def test_the_first_message_is_a_hello_and_comes_in_time():
    async with serving(header_timeout_s=0.1) as running:
        url = f"{running.server.url}/dashboard/feed"
        async with running.http.ws_connect(url, autoclose=False) as socket:
            told, code = await Looking(socket).until_over()
            assert told[0]["error"]["code"] == "request_timeout" and code == 1008
        async with running.http.ws_connect(url, autoclose=False) as socket:
            await Looking(socket).say("subscribe", topics=EVERYTHING)
            told, code = await Looking(socket).until_over()
            assert told[0]["error"]["param"] == "type" and code == 1008


@on_loop
async def test_pages_of_other_origins_may_not_look():
    async with serving() as running:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            async with looking(running, headers={"Origin": "https://elsewhere.example"}):
                pass
        assert caught.value.status == 403


@on_loop
async def test_a_request_is_cancelled_with_the_admin_key_only():
    async with serving(step_s=0.005, script=ENDLESS, api_key=("k",), admin_key=("boss",)) as running:
        async with running.http.post(
            f"{running.server.url}/v1/completions",
            json={"prompt": "a", "max_tokens": 400, "stream": True},
            headers={"Authorization": "Bearer k", "X-Request-Id": "mine"},
        ) as answer:
            await answer.content.readline()
            async with looking(running, {"key": "k"}) as viewer:
                assert not (await viewer.hear())["can_cancel"]
                await viewer.say("cancel", id="cmpl-mine")
                assert "admin key" in (await viewer.hear())["error"]["message"]
            async with looking(running, {"key": "k", "admin_key": "k"}) as viewer:
                assert (await viewer.until_over())[1] == 1008
            assert running.engine.pipeline.exit.live
            async with looking(running, {"key": "k", "admin_key": "boss"}) as viewer:
                assert (await viewer.hear())["can_cancel"]
                await viewer.say("cancel", id="none")
                assert (await viewer.hear())["error"]["code"] == "request_not_found"
                await viewer.say("cancel", id="cmpl-mine")
                assert b'"abort"' in await answer.content.read()
        await running.check_quiet()


@on_loop
async def test_requests_of_other_keys_are_shown_to_the_admin_only():
    async with serving(step_s=0.005, script=ENDLESS, api_key=("mine", "yours"), admin_key=("boss",)) as running:
        async with running.http.post(
            f"{running.server.url}/v1/completions",
            json={"prompt": "a", "max_tokens": 400, "stream": True},
            headers={"Authorization": "Bearer mine", "X-Request-Id": "1"},
        ) as answer:
            await answer.content.readline()
            topics = {"requests": {}, "request": {"id": "cmpl-1"}, "blocks": {}}
            for hello, sees in (
                ({"key": "mine"}, True),
                ({"key": "yours"}, False),
                ({"key": "yours", "admin_key": "boss"}, True),
            ):
                async with looking(running, hello) as viewer:
                    await viewer.hear()
                    await viewer.say("subscribe", topics=topics)
                    await viewer.update()
                    assert [row["id"] for row in viewer.data["requests"]["rows"]] == ["cmpl-1"] * sees
                    assert ("sequences" in viewer.data["request"]) == sees
                    assert list(viewer.data["blocks"]["owners"].values()) == ["cmpl-1"] * sees
        await running.check_quiet()


# -- what it tells


@on_loop
async def test_the_figures_are_the_engines_own():
    async with serving() as running:
        await asyncio.gather(*(complete(running, f"prompt {i}", 20) for i in range(5)))
        async with looking(running) as viewer:
            await viewer.say("subscribe", topics=EVERYTHING)
            await viewer.update()
            pipeline, engine = viewer.data["pipeline"], running.engine
            for name, runner in engine.pipeline.runners.items():
                assert pipeline["stages"][name]["busy_s"] == pytest.approx(runner.times.busy, abs=1e-6)
            for name, channel in engine.pipeline.channels.items():
                assert pipeline["edges"][name]["num_sent"] == channel.stats().num_sent
            steps = viewer.data["steps"]["rows"]
            assert len(steps) == pipeline["edges"]["execute.out->sample.in"]["num_sent"]
            computed = sum(prefill + decode for _, _, _, _, _, prefill, decode, *_ in steps)
            cached = sum(row[7] for row in steps)
            assert computed + cached == 5 * (len("prompt 0") + 20 - 1)  # the last token of an answer is not computed
            cells = np.frombuffer(b64decode(viewer.data["blocks"]["cells"]), "<u2")
            assert (
                np.bincount(cells, minlength=2)[1]
                == engine.pool.num_cached
                == viewer.data["overview"]["blocks"]["cached"]
            )
            assert {row["name"] for row in viewer.data["config"]["rows"]} >= {"max_num_seqs", "port", "api_key"}
            for name, one in viewer.data["latency"].items():
                assert sum(one["sketch"].values()) == sum(one["counts"]) > 0, name


@on_loop
async def test_of_many_requests_only_the_wanted_rows_are_told():
    async with serving(step_s=0.005, script=ENDLESS) as running:
        asking = [asyncio.create_task(complete(running, f"p{i}", 300)) for i in range(30)]
        await until(lambda: len(running.engine.scheduler.sequences) == 30)
        ids = list(running.engine.pipeline.exit.live)
        async with looking(running) as viewer:
            await viewer.say("subscribe", topics={"requests": {"offset": 10, "limit": 5}})
            await viewer.update()
            assert [row["id"] for row in viewer.data["requests"]["rows"]] == ids[10:15]
            assert viewer.data["requests"]["num_live"] == 30
            await viewer.say("subscribe", topics={"requests": {"offset": 0, "limit": 3, "newest_first": True}})
            while len((await viewer.update())["full"].get("requests", {"rows": []})["rows"]) != 3:
                pass
            rows = viewer.data["requests"]["rows"]
            assert [row["id"] for row in rows] == ids[:-4:-1]
            assert {row["state"] for row in rows} <= {"running", "waiting"} and rows[0]["num_prompt_tokens"] == 3
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await running.check_quiet()


@pytest.mark.slow
@on_loop
async def test_updates_come_four_times_a_second_at_most_and_none_to_who_wants_nothing():
    async with serving() as running:
        async with looking(running) as viewer:
            await viewer.hear()
            with pytest.raises(TimeoutError):
                await viewer.socket.receive_str(timeout=0.3)
            began = time.monotonic()
            for i in range(4):  # a subscription that changes brings nothing forward
                await viewer.say("subscribe", topics=EVERYTHING if i % 2 else {"overview": {}})
                await viewer.update()
            assert time.monotonic() - began > 0.7
            await viewer.say("subscribe", topics={})
            await asyncio.sleep(0.3)
            with pytest.raises(TimeoutError):
                while True:
                    await viewer.socket.receive_str(timeout=0.3)


@on_loop
async def test_a_wrong_message_is_told_and_the_feed_goes_on():
    async with serving() as running, looking(running) as viewer:
        await viewer.hear()
        for message in (
            {"type": "dance"},
            {"type": "subscribe", "topics": {"requests": {"limit": -1}}},
            {"type": "cancel"},
            "no json",
        ):
            await viewer.socket.send_str(message if isinstance(message, str) else json.dumps(message))
            assert (await viewer.hear())["status"] == 400
        await viewer.say("subscribe", topics={"overview": {}})
        assert (await viewer.update())["full"]["overview"]["health"]["state"] == "ready"
        await viewer.socket.send_frame(b'{"type": "\xff"}', aiohttp.WSMsgType.TEXT)
        assert (await viewer.until_over())[1] == 1007


# -- the trace, folded


def test_a_step_is_told_with_its_gap_its_tokens_and_what_it_did_in_vain():
    now = [1_000_000]
    tracer = Tracer()
    tracer._now_ns = lambda: 1000 * now[0]  # microseconds
    source = tracer.source("any")

    def emit(at_us: int, kind: EventKind, step: int, *values: int) -> None:
        now[0] = at_us
        tracer.emit(kind, source, step, *values)

    emit(0, EventKind.REQUEST_ACCEPTED, 0, 7, 1, 0)
    emit(10, EventKind.STEP_PLANNED, 1, 1, 40, 0, 3)
    emit(20, EventKind.STEP_GRANTED, 1, 1, 40, 0, 9)
    emit(20, EventKind.ROW_EXTEND, 1, 7, 0, 16, 40)  # 16 of its 56 tokens were cached
    emit(1_020, EventKind.STEP_DONE, 1, 1, 0, 1_000)
    emit(1_100, EventKind.STEP_GRANTED, 2, 1, 1, 1, 9)
    emit(1_100, EventKind.ROW_DECODE, 2, 7, 0, 56)
    emit(2_000, EventKind.STEP_DONE, 2, 1, 0, 880)  # began at 1120: 100 us after the first had ended
    emit(2_010, EventKind.PREEMPTED, 3, 0, 0, 0, 0)
    emit(2_010, EventKind.ROW_LEAVE, 3, 7, 0)
    emit(2_020, EventKind.STEP_GRANTED, 4, 1, 57, 0, 9)
    emit(2_020, EventKind.ROW_EXTEND, 4, 7, 0, 0, 57)  # all of it once more
    emit(3_000, EventKind.STEP_VOID, 4, 1, 0)
    log = TraceLog(tracer)
    log.refresh()
    first, second, void = log.steps
    assert first[:8] == (1, 1_020, 1_000, 0, 1, 40, 0, 16) and (first.num_waiting, first.num_free_blocks) == (3, 9)
    assert (second.gap_us, second.num_decode_tokens, second.num_wasted_tokens) == (100, 1, 0)
    assert (void.is_void, void.num_wasted_tokens) == (1, 57)
    assert [incident["kind"] for incident in log.incidents] == ["PREEMPTED", "STEP_VOID"]


def test_tokens_computed_again_are_wasted_and_only_they():
    fold, tracer = StepFold(), Tracer()
    source = tracer.source("any")
    tracer.emit(EventKind.REQUEST_ACCEPTED, source, 0, 3, 1, 0)
    for step, start, num_tokens in ((1, 0, 32), (2, 32, 18), (9, 16, 40)):  # preempted at 50, back with 16 cached
        tracer.emit(EventKind.STEP_GRANTED, source, step, 1, num_tokens, 0, 0)
        tracer.emit(EventKind.ROW_EXTEND, source, step, 3, 0, start, num_tokens)
        tracer.emit(EventKind.STEP_DONE, source, step, 1, 0, 10)
    rows = fold.take(tracer.read_all())
    assert [row.num_wasted_tokens for row in rows] == [0, 0, 34] and [row.num_cached_tokens for row in rows] == [
        0,
        0,
        0,
    ]


def test_a_row_in_one_of_three_lanes_has_a_token_in_every_third_step():
    fold, tracer = StepFold(), Tracer()
    source = tracer.source("any")
    tracer.emit(EventKind.REQUEST_ACCEPTED, source, 0, 3, 1, 0)
    tracer.emit(EventKind.ROW_DECODE, source, 4, 3, 0, 20, 3)
    for step in range(4, 12):  # tokens in steps 4, 7 and 10: it has 23 of them
        tracer.emit(EventKind.STEP_GRANTED, source, step, 1, 1, 1, 0)
        tracer.emit(EventKind.STEP_DONE, source, step, 1, 0, 10)
    tracer.emit(EventKind.STEP_GRANTED, source, 12, 1, 24, 0, 0)
    tracer.emit(EventKind.ROW_EXTEND, source, 12, 3, 0, 0, 24)  # computed again, with one more
    tracer.emit(EventKind.STEP_DONE, source, 12, 1, 0, 10)
    rows = fold.take(tracer.read_all())
    assert [row.num_wasted_tokens for row in rows] == [*([0] * 8), 23]


def test_steps_are_the_same_in_whatever_pieces_their_records_are_read():
    draw, tracer = Random(7), Tracer()
    source = tracer.source("any")
    tracer.emit(EventKind.REQUEST_ACCEPTED, source, 0, 3, 1, 0)
    for step in range(1, 300):  # planned while the one before runs, and now and then something happens to a row
        tracer.emit(EventKind.STEP_PLANNED, source, step, 2, 2, 2, step % 5)
        tracer.emit(EventKind.STEP_GRANTED, source, step, 2, 2, draw.randrange(3), 900 - step)
        if draw.random() < 0.1:
            tracer.emit(EventKind.PREEMPTED, source, step, 0, 0, 0, 0)
            tracer.emit(EventKind.ROW_EXTEND, source, step, 3, 0, 0, draw.randrange(1, 50))
        if draw.random() < 0.05:
            tracer.emit(EventKind.STEP_PLANNED, source, step + 1, 2, 2, 2, 9)  # void: its number is used again
        kind = EventKind.STEP_VOID if draw.random() < 0.05 else EventKind.STEP_DONE
        tracer.emit(kind, source, step - 1, 1, 0, *([draw.randrange(50)] if kind is EventKind.STEP_DONE else []))
    records = tracer.read_all()
    one_by_one = StepFold()
    rows = [row for place in range(len(records)) for row in one_by_one.take(records[place : place + 1])]
    for size in (len(records), 100, 7):
        fold = StepFold()
        assert [row for at in range(0, len(records), size) for row in fold.take(records[at : at + size])] == rows


def test_after_a_long_absence_only_the_end_of_the_trace_is_read():
    tracer = Tracer()
    source = tracer.source("any")
    log = TraceLog(tracer)
    log.refresh()
    for step in range(9_000):
        tracer.emit(EventKind.STEP_DONE, source, step, 1, 0, 5)
    log.refresh()
    assert log.num_steps == 8_192 and log.num_skipped == 9_000 - 8_192
    assert log.steps[-1].step == 8_999 and len(log.steps) == 600
    assert log.steps_since(log.num_steps - 2)[0] == list(log.steps)[-2:]


@on_loop
async def test_the_block_map_follows_the_pool_by_changes():
    async with serving(step_s=0.002, script=ENDLESS, engine=SMALL) as running:
        asking = [asyncio.create_task(complete(running, f"{i} " * 30, 40)) for i in range(6)]
        blocks, known = BlockMap(), np.zeros(0, np.uint16)
        num_patches = 0
        while not all(task.done() for task in asking):
            shown = block_owners(running.engine, running.engine.status(with_blocks=True))
            assert shown is not None
            news = blocks.next(shown)
            if "cells" in news:
                known = np.frombuffer(b64decode(news["cells"]), "<u2").copy()
            elif "at" in news:
                num_patches += 1
                known[np.frombuffer(b64decode(news["at"]), "<u4")] = np.frombuffer(b64decode(news["to"]), "<u2")
            pool = running.engine.pool
            assert np.count_nonzero(known == 0) == pool.num_free
            assert np.count_nonzero(known == 1) == pool.num_cached
            assert np.count_nonzero(known >= 3) == pool.num_in_use
            for slot in np.unique(known[known >= FIRST_SLOT]) - FIRST_SLOT:
                assert running.engine.block_tables.capacity[slot] > 0
            await asyncio.sleep(0.005)
        assert num_patches > 5
        await asyncio.gather(*asking)


@on_loop
async def test_a_request_is_told_from_its_arrival_to_its_end_without_holes():
    async with serving(step_s=0.005, script=ENDLESS) as running, looking(running) as viewer:
        await viewer.hear()
        body = {"prompt": "x" * 300, "max_tokens": 12, "temperature": 0}
        url, headers = f"{running.server.url}/v1/completions", {"X-Request-Id": "mine"}
        async with running.http.post(url, json=body, headers=headers) as answer:
            assert (await answer.json())["usage"]["completion_tokens"] == 12
        await viewer.say("subscribe", topics={"request": {"id": "cmpl-mine"}, "recent": {}})
        await viewer.update()
        told = viewer.data["request"]
        (sequence,) = told["sequences"]
        pieces = sequence["pieces"]
        assert [kind for kind, *_ in pieces if kind != "gap"] == ["wait", "prefill", "decode", "after"]
        assert pieces[0][1] == 0 and pieces[-1][2] == told["ended_us"]
        assert all(before[2] == after[1] for before, after in pairwise(pieces))
        assert sum(tokens for kind, _, _, tokens in pieces if kind == "prefill") == 300
        assert len(sequence["ticks_us"]) == told["num_generated_tokens"] == 12
        assert sequence["ticks_us"] == sorted(sequence["ticks_us"])
        while not (viewer.data["request"].get("explained")):
            await viewer.update()
        explained = viewer.data["request"]["explained"]
        assert {"intake", "tokenize", "execute"} <= {row["stage"] for row in explained["rows"]}
        assert sum(row["total_us"] for row in explained["rows"]) == pytest.approx(told["ended_us"], abs=2_000)
        assert sum(cause["share"] for cause in explained["causes"]) == pytest.approx(1.0, abs=0.001)
        assert "prompt took" in explained["sentence"]
        (recent,) = viewer.data["recent"]["rows"]
        assert (recent["id"], recent["cause"], recent["num_generated_tokens"]) == ("cmpl-mine", "finish", 12)
        await viewer.say("subscribe", topics={"request": {"id": "cmpl-other"}})
        while (await viewer.update())["full"].get("request") != {"id": "cmpl-other"}:
            pass


async def complete(running: Serving, prompt: str, max_tokens: int) -> Any:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    async with running.http.post(f"{running.server.url}/v1/completions", json=body) as answer:
        return await answer.json()

"""`GET /v1/stream`: many requests over one socket."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import aiohttp
import pytest

from tests.counts import count, first_seed
from tests.deploy.sockets import ENDLESS, Serving, on_loop, serving, until

STREAM = "/v1/stream"
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", {"prompt": "ab", "max_tokens": 7}),
    ("completions", {"prompt": ["ab", "c"], "n": 2, "max_tokens": 5, "logprobs": 2}),
    ("chat", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "logprobs": True, "top_logprobs": 1}),
    ("chat", {"messages": [{"role": "user", "content": "hi"}], "n": 3, "stream_options": {"include_usage": True}}),
    ("completions", {"prompt": "x", "stop": ["e"], "stream_options": {"continuous_usage_stats": True}}),
]


async def events(serving: Serving, endpoint: str, body: dict[str, Any], request_id: str) -> list[bytes]:
    """The bodies of the server-sent events of the same request."""
    path = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}[endpoint]
    headers = {"X-Request-Id": request_id}
    async with serving.http.post(serving.server.url + path, json=body | {"stream": True}, headers=headers) as response:
        parts = (await response.read()).split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    return [part.removeprefix(b"data: ") for part in parts[:-2]]


async def chunks(serving: Serving, endpoint: str, body: dict[str, Any], request_id: str) -> list[bytes]:
    """The bodies of the chunks, as raw bytes."""
    found = []
    async with serving.client() as client:
        await client.send("create", id=request_id, endpoint=endpoint, body=body)
        while True:
            data = (await client.socket.receive(timeout=60)).data
            if data.startswith('{"type":"done"'):
                return found
            if data.startswith('{"type":"chunk"'):
                head, _, rest = data.partition(',"body":')
                assert json.loads(head + "}").keys() == {"type", "id", "seq"}
                found.append(rest[:-1].encode())


def without_date(body: bytes) -> bytes:
    """Removes the only member in which two requests may differ."""
    before, _, rest = body.partition(b'"created":')
    return before + rest.partition(b",")[2]


async def check_identical(serving: Serving, endpoint: str, body: dict[str, Any]) -> None:
    """Chunks equal events byte for byte in one of 8 tries, as the tokens of one chunk vary."""
    body = {"seed": 7} | body
    for attempt in range(8):
        ours = [without_date(found) for found in await chunks(serving, endpoint, body, f"same-{attempt}")]
        await serving.check_quiet()
        theirs = [without_date(found) for found in await events(serving, endpoint, body, f"same-{attempt}")]
        await serving.check_quiet()
        if ours == theirs:
            return
    raise AssertionError(f"never the same chunks: {ours} {theirs}")


@on_loop
async def test_chunks_are_the_bytes_of_server_sent_events():
    async with serving(step_s=0.002) as running:
        for endpoint, body in BODIES:
            await check_identical(running, endpoint, body)


@pytest.mark.slow
@on_loop
async def test_chunks_are_the_bytes_of_server_sent_events_for_random_requests():
    draw = random.Random(first_seed())
    async with serving(step_s=0.001) as running:
        for _ in range(count(8, 200)):
            fields = {
                "n": draw.choice([1, 1, 2, 3]),
                "max_tokens": draw.randint(1, 12),
                "seed": draw.randrange(1000),
                "stop": draw.choice([None, ["e"], ["th", "a"]]),
                "logprobs": draw.choice([None, 0, 3]),
                "ignore_eos": draw.random() < 0.5,
            }
            prompt = "".join(draw.choices("abé✓ ", k=draw.randint(1, 30)))
            await check_identical(running, "completions", {"prompt": prompt} | fields)


@on_loop
async def test_an_answer_is_created_chunks_usage_stats_done():
    async with serving() as running, running.client() as client:
        await client.create("a", max_tokens=3, ignore_eos=True, stats=True, nonsense=1)
        await client.receive_until("done")
        kinds = [message["type"] for message in client.received]
        assert kinds[0] == "created" and kinds[-3:] == ["usage", "stats", "done"]
        assert set(kinds[1:-3]) == {"chunk"}
        assert [message["seq"] for message in client.received[1:]] == list(range(1, len(kinds)))
        assert client.received[0] == {
            "type": "created",
            "id": "a",
            "request_id": "cmpl-a",
            "ignored_fields": ["nonsense"],
        }
        assert client.of("a", "usage")[0]["usage"]["completion_tokens"] == 3
        stats = client.of("a", "stats")[0]
        assert stats["num_chunks"] == len(client.of("a")) and 0 < stats["ttft_s"] <= stats["duration_s"]
        assert client.of("a", "done")[0]["reason"] == "finish"
        await running.check_quiet()


@on_loop
async def test_requests_of_one_socket_do_not_wait_for_each_other():
    async with serving(step_s=0.002, script=ENDLESS) as running, running.client() as client:
        await client.create("long", max_tokens=400)
        await client.receive_until("chunk", "long")
        for i in range(5):
            await client.create(f"short-{i}", prompt=f"p{i}", max_tokens=2)
        for _ in range(5):
            await client.receive_until("done")
        assert not client.of("long", "done")
        assert all(len(client.text(f"short-{i}")) == 2 for i in range(5))


@on_loop
async def test_an_id_can_be_used_again_when_it_is_done_and_not_before():
    async with serving(step_s=0.002, script=ENDLESS) as running, running.client() as client:
        await client.create("a", max_tokens=50)
        await client.create("a", max_tokens=2)
        error = await client.receive_until("error")
        assert (error["error"]["param"], error["status"], error["in_reply_to"]) == ("id", 400, "create")
        await client.receive_until("done")
        await client.create("a", max_tokens=2)
        await client.receive_until("done")


@on_loop
async def test_cancel_ends_a_request_with_usage_and_done():
    async with serving(step_s=0.002, script=ENDLESS) as running, running.client() as client:
        await client.create("a", max_tokens=400)
        await client.receive_until("chunk")
        await client.send("cancel", id="a")
        assert (await client.receive_until("done"))["reason"] == "cancel"
        assert 0 < client.of("a", "usage")[0]["usage"]["completion_tokens"] < 400
        await client.send("cancel", id="a")  # it has ended, which the client cannot know: nothing happens
        await client.send("credit", id="a", n=1)
        assert not await client.receive_waiting(0.05)
        await running.check_quiet()


@on_loop
async def test_a_bad_body_is_told_as_over_http_and_the_others_go_on():
    async with serving(step_s=0.002, script=ENDLESS) as running, running.client() as client:
        await client.create("good", max_tokens=30)
        for body, param in (
            ({"prompt": "a", "temperature": "hot"}, "temperature"),
            ({"prompt": "a" * 600}, "prompt"),
            ({"prompt": "a", "stream": False}, "stream"),
            ({"prompt": "a", "use_beam_search": True, "n": 2}, "stream"),
            ({}, "prompt"),
        ):
            await client.send("create", id="bad", endpoint="completions", body=body)
            error = await client.receive_until("error", "bad")
            assert (error["error"]["param"], error["status"]) == (param, 400), error
        await client.send("create", id="bad", endpoint="completions", body={"prompt": "a", "model": "none"})
        assert (await client.receive_until("error", "bad"))["status"] == 404
        await client.receive_until("done", "good")
        assert len(client.text("good")) == 30


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "type"),
        ({"type": 1}, "type"),
        ({"type": "made-up", "id": "a"}, "type"),
        ({"type": "create", "endpoint": "chat", "body": {}}, "id"),
        ({"type": "create", "id": "", "endpoint": "chat", "body": {}}, "id"),
        ({"type": "create", "id": "i" * 129, "endpoint": "chat", "body": {}}, "id"),
        ({"type": "create", "id": "a", "endpoint": "embeddings", "body": {}}, "endpoint"),
        ({"type": "create", "id": "a", "endpoint": "chat", "body": []}, "body"),
        ({"type": "create", "id": "a", "endpoint": "chat", "body": {}, "credit": -1}, "credit"),
        ({"type": "create", "id": "a", "endpoint": "chat", "body": {}, "credit": True}, "credit"),
        ({"type": "create", "id": "a", "endpoint": "chat", "body": {}, "resume": "yes"}, "resume"),
        ({"type": "credit", "id": "a", "n": 2**31}, "n"),
        ({"type": "credit", "id": "a", "last": -1}, "last"),
        ({"type": "resume", "id": "a", "last": 0}, "token"),
        ({"type": "resume", "id": "a", "token": "t", "last": 0}, "token"),
    ],
)
@on_loop
async def test_a_message_that_is_wrong_is_told_where(message, param):
    async with serving() as running, running.client() as client:
        await client.socket.send_str(json.dumps(message))
        error = await client.receive_until("error")
        assert error["error"]["param"] == param
        await client.create("after", max_tokens=2)
        await client.receive_until("done", "after")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a":NaN}', '{"a":' * 40 + "1" + "}" * 40])
@on_loop
async def test_text_that_is_no_json_object_is_told_and_the_socket_goes_on(text):
    async with serving() as running:
        async with running.client() as client:
            await client.create("before", max_tokens=60, ignore_eos=True)
            await client.socket.send_str(text)
            error = await client.receive_until("error")
            assert (error["id"], error["in_reply_to"], error["error"]["code"]) == (None, None, "invalid_json")
            await client.receive_until("done", "before")
        async with running.http.ws_connect(f"{running.server.url}/v1/responses") as socket:
            await socket.send_str(text)
            error = await socket.receive_json(timeout=60)
            assert (error["type"], error["status"], error["error"]["code"]) == ("error", 400, "invalid_json")
            await socket.send_json({"type": "response.create", "input": "hi", "max_output_tokens": 2})
            assert (await socket.receive_json(timeout=60))["type"] == "response.created"


@on_loop
async def test_a_text_frame_that_is_no_utf8_closes_with_1007():
    async with serving() as running, running.client() as client:
        await client.socket.send_frame(b'{"type": "\xff"}', aiohttp.WSMsgType.TEXT)
        assert (await client.receive_until("error"))["error"]["code"] == "invalid_json"
        assert await client.close_code() == 1007


@on_loop
async def test_binary_closes_with_1003():
    async with serving() as running, running.client() as client:
        await client.socket.send_bytes(b"{}")
        assert (await client.receive_until("error"))["status"] == 415
        assert await client.close_code() == 1003


@on_loop
async def test_too_many_requests_on_a_socket_get_429_and_too_many_sockets_close_with_1013():
    limits = {"ws_max_streams": 2, "ws_max_sockets": 1}
    async with serving(step_s=0.002, script=ENDLESS, **limits) as running, running.client() as client:
        for i in range(3):
            await client.create(str(i), max_tokens=100)
        error = await client.receive_until("error")
        assert (error["id"], error["status"], error["retry_after_s"]) == ("2", 429, 1.0)
        async with running.client() as second:
            assert (await second.receive())["status"] == 503
            assert await second.close_code() == 1013


@on_loop
async def test_a_full_engine_is_told_as_429_with_when_to_try_again():
    from dataclasses import replace

    from millrace.stages.testing.scripted.engine import SMALL

    small = replace(SMALL, max_admitted_requests=1)
    async with serving(step_s=0.002, script=ENDLESS, engine=small) as running, running.client() as client:
        await client.create("a", max_tokens=100)
        await client.receive_until("chunk")
        await client.create("b", max_tokens=1)
        error = await client.receive_until("error", "b")
        assert error["status"] == 429 and error["retry_after_s"] > 0 and error["seq"] == 1


@on_loop
async def test_a_socket_that_closes_ends_its_requests():
    async with serving(step_s=0.005, script=ENDLESS) as running:
        for how in ("close", "cut"):
            async with running.client() as client:
                for i in range(3):
                    await client.create(str(i), prompt=str(i), max_tokens=400)
                await client.receive_until("chunk")
                if how == "cut":
                    client.cut()
            await running.check_ended()


@on_loop
async def test_a_draining_server_lets_requests_end_and_then_closes_with_1001():
    async with serving(step_s=0.002, script=ENDLESS) as running, running.client() as busy, running.client() as idle:
        await busy.create("a", max_tokens=60)
        await busy.receive_until("chunk")
        draining = asyncio.create_task(running.server.drain())
        assert (await idle.receive_until("error"))["error"]["code"] == "draining"
        assert await idle.close_code() == 1001
        await busy.create("late", max_tokens=1)
        assert (await busy.receive_until("error", "late"))["status"] == 503
        await busy.receive_until("done", "a")
        assert len(busy.text("a")) == 60
        assert await busy.close_code() == 1001
        assert await draining is True


@on_loop
async def test_a_server_without_an_engine_refuses_the_upgrade():
    from millrace.deploy.config import ServerConfig
    from millrace.deploy.server.server import Server

    async with Server(ServerConfig(port=0)) as server, aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await http.ws_connect(server.url + STREAM)
        assert refused.value.status == 503


@on_loop
async def test_the_route_says_what_it_speaks():
    async with serving() as running:
        async with running.http.get(running.server.url + STREAM) as response:
            assert (response.status, response.headers["Upgrade"]) == (426, "websocket")
            assert (await response.json())["error"]["code"] == "upgrade_required"
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await running.http.ws_connect(running.server.url + STREAM, protocols=("other",))
        assert refused.value.status == 400


@on_loop
async def test_a_key_is_required_before_the_upgrade_and_may_be_a_subprotocol(caplog):
    async with serving(api_key=("sesame",)) as running:
        for options in (
            {},
            {"headers": {"Authorization": "Bearer wrong"}},
            {"protocols": ("millrace.v1", "openai-insecure-api-key.wrong")},
        ):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await running.http.ws_connect(running.server.url + STREAM, **options)
            assert refused.value.status == 401
        for options in (
            {"headers": {"Authorization": "Bearer sesame"}},
            {"protocols": ("millrace.v1", "openai-insecure-api-key.sesame")},
        ):
            async with running.client(**options) as client:
                assert client.socket.protocol == ("millrace.v1" if "protocols" in options else None)
                await client.create("a", max_tokens=1)
                await client.receive_until("done")
        assert "sesame" not in caplog.text


@on_loop
async def test_a_client_that_answers_no_ping_is_taken_for_dead():
    async with serving(step_s=0.002, script=ENDLESS, ws_ping_interval_s=0.1) as running:
        async with running.client(autoping=False) as client:
            await client.create("a", max_tokens=400, credit=1)
            await until(lambda: running.server.service.live)
            await until(lambda: not running.server.service.live)
        async with running.client() as client:  # this client reads, so it gets answers
            await client.create("a", max_tokens=1)
            await client.receive_until("done")
            assert not await client.receive_waiting(0.4)
            await client.create("b", max_tokens=1)
            await client.receive_until("done")

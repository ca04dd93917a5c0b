"""What lives in one front, asked of the other: responses, requests, streams that are resumed, the dashboard's feed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from millrace.deploy.config import ServerConfig
from millrace.deploy.front_processes.other_fronts import whole
from millrace.stages.testing.scripted.engine import SMALL, ScriptedEngine
from millrace.stages.testing.scripted.script import Script
from tests.deploy.front_processes.local_fronts import LocalFronts, local_fronts
from tests.deploy.sockets import on_loop, until

CONFIG = ServerConfig(port=0, api_key=("key-a", "key-b"), admin_key=("admin",), ws_resume_window_s=60.0)
A, B, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("key-a", "key-b", "admin"))
SLOW = 0.01  # seconds a step
PROTOCOLS = ("millrace.v1",)


class Pair:
    """Two fronts and a client of both."""

    def __init__(self, fronts: LocalFronts, session: aiohttp.ClientSession) -> None:
        self.fronts, self.session = fronts, session

    async def ask(self, front: int, method: str, path: str, body: Any = None, headers: Any = A) -> tuple[int, Any]:
        url = self.fronts.urls[front] + path
        async with self.session.request(method, url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def text(self, front: int, path: str, headers: Any = A) -> str:
        async with self.session.get(self.fronts.urls[front] + path, headers=headers) as answer:
            assert answer.status == 200
            return await answer.text()

    def socket(self, front: int, path: str, headers: Any = A) -> Any:
        return self.session.ws_connect(self.fronts.urls[front] + path, headers=headers, protocols=PROTOCOLS)


@asynccontextmanager
async def pair(step_s: float = 0.0, eos_probability: float = 0.0, config: ServerConfig = CONFIG) -> AsyncIterator[Pair]:
    script = Script(eos_probability=eos_probability)
    async with (
        ScriptedEngine(SMALL, script, step_s=step_s) as first,
        ScriptedEngine(SMALL, script, step_s=step_s) as second,
        local_fronts([first, second], config) as fronts,
        aiohttp.ClientSession() as session,
    ):
        yield Pair(fronts, session)


async def receive(socket: Any, *types: str) -> dict[str, Any]:
    while True:
        message: dict[str, Any] = json.loads((await socket.receive(10.0)).data)
        if message["type"] in types:
            return message


@on_loop
async def test_a_stored_response_is_read_continued_and_deleted_through_any_front() -> None:
    async with pair() as both:
        asked = {"model": "scripted", "input": "a", "max_output_tokens": 5}
        status, first = await both.ask(0, "POST", "/v1/responses", asked)
        assert status == 200 and first["id"].startswith("resp_00") and len(first["id"]) == 37
        assert await both.ask(1, "GET", f"/v1/responses/{first['id']}") == (200, first)
        assert (await both.ask(1, "GET", f"/v1/responses/{first['id']}", headers=B))[0] == 404
        status, second = await both.ask(1, "POST", "/v1/responses", asked | {"previous_response_id": first["id"]})
        assert status == 200 and second["id"].startswith("resp_00")
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        status, items = await both.ask(1, "GET", f"/v1/responses/{second['id']}/input_items?order=asc")
        assert status == 200 and len(items["data"]) == 3
        streamed = asked | {"previous_response_id": second["id"], "stream": True}
        async with both.session.post(both.fronts.urls[1] + "/v1/responses", json=streamed, headers=A) as answer:
            events = (await answer.text()).split("\n\n")
            assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert "response.incomplete" in events[-2]
        assert (await both.ask(1, "DELETE", f"/v1/responses/{first['id']}"))[1]["deleted"] is True
        assert (await both.ask(0, "GET", f"/v1/responses/{first['id']}"))[0] == 404
        for unknown in ("resp_00" + 30 * "a", "resp_01" + 30 * "a", "resp_ff" + 30 * "a", "resp_", "nothing"):
            assert (await both.ask(1, "GET", f"/v1/responses/{unknown}"))[0] == 404


@on_loop
async def test_a_background_response_is_cancelled_through_the_other_front() -> None:
    async with pair(SLOW) as both:
        asked = {"model": "scripted", "input": "a", "max_output_tokens": 400, "background": True}
        _, begun = await both.ask(1, "POST", "/v1/responses", asked)
        status, ended = await both.ask(0, "POST", f"/v1/responses/{begun['id']}/cancel")
        assert status == 200 and ended["status"] in ("cancelled", "incomplete")


@on_loop
async def test_a_socket_continues_a_response_of_the_other_front() -> None:
    async with pair() as both:
        asked = {"model": "scripted", "input": "a", "max_output_tokens": 5}
        _, first = await both.ask(0, "POST", "/v1/responses", asked)
        async with both.socket(1, "/v1/responses") as socket:
            create = {"type": "response.create", **asked, "previous_response_id": first["id"], "stream_id": "s"}
            await socket.send_json(create)
            ended = await receive(socket, "response.incomplete", "error")
            assert ended["stream_id"] == "s" and ended["response"]["previous_response_id"] == first["id"]
            await socket.send_json(create | {"previous_response_id": "resp_00" + 30 * "a"})
            assert (await receive(socket, "error"))["error"]["code"] == "response_not_found"


@on_loop
async def test_a_stream_is_resumed_through_the_other_front_and_loses_nothing() -> None:
    async with pair(SLOW) as both:
        body = {"prompt": "a", "max_tokens": 60, "temperature": 0}
        async with both.socket(0, "/v1/stream") as socket:
            await socket.send_json(
                {"type": "create", "id": "x", "endpoint": "completions", "body": body, "resume": True}
            )
            token = (await receive(socket, "created"))["token"]
            assert token.startswith("00")
            chunks = [await receive(socket, "chunk") for _ in range(5)]
            socket._response.connection.transport.abort()
        for front, last, count in ((1, 5, 10), (1, 15, 5), (0, 20, 5)):
            async with both.socket(front, "/v1/stream") as socket:
                await socket.send_json({"type": "resume", "id": "x", "token": token, "last": last})
                assert (await receive(socket, "resumed", "error"))["last"] == last
                chunks += [await receive(socket, "chunk") for _ in range(count)]
                socket._response.connection.transport.abort()
        async with both.socket(1, "/v1/stream") as socket:
            await socket.send_json({"type": "resume", "id": "x", "token": token, "last": 25})
            while (message := await receive(socket, "chunk", "usage", "done"))["type"] != "done":
                chunks += [message] if message["type"] == "chunk" else []
            await socket.send_json({"type": "create", "id": "x", "endpoint": "completions", "body": body})
            assert (await receive(socket, "created", "error"))["type"] == "created"
        assert [chunk["seq"] for chunk in chunks] == list(range(1, len(chunks) + 1))
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["body"]["choices"])
        _, whole = await both.ask(1, "POST", "/v1/completions", body)
        assert text == whole["choices"][0]["text"]
        async with both.socket(1, "/v1/stream", B) as socket:
            await socket.send_json({"type": "resume", "id": "x", "token": token, "last": 0})
            assert (await receive(socket, "error"))["error"]["code"] == "request_not_found"


@on_loop
async def test_running_requests_are_listed_explained_and_aborted_through_any_front() -> None:
    async with pair(SLOW) as both:
        body = {"prompt": "a", "max_tokens": 400}
        names = [f"name-{number}" for number in range(4)]
        asked = [
            asyncio.create_task(both.ask(number % 2, "POST", "/v1/completions", body, A | {"X-Request-Id": name}))
            for number, name in enumerate(names)
        ]
        await until(lambda: all(len(server.service.live) == 2 for server in both.fronts.servers))
        for front in (0, 1):
            rows: list[Any] = []
            cursor: int | None = 0
            while cursor is not None:
                _, page = await both.ask(front, "GET", f"/v1/requests?limit=3&cursor={cursor}")
                rows += page["data"]
                cursor = page["next_cursor"]
            assert sorted(row["client_request_id"] for row in rows) == names
            assert [row["front"] for row in rows] == [0, 0, 1, 1]
            assert (await both.ask(front, "GET", "/v1/requests", headers=B))[1]["data"] == []
            assert (await both.ask(front, "GET", "/load"))[1]["server_load"] == 4
        for name in names:
            assert (await both.ask(1, "GET", f"/v1/requests/{name}/explain"))[0] == 200
            assert (await both.ask(1, "DELETE", f"/v1/requests/{name}", headers=B))[0] == 404
            assert (await both.ask(0, "DELETE", f"/v1/requests/{name}"))[1]["aborted"] is True
        answers = await asyncio.gather(*asked)
        assert [answer["choices"][0]["finish_reason"] for _, answer in answers] == ["abort"] * 4
        status, error = await both.ask(0, "DELETE", "/v1/requests/unknown")
        assert status == 404 and error["error"]["code"] == "request_not_found"


@on_loop
async def test_metrics_are_equal_at_every_front() -> None:
    async with pair() as both:
        for front, tokens in ((0, 3), (1, 4), (1, 5)):
            await both.ask(front, "POST", "/v1/completions", {"prompt": "a", "max_tokens": tokens})
        await both.ask(0, "GET", "/v1/models/unknown")
        found = [figures(await both.text(front, "/metrics")) for front in (0, 1, 0)]
        assert found[0] == found[1] == found[2]
        assert found[0]["vllm:generation_tokens_total"] == 12
        assert found[0]["vllm:request_success_total"] == 3


def figures(text: str) -> dict[str, float]:
    """Sample -> its sum over labels, of what time alone does not change."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not any(word in sample.name for word in ("seconds", "channel", "queue", "_info")):
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


@on_loop
async def test_a_front_can_be_asked_for_by_number_and_keys_are_needed_there_too() -> None:
    async with pair() as both:
        for front in (0, 1):
            assert (await both.ask(0, "GET", f"/health?front={front}", headers={}))[1]["front"] == front
            assert (await both.ask(1, "GET", f"/server_info?front={front}"))[1]["process"]["front"] == front
        assert (await both.ask(0, "GET", "/health?front=2", headers={}))[0] == 400
        assert (await both.ask(0, "GET", "/server_info?front=1", headers={}))[0] == 401
        assert (await both.ask(0, "GET", "/admin/trace?front=1", headers=A))[0] == 401
        assert (await both.ask(0, "GET", "/admin/trace?front=1", headers=ADMIN))[0] == 200
        async with both.socket(0, "/dashboard/feed?front=1", {}) as socket:
            await socket.send_json({"type": "hello", "key": "key-a"})
            hello = await receive(socket, "hello", "error")
            assert hello["front"] == 1 and hello["fronts"] == [0, 1]
            await socket.send_json({"type": "subscribe", "topics": {"fleet": {}}})
            shown = (await receive(socket, "update", "error"))["full"]["fleet"]
            assert shown["front"] == 1 and [one["state"] for one in shown["fronts"]] == ["ready", "ready"]


@on_loop
async def test_a_request_sent_again_through_another_front_gets_the_same_answer() -> None:
    async with pair() as both:
        asked = {"model": "scripted", "input": "a", "max_output_tokens": 5}
        _, first = await both.ask(0, "POST", "/v1/responses", asked)
        for stream in (False, True):
            body = asked | {"previous_response_id": first["id"], "stream": stream}
            headers = A | {"Idempotency-Key": f"key-{stream}"}
            found = []
            for front in (1, 1, 0):
                async with both.session.post(
                    both.fronts.urls[front] + "/v1/responses", json=body, headers=headers
                ) as answer:
                    again = answer.headers.get("Idempotent-Replayed")
                    found.append((answer.status, answer.headers["Content-Type"], again, await answer.read()))
            assert found[0][0] == 200 and b"resp_00" in found[0][3]
            assert {one[:2] + one[3:] for one in found} == {found[0][:2] + found[0][3:]}
            assert [one[2] for one in found] == [None, "true", "true"]


@on_loop
async def test_of_equal_requests_with_a_key_one_is_made_whichever_fronts_get_them() -> None:
    async with pair(SLOW) as both:
        for stream in (False, True):
            body = {"prompt": "a", "max_tokens": 8, "ignore_eos": True, "stream": stream}

            async def post(front: int, key: str, body: Any = body, headers: Any = A) -> tuple[int, str | None, bytes]:
                url, headers = both.fronts.urls[front] + "/v1/completions", headers | {"Idempotency-Key": key}
                async with both.session.post(url, json=body, headers=headers) as answer:
                    return answer.status, answer.headers.get("Idempotent-Replayed"), await answer.read()

            for key in (f"{number}-{stream}" for number in range(3)):
                found = await asyncio.gather(*(post(front, key) for front in (0, 1, 1, 0)))
                assert {status for status, _, _ in found} == {200} and len({data for _, _, data in found}) == 1
                assert sorted(again or "" for _, again, _ in found) == ["", "true", "true", "true"]
                assert [(await post(front, key))[1:] for front in (0, 1)] == [("true", found[0][2])] * 2
                assert (await post(1, key, headers=B))[2] != found[0][2]
                for front in (0, 1):
                    assert (await post(front, key, body | {"max_tokens": 3}))[0] == 409
        kept = [len(server._kept_answers) for server in both.fronts.servers]
        assert sum(kept) == 12 and min(kept) > 0
        assert (await post(0, "a b"))[0] == (await post(1, "\u00e9"))[0] == 400


@on_loop
async def test_a_stream_that_was_passed_on_is_made_to_its_end_without_its_client() -> None:
    async with pair(SLOW) as both:
        body = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "stream": True}
        for number in range(4):
            front = number % 2  # one of two passes it on
            url, headers = both.fronts.urls[front] + "/v1/completions", A | {"Idempotency-Key": f"left-{number}"}
            async with both.session.post(url, json=body, headers=headers) as answer:
                first = await answer.content.readuntil(b"\n\n")
                answer.close()
            async with both.session.post(
                both.fronts.urls[1 - front] + "/v1/completions", json=body, headers=headers
            ) as answer:
                whole_answer = await answer.read()
                assert answer.headers["Idempotent-Replayed"] == "true"
            assert whole_answer.startswith(first) and whole_answer.endswith(b"data: [DONE]\n\n")


@on_loop
async def test_what_a_front_passes_on_is_encoded_as_the_client_asked() -> None:
    async with pair() as both:
        for asked, encoding in (({"Accept-Encoding": "gzip"}, "gzip"), ({}, None)):
            url = both.fronts.urls[0] + "/static/vendor/scalar.standalone.js?front=1"
            async with both.session.head(url, headers=asked, skip_auto_headers=("Accept-Encoding",)) as answer:
                assert answer.status == 200 and answer.headers.get("Content-Encoding") == encoding


@on_loop
async def test_a_stream_of_another_front_is_cut_behind_events_of_any_length() -> None:
    class Content:
        async def iter_any(self) -> AsyncIterator[bytes]:
            for part in (b"a\n", b"\nb", long[:200_000], long[200_000:] + b"\n\nc\n\nd\n", b"\n", b"e"):
                yield part

    long = b"x" * 300_000
    content: Any = Content()
    cut = [events async for events in whole(content, b"\n\n")]
    assert cut == [b"a\n\n", b"b" + long + b"\n\nc\n\n", b"d\n\n", b"e"]


@on_loop
async def test_what_is_about_all_fronts_does_without_one_that_is_away() -> None:
    async with pair() as both:
        for is_away in (False, True):
            if is_away:
                await both.fronts.servers[1].stop()
            for method in ("GET", "HEAD"):
                for path in ("/load", "/v1/requests"):
                    async with both.session.request(method, both.fronts.urls[0] + path, headers=A) as answer:
                        assert answer.status == 200, (method, path, is_away)
        status, body = await both.ask(0, "DELETE", "/v1/requests/unknown")
        assert status == 503 and "front 1, which has what is asked for, is away" in body["error"]["message"]

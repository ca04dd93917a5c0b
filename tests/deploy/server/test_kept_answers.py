"""`Idempotency-Key`: what is sent again is answered once more, and computed once."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from yarl import URL

from millrace.deploy.errors import ApiError
from millrace.deploy.server import kept_answers
from millrace.deploy.server.kept_answers import KeptAnswers
from millrace.runtime.env.log import captured_logs
from millrace.stages.testing.scripted.engine import SMALL
from tests.deploy.sockets import ENDLESS, Serving, on_loop, serving, until

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"prompt": "hi", "max_tokens": 60, "ignore_eos": True}
TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}


class Asker:
    """A client of a server with a scripted engine. Answers have ids of their own: equal ones were made once."""

    def __init__(self, running: Serving) -> None:
        self.running = running

    @property
    def kept(self) -> KeptAnswers:
        return self.running.server._kept_answers

    async def post(
        self, key: str | None, body: Mapping[str, Any], path: str = TEXT, **headers: str
    ) -> tuple[int, Mapping[str, str], bytes]:
        sent = headers if key is None else {"Idempotency-Key": key, **headers}
        async with self.running.http.post(self.running.server.url + path, json=body, headers=sent) as answer:
            return answer.status, answer.headers, await answer.read()

    async def error(self, key: str, body: Mapping[str, Any]) -> tuple[int, str]:
        status, _, data = await self.post(key, body)
        return status, json.loads(data)["error"]["message"]


@asynccontextmanager
async def asking(**settings: Any) -> AsyncIterator[Asker]:
    async with serving(engine=SMALL, **settings) as running:
        yield Asker(running)
        await running.check_quiet()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [(TEXT, BODY), (CHAT, TALK), ("/v1/messages", TALK), ("/api/chat", {"messages": TALK["messages"]})],
)
@on_loop
async def test_of_equal_requests_with_a_key_one_is_computed_and_all_are_answered(
    path: str, asked: dict[str, Any], stream: bool
) -> None:
    async with asking() as asker:
        body = asked | {"stream": stream}
        answers = await asyncio.gather(*(asker.post("a", body, path) for _ in range(3)))
        answers += [await asker.post("a", body, path)]
        assert {status for status, _, _ in answers} == {200}
        assert len({data for _, _, data in answers}) == 1, "to the byte, with its id and its time"
        assert len({headers["Content-Type"] for _, headers, _ in answers}) == 1
        assert sorted(headers.get("Idempotent-Replayed", "") for _, headers, _ in answers) == ["", *3 * ["true"]]
        others = [await asker.post(key, body, path) for key in ("b", None)]
        assert len({data for _, _, data in [answers[0], *others]}) == (3 if path != "/api/chat" else len(others) + 1)


@on_loop
async def test_a_key_belongs_to_its_request_and_its_owner() -> None:
    async with asking(api_key=("first", "second")) as asker:
        mine, theirs = {"Authorization": "Bearer first"}, {"Authorization": "Bearer second"}
        _, _, one = await asker.post("a", BODY, **mine)
        status, headers, other = await asker.post("a", BODY, **theirs)
        assert status == 200 and "Idempotent-Replayed" not in headers and other != one
        status, _, data = await asker.post("a", BODY | {"max_tokens": 3}, **mine)
        assert status == 409 and json.loads(data)["error"]["code"] == "idempotency_key_reused"
        assert (await asker.post("a", BODY, **mine))[2] == one


@on_loop
async def test_a_client_that_lost_its_connection_gets_all_of_the_answer_on_another() -> None:
    async with asking(script=ENDLESS) as asker:
        body = BODY | {"stream": True, "max_tokens": 200}
        url, headers = asker.running.server.url + TEXT, {"Idempotency-Key": "a"}
        async with asker.running.http.post(url, json=body, headers=headers) as answer:
            first = await answer.content.readuntil(b"\n\n")
            answer.close()
        _, headers_again, whole = await asker.post("a", body)
        assert headers_again["Idempotent-Replayed"] == "true" and whole.startswith(first)
        assert whole.count(b"data: ") > 2 and whole.endswith(b"data: [DONE]\n\n")
        assert (await asker.post("a", body))[2] == whole


@on_loop
async def test_an_error_is_told_to_all_who_wait_and_kept_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking() as asker:
        wrong = BODY | {"max_tokens": -1}
        assert {status for status, _, _ in await asyncio.gather(*(asker.post("a", wrong) for _ in range(2)))} == {400}
        assert len(asker.kept) == 0 and (await asker.post("a", BODY))[0] == 200
        before = asker.running.server.service.require_engine

        def refuse() -> Any:
            raise ApiError("rate_limit_exceeded", "full", retry_after_s=1.0)

        monkeypatch.setattr(asker.running.server.service, "require_engine", refuse)
        assert (await asker.post("b", BODY))[0] == 429 and (await asker.post("a", BODY))[0] == 200
        monkeypatch.setattr(asker.running.server.service, "require_engine", before)
        assert (await asker.post("b", BODY))[0] == 200


@on_loop
async def test_an_unforeseen_error_is_logged_once_for_several_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asking() as asker:
        before = asker.running.server.service.require_engine

        def fail() -> Any:
            raise RuntimeError("planted")

        monkeypatch.setattr(asker.running.server.service, "require_engine", fail)
        with captured_logs() as events:
            answers = await asyncio.gather(*(asker.post("a", BODY, **{"X-Request-Id": f"id-{n}"}) for n in range(3)))
        assert {status for status, _, _ in answers} == {500} and len({data for _, _, data in answers}) == 1
        (failed,) = [event for event in events if event["event"] == "request.failed"]
        assert failed["error"] == "RuntimeError" and failed["request_id"].encode() in answers[0][2]
        assert len(asker.kept) == 0
        monkeypatch.setattr(asker.running.server.service, "require_engine", before)


@on_loop
async def test_an_unforeseen_error_is_logged_after_the_last_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    count, is_spoilt = KeptAnswers._count, False

    def spoil(kept: KeptAnswers, place: tuple[str, str], num_bytes: int) -> None:
        if is_spoilt:
            raise RuntimeError("planted")
        count(kept, place, num_bytes)

    monkeypatch.setattr(KeptAnswers, "_count", spoil)
    async with asking(step_s=0.002) as asker:
        with captured_logs() as events:
            asked = asyncio.ensure_future(asker.post("a", BODY))
            await until(lambda: len(asker.kept) == 1)
            is_spoilt = True
            asked.cancel()
            await until(lambda: len(asker.kept) == 0)
        (failed,) = [event for event in events if event["event"] == "request.failed"]
        assert failed["error"] == "RuntimeError" and failed["request_id"]


@on_loop
async def test_answers_are_kept_for_a_time_and_within_a_number_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_answers, "KEPT_S", 0.05)
    async with asking(response_store_bytes=6000) as asker:
        _, _, one = await asker.post("a", BODY)
        await until(lambda: len(asker.kept) == 0)
        assert (await asker.post("a", BODY))[2] != one
        monkeypatch.setattr(kept_answers, "KEPT_S", 60.0)
        answers = [(await asker.post(f"k{number}", BODY))[2] for number in range(8)]
        assert len(asker.kept) < 5 and asker.kept._num_bytes <= 6000
        assert (await asker.post("k7", BODY))[2] == answers[7] and (await asker.post("k0", BODY))[2] != answers[0]
        status, message = await asker.error("long", BODY | {"max_tokens": 400, "logprobs": 5})
        assert status == 413 and "more than 6000 bytes, the most that is kept; send it without" in message


@on_loop
async def test_a_key_of_odd_characters_or_without_a_store_is_refused() -> None:
    async with asking() as asker:
        for key in ("", "a b", "x" * 256, "\u00e9"):
            assert await asker.error(key, BODY) == (400, "Idempotency-Key: must have 1 to 255 visible ASCII characters")
    async with asking(response_store_bytes=0) as asker:
        status, message = await asker.error("a", BODY)
        assert status == 400 and message.endswith("(response_store_bytes = 0); send the request without it")


@on_loop
async def test_a_server_that_stops_leaves_no_answer_half_made() -> None:
    async with serving(engine=SMALL, script=ENDLESS) as running:
        asker = Asker(running)
        asked = asyncio.ensure_future(asker.post("a", BODY | {"stream": True, "max_tokens": 400}))
        await until(lambda: len(asker.kept) == 1)
        await running.server.stop()
        asked.cancel()
        await asyncio.wait([asked])
        assert len(asker.kept) == 0


@on_loop
async def test_a_stream_that_is_too_long_to_be_kept_ends_with_that_error() -> None:
    async with asking(script=ENDLESS, response_store_bytes=2000) as asker:
        status, _, data = await asker.post("a", BODY | {"stream": True, "max_tokens": 200})
        *_, last, done = data.removesuffix(b"\n\n").split(b"\n\n")
        assert status == 200 and done == b"data: [DONE]"
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "body_too_large"
        assert len(asker.kept) == 0


@on_loop
async def test_an_answer_that_breaks_off_is_followed_by_no_other_on_its_connection() -> None:
    async with asking(script=ENDLESS, response_store_bytes=2000) as asker:
        body = json.dumps(TALK | {"max_tokens": 200, "stream": True})
        port = URL(asker.running.server.url).port
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/messages HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Idempotency-Key: a\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        data = await reader.read()  # to the end of the connection
        writer.close()
        assert data.startswith(b"HTTP/1.1 200 ") and b"message_start" in data
        assert data.count(b"HTTP/1.1 ") == 1 and not data.endswith(b"\r\n0\r\n\r\n")


@on_loop
async def test_an_answer_that_makes_room_for_others_is_freed_at_once() -> None:
    async with asking(response_store_bytes=6000) as asker:
        await asker.post("first", BODY)
        freed = weakref.ref(*asker.kept._kept.values())
        for number in range(8):
            await asker.post(f"k{number}", BODY)
        gc.collect()
        assert freed() is None


@on_loop
async def test_a_server_that_stops_sends_those_who_wait_to_another_one() -> None:
    async with serving(engine=SMALL, script=ENDLESS, step_s=0.01) as running:
        asker = Asker(running)
        asked = asyncio.ensure_future(asker.post("a", BODY | {"max_tokens": 400}))
        await until(lambda: len(asker.kept) == 1)
        await running.server.stop()
        status, headers, data = await asked
        assert status == 503 and json.loads(data)["error"]["code"] == "draining" and "Retry-After" in headers

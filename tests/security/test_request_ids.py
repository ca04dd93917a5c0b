"""One id for many requests, and invalid ids."""

from __future__ import annotations

import asyncio
import codecs

import aiohttp
import pytest

from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.script import Script
from tests.deploy.running import head_bytes, post_bytes
from tests.security.oracle import TEXT
from tests.security.wire import tell


def expected_text(prompt: str, max_tokens: int) -> str:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(bytes(Script().expected(list(prompt.encode()), params)), final=True)


def test_two_hundred_requests_of_one_id_never_mix(server):
    async def one(session: aiohttp.ClientSession, i: int) -> str:
        body = {"prompt": f"number {i}", "temperature": 0, "max_tokens": 10, "ignore_eos": True, "stream": i % 2 == 0}
        headers = {"X-Request-Id": "the-same"}
        async with session.post(server.url + TEXT, json=body, headers=headers) as response:
            assert response.status == 200 and response.headers["X-Request-Id"] == "the-same"
            if not body["stream"]:
                answer = await response.json()
                assert answer["choices"][0]["text"] == expected_text(body["prompt"], 10)
                return answer["id"]
            events = (await response.read()).decode().split("\n\n")[:-2]
            import json

            chunks = [json.loads(event[6:]) for event in events]
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected_text(body["prompt"], 10)
            (answer_id,) = {chunk["id"] for chunk in chunks}
            return answer_id

    async def everyone() -> list[str]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(one(session, i) for i in range(200)))

    ids = asyncio.run(everyone())
    assert all(answer_id.startswith("cmpl-the-same") for answer_id in ids)


@pytest.mark.parametrize("wanted", ["a", "req_1.2:3/4-5", "x" * 128, "host:8000"])
def test_an_id_of_the_charset_is_used_and_echoed(server, wanted):
    answer = server.post(TEXT, {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": wanted})
    assert answer.headers["x-request-id"] == wanted and answer.json["id"] == f"cmpl-{wanted}"
    assert server.get("/nope", {"X-Request-Id": wanted}).headers["x-request-id"] == wanted


@pytest.mark.parametrize(
    "wanted", ["", " ", "x" * 129, "x" * 8000, "a b", "é", "a,b", "a;b", '"a"', "a\tb", "<script>", "%0d"]
)
def test_an_id_outside_the_charset_is_replaced(server, wanted):
    answer = server.post(TEXT, {"prompt": "a", "max_tokens": 1}, {"X-Request-Id": wanted})
    assert answer.status == 200
    given = answer.headers["x-request-id"]
    assert given != wanted and answer.json["id"] == f"cmpl-{given}"


@pytest.mark.parametrize("wanted", ["a\r\nX-Injected: 1", "a\nX-Injected: 1", "a\rX-Injected: 1", "x" * 65536])
def test_an_id_that_breaks_lines_breaks_nothing(server, wanted):
    told = tell(server, head_bytes("GET", "/health", {"X-Request-Id": wanted, "Connection": "close"}))
    assert told.num_responses == 1
    assert b"x-injected" not in told.data.lower()


@pytest.mark.parametrize("wanted", ["mine", "with space", "x" * 200, "\r\nX: y"])
def test_an_id_in_the_body_is_held_to_the_same(server, wanted):
    answer = server.raw(post_bytes(TEXT, {"prompt": "a", "max_tokens": 1, "request_id": wanted}))
    assert answer.status == 200
    assert (answer.headers["x-request-id"] == wanted) == (wanted == "mine")

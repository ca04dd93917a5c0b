"""The right answers of a chaos run are learned from a server that may refuse once, and not for ever."""

from __future__ import annotations

import asyncio
import json
import random

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from millrace.deploy.cli.chaos.cases import REFERENCE_TRIES, draw_cases, learn
from millrace.stages.errors import NotStartedError

CHOICES = [{"index": 0, "text": "a", "message": {"content": "a"}, "finish_reason": "stop"}]
ANSWER = json.dumps({"choices": CHOICES, "usage": {"completion_tokens": 1}})


def learned(num_refusals: int) -> int:
    """Learns one case from a server that refuses so often. Returns how often it was asked."""
    count = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        if count <= num_refusals:
            return web.Response(status=500, text="send the same request again")
        return web.Response(text=ANSWER)

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", answer)
        (case,) = draw_cases(random.Random(1), 1)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            await learn(session, str(server.make_url("")).rstrip("/"), [case], 1)
        assert case.choices[0].text == "a" and case.num_tokens == 1

    asyncio.run(main())
    return count


def test_a_refused_question_is_asked_again_a_few_times() -> None:
    assert learned(0) == 1
    assert learned(REFERENCE_TRIES - 1) == REFERENCE_TRIES


def test_a_reference_that_goes_on_refusing_is_an_error_with_its_words() -> None:
    with pytest.raises(NotStartedError, match="answered 500 to case 0: b'send the same request again'"):
        learned(REFERENCE_TRIES)

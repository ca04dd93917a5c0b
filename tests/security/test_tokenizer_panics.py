"""A tokenizer that panics, as Rust code does: with an exception that is no `Exception`. Its request ends, the
stage and the server go on."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.runtime.env.log import captured_logs
from millrace.stages.testing.scripted.engine import ScriptedEngine
from tests.deploy.running import Answer
from tests.security.oracle import CANARIES, CHAT, TEXT, check_error


class PanicException(BaseException):
    """As pyo3 has it."""


ASKED = [
    (TEXT, {"prompt": "hi", "max_tokens": 2}),
    (TEXT, {"prompt": "hi", "max_tokens": 2, "stream": True}),
    (TEXT, {"prompt": ["hi", "a" * 5000], "max_tokens": 2}),
    (CHAT, {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ("/tokenize", {"prompt": "hi"}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/detokenize", {"tokens": [97]}),
]


def panic(*_: Any) -> Any:
    raise PanicException(f"byte index 1 is not a char boundary of `{CANARIES[0]}`")


@pytest.mark.parametrize(("path", "body"), ASKED, ids=str)
def test_a_panic_ends_its_request_and_nothing_else(audit, path, body):
    async def run() -> None:
        async with Server(ServerConfig(port=0)) as server, ScriptedEngine(max_model_len=1024) as engine:
            server.attach(engine)
            tokenizer = engine.tokenizer
            sound = {name: getattr(tokenizer, name) for name in ("encode", "encode_text", "encode_chat", "decode")}
            async with aiohttp.ClientSession() as session:

                async def ask() -> Answer:
                    async with session.post(server.url + path, json=body) as response:
                        headers = {name.lower(): value for name, value in response.headers.items()}
                        return Answer(response.status, headers, await response.read(), 0.0)

                await ask()
                for name in sound:
                    setattr(tokenizer, name, panic)
                with audit.armed():
                    answer = await asyncio.wait_for(ask(), 10)
                check_error(answer, 500)
                assert answer.error["code"] in ("tokenizer_error", "detokenizer_error")
                for name, function in sound.items():
                    setattr(tokenizer, name, function)
                if isinstance(body.get("prompt"), list):
                    body["prompt"] = ["hi", "a"]
                assert (await asyncio.wait_for(ask(), 10)).status == 200

    with captured_logs() as events:
        asyncio.run(run())
    assert any(event["event"] == "tokenizer.failed" for event in events)

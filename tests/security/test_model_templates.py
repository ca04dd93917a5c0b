"""A hostile chat template that came with a checkpoint, behind the server.
(`tests/model/text/test_chat_template.py` has forty of
them, alone.) Its requests are 400 within the budget, streams beside them go on, and nothing inner is told."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import millrace.model.demo as demo
from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.model.text.chat_template import ChatTemplate
from millrace.model.text.tokenizer import Tokenizer
from millrace.stages.testing.scripted.engine import ScriptedEngine
from millrace.stages.tokenize.prompt_encoder import ModelEncoder
from tests.deploy.running import Answer
from tests.security.oracle import CHAT, TEXT, check_error
from tests.security.watch import PEAK_MIB, Memory

HOSTILE = {
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "invalid_value",
    "{{ '{0.__class__.__init__.__globals__}'.format_map({'0': 'x'}) }}": "invalid_value",
    "{% include 'config.json' %}": "invalid_value",
    "{% for a in range(10 ** 10) %}{% endfor %}": "template_limit",
    "{{ 'a' * 10 ** 9 }}": "template_limit",
    "{{ 10 ** (10 ** 10) }}": "template_limit",
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.read(Path(next(iter(demo.__path__))) / "weights")


@pytest.mark.slow
@pytest.mark.parametrize(("template", "code"), HOSTILE.items(), ids=lambda value: value[:40])
def test_a_hostile_template_is_400_and_delays_no_other_request(tokenizer, audit, template, code):
    async def post(session: aiohttp.ClientSession, url: str, body: Any) -> Answer:
        began = time.perf_counter()
        async with session.post(url, json=body) as response:
            headers = {name.lower(): value for name, value in response.headers.items()}
            return Answer(response.status, headers, await response.read(), time.perf_counter() - began)

    async def run() -> None:
        async with Server(ServerConfig(port=0)) as server, ScriptedEngine() as engine:
            server.attach(engine)
            tokenize: Any = engine.pipeline.stages["tokenize"]
            async with aiohttp.ClientSession() as session:
                body = {"prompt": "a", "max_tokens": 2}
                assert (await post(session, server.url + TEXT, body)).status == 200
                assert (await post(session, server.url + CHAT, {"messages": "none"})).status == 400
                tokenize.encoder = ModelEncoder(tokenizer, ChatTemplate(template, tokenizer), "hostile")
                memory = Memory(os.getpid())
                before = memory.now
                memory.forget_peak()
                audit.is_armed = True
                chat = {"messages": [{"role": "user", "content": "a" * 600}], "max_tokens": 2}  # long: in a thread
                pending = asyncio.create_task(post(session, server.url + CHAT, chat))
                while not pending.done():
                    answer = await post(session, server.url + "/detokenize", {"tokens": [97]})
                    assert answer.status == 200
                    await asyncio.sleep(0.01)
                answer = await pending
                check_error(answer, 400)
                assert answer.error["code"] == code and answer.seconds < 20
                audit.is_armed = False
                assert audit.take() == [] and memory.peak - before <= PEAK_MIB
                tokenize.encoder = engine.tokenizer
                assert (await post(session, server.url + TEXT, body)).status == 200

    asyncio.run(run())

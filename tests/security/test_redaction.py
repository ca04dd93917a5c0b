"""No prompt and no key appears in the log at its most verbose level, in the metrics, or in errors.

Not even where an unexpected exception quotes one.
"""

from __future__ import annotations

import asyncio
import logging
import os

import aiohttp
import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.runtime.env.log import configure, get_logger, shutdown
from millrace.stages.testing.scripted.engine import ScriptedEngine
from tests.deploy.running import RunningServer
from tests.security.oracle import ADMIN_KEY, CHAT, KEY, TEXT
from tests.security.watch import Watch, warm_up

PROMPT, SALT, USER = "prompt-must-not-be-logged", "salt-must-not-be-logged", "user-unknown"
SECRETS = (PROMPT, SALT, USER, KEY, ADMIN_KEY)


@pytest.mark.slow
def test_nothing_that_clients_send_is_told_again():
    keys = {"api_key": [KEY], "admin_key": [ADMIN_KEY]}
    bearer = {"Authorization": f"Bearer {KEY}"}
    options = keys | {"log_format": "json", "log_level": "debug"}
    with RunningServer(server=options, audit=True) as server:
        warm_up(server, bearer, fully=True)
        watch = Watch(server)
        told = []
        text = {"prompt": PROMPT, "cache_salt": SALT, "user": USER, "max_tokens": 3}
        chat = {"messages": [{"role": "user", "content": PROMPT}], "cache_salt": SALT, "user": USER}
        for path, body in (
            (TEXT, text),
            (TEXT, text | {"stream": True, "logprobs": 2}),
            (TEXT, text | {"unknown": PROMPT}),
            (TEXT, text | {"temperature": 9}),
            (TEXT, text | {"max_tokens": 10**6}),
            (TEXT, text | {"prompt": PROMPT * 2000}),
            (CHAT, chat | {"max_tokens": 3}),
            (CHAT, chat | {"messages": [{"role": "user", "content": [{"type": "image_url", "text": PROMPT}]}]}),
            ("/tokenize", {"prompt": PROMPT, "unknown": 1}),
        ):
            for headers in (bearer, {}, {"Authorization": f"Bearer {KEY}x"}, {"x-api-key": KEY + ADMIN_KEY}):
                answer = server.post(path, body, headers)
                if answer.status != 200:
                    told.append(answer.body.decode())
        server.get(f"/v1/models?api_key={KEY}&prompt={PROMPT}", bearer)
        server.get("/admin/cache/reset", {"Authorization": f"Bearer {ADMIN_KEY}"}, "POST")
        paths = ("/metrics", "/server_info", "/openapi.json", "/docs", "/v1/models")
        told += [server.get(path, bearer).body.decode() for path in paths]
        watch.check()
        server.signal()
        assert server.process.wait(20) == 0
        told.append(server.errors())
    assert "request.fields_ignored" in told[-1] and "server.stopped" in told[-1]
    for text_told in told:
        assert not [secret for secret in SECRETS if secret in text_told]


class Quoting(BaseException):
    """As a panic that shows the text it stumbled over."""


@pytest.mark.parametrize("error", [RuntimeError, Quoting])
@pytest.mark.parametrize("stage", ["tokenize", "execute", "detokenize"])
def test_an_exception_that_quotes_a_prompt_is_logged_without_its_words(audit, tmp_path, stage, error):
    log = tmp_path / "log"

    async def run() -> None:
        async with Server(ServerConfig(port=0)) as server, ScriptedEngine() as engine:
            server.attach(engine)
            broken = engine.pipeline.stages[stage]

            async def quote(batch, out):
                try:
                    raise KeyError(PROMPT)
                except KeyError as inner:
                    raise error(f"cannot read `{PROMPT}`") from inner

            async with aiohttp.ClientSession() as session:
                async with session.post(server.url + TEXT, json={"prompt": PROMPT, "max_tokens": 3}) as response:
                    assert response.status == 200
                broken.handle = quote
                with audit.armed():
                    async with session.post(server.url + TEXT, json={"prompt": PROMPT, "max_tokens": 3}) as response:
                        assert response.status >= 500 and PROMPT not in await response.text()

    fd = os.open(log, os.O_CREAT | os.O_WRONLY)
    try:
        configure("json", "debug", fd=fd, with_error_messages=False)
        asyncio.run(run())
        shutdown()
    finally:
        os.close(fd)
    lines = log.read_text()
    assert error.__name__ in lines and "in quote" in lines, "the log says what went wrong, and where"
    assert PROMPT not in lines


def test_what_asyncio_says_of_an_exception_has_no_words_of_it_either(tmp_path):
    fd = os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY)
    try:
        configure("json", fd=fd, with_error_messages=False)
        error = ValueError(PROMPT)
        logging.getLogger("asyncio").error("Task exception was never retrieved: %r", error, exc_info=error)
        get_logger("test").error("thing.failed", exc_info=error)
        shutdown()
    finally:
        os.close(fd)
    lines = (tmp_path / "log").read_text()
    assert lines.count("ValueError (message withheld)") == 2 and PROMPT not in lines

"""`millrace health`, against a server on the same loop."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path

import pytest

from millrace.deploy.cli.health import run
from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.runtime.pipeline import Health
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.testing.scripted.engine import scripted_engine
from tests.deploy.running import free_port


def ask(url: str | None = None, config: ServerConfig | None = None, *, live: bool = False) -> int:
    options = Namespace(url=url, live=live, wait_s=20.0)
    return run(options, EngineConfig(), config or ServerConfig())


@pytest.mark.parametrize("is_unix", [False, True])
def test_the_exit_code_is_0_when_requests_are_taken_or_with_live_until_it_must_restart(
    is_unix: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ServerConfig(port=free_port(), uds=str(tmp_path / "socket") if is_unix else None, root_path="/llm")

    async def run() -> None:
        asked = lambda live=False: asyncio.to_thread(ask, None, config, live=live)  # noqa: E731
        async with Server(config) as server:
            assert (await asked(), await asked(True)) == (1, 0)
            async with scripted_engine() as engine:
                server.attach(engine)
                assert (await asked(), await asked(True)) == (0, 0)
                lost = Health("dead", reason="its GPU is lost")
                monkeypatch.setattr(type(engine), "health", property(lambda self: lost))
                assert (await asked(), await asked(True)) == (1, 1)

    asyncio.run(run())
    words = capsys.readouterr().out.splitlines()
    states = ["loading: the model is loading", "alive", "ready", "alive", "dead: its GPU is lost"]
    assert words == [*states, "dead: its GPU is lost"]


def test_where_nothing_answers_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(f"http://127.0.0.1:{free_port()}") == 1
    assert capsys.readouterr().err.startswith("millrace: no answer: ")


def test_an_address_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be like http://127.0.0.1:8000"):
        ask("127.0.0.1:8000")

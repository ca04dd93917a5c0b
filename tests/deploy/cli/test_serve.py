"""`millrace serve` within this process, with the test double in the place of a model."""

from __future__ import annotations

import argparse
import gc
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.deploy.cli import serve
from millrace.deploy.cli.main import main
from millrace.deploy.config import ServerConfig
from millrace.deploy.server.server import Server
from millrace.runtime.env.log import captured_logs
from millrace.stages.config import EngineConfig
from millrace.stages.engine_settings import ModelImpl
from millrace.stages.errors import ConfigError
from millrace.stages.testing.scripted.engine import ScriptedEngine, scripted_engine


@pytest.fixture(autouse=True)
def only_what_stays_is_frozen() -> Iterator[None]:
    """A server unfreezes everything when it ends, with it what `pytest_collection_finish` froze."""
    yield
    gc.collect()
    gc.freeze()


def run_with(monkeypatch: pytest.MonkeyPatch, seen: list[bool], error: Exception | None = None) -> int:
    """The command's exit code after a stop once it is ready. `seen`: whether the collector was on, at the start of the
    engine and then of the server."""

    @asynccontextmanager
    async def engine(*_: Any) -> AsyncIterator[ScriptedEngine]:
        seen.append(gc.isenabled())
        if error is not None:
            raise error
        async with scripted_engine() as scripted:
            yield scripted

    def ready(_: Server, model_impl: str) -> None:
        seen.append(gc.isenabled())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(serve, "_make_engine", engine)
    monkeypatch.setattr(serve, "_print_ready", ready)
    return serve.run(argparse.Namespace(sources={}, trimmed=[]), EngineConfig(), ServerConfig(port=0))


def printed(
    monkeypatch: pytest.MonkeyPatch, descriptor: int, model_impl: ModelImpl = "millrace", **config: Any
) -> None:
    """Prints the ready line of a server to a descriptor."""
    server = SimpleNamespace(
        service=SimpleNamespace(model_names=("demo", "other")), url="http://127.0.0.1:1", config=ServerConfig(**config)
    )
    with open(descriptor, "w", encoding="ascii", closefd=False) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        serve._print_ready(cast(Server, server), model_impl)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("config", "lines"),
    [
        ({}, ["API       http://127.0.0.1:1/v1", "dashboard http://127.0.0.1:1/dashboard", "docs      http://127.0.0.1:1/docs"]),
        ({"disable_docs": True}, ["API       http://127.0.0.1:1/v1", "dashboard http://127.0.0.1:1/dashboard"]),
        ({"root_path": "/llm", "disable_docs": True}, ["API       http://127.0.0.1:1/llm/v1", "dashboard http://127.0.0.1:1/llm/dashboard"]),
    ],
)  # fmt: skip
def test_on_a_terminal_the_ready_line_names_what_one_can_open(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], lines: list[str]
) -> None:
    master, slave = pty.openpty()
    printed(monkeypatch, slave, **config)
    text = os.read(master, 4096).decode().splitlines()
    os.close(master)
    os.close(slave)
    assert text[0] == "ready: model demo, other"
    assert [line.strip() for line in text[1:]] == lines


def test_the_ready_line_says_that_a_model_runs_through_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "line").open("w+") as file:
        printed(monkeypatch, file.fileno(), "transformers")
        file.seek(0)
        assert json.loads(file.read())["model_impl"] == "transformers"
    master, slave = pty.openpty()
    printed(monkeypatch, slave, "transformers")
    assert os.read(master, 4096).decode().splitlines()[0] == "ready: model demo, other (through transformers)"
    os.close(master)
    os.close(slave)


def test_a_ready_line_that_cannot_be_printed_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with captured_logs() as logs:
        printed(monkeypatch, writing)
    assert [line["event"] for line in logs] == ["ready_line.not_printed"]
    os.write(writing, b"later output goes nowhere, and raises nothing")
    os.close(writing)


def test_garbage_collection_is_off_until_the_server_is_ready(monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []
    assert run_with(monkeypatch, seen) == 0
    assert seen == [False, True] and gc.isenabled()


def test_a_server_that_ended_leaves_nothing_frozen(monkeypatch: pytest.MonkeyPatch):
    assert run_with(monkeypatch, []) == 0
    assert gc.get_freeze_count() == 0


def test_the_collector_is_on_again_after_a_start_that_failed(monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []
    with pytest.raises(ConfigError, match="no such model"):
        run_with(monkeypatch, seen, ConfigError("no such model"))
    assert seen == [False] and gc.isenabled()


def test_several_engines_are_in_processes_of_their_own() -> None:
    assert serve.choose_mode("auto", 2) == serve.choose_mode("split", 2) == "split"
    assert serve.choose_mode("auto") == "inline"
    with pytest.raises(ConfigError, match="mode = inline: data_parallel_size = 2 has its engines in processes"):
        serve.choose_mode("inline", 2)


def test_flags_of_vllm_reach_the_server_and_are_told_in_the_log(monkeypatch, capfd) -> None:
    servers: list[Server] = []

    @asynccontextmanager
    async def engine(*_: Any) -> AsyncIterator[ScriptedEngine]:
        async with scripted_engine() as scripted:
            yield scripted

    def ready(server: Server, model_impl: str) -> None:
        servers.append(server)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(serve, "_make_engine", engine)
    monkeypatch.setattr(serve, "_print_ready", ready)
    flags = ["--disable-fastapi-docs", "--disable-log-stats", "--disable-log-requests", "--allowed-origins", '["*"]']
    assert main(["serve", *flags, "--tokenizer-mode", "auto", "--uvicorn-log-level", "info", "--port", "0"]) == 0
    config = servers[0].config
    assert (config.disable_docs, config.stats_interval_s, config.log_requests) == (True, 0.0, False)
    assert (config.cors_allow_origin, config.log_level) == (("*",), "info")
    lines = [line for line in capfd.readouterr().err.splitlines() if "flag.accepted" in line]
    assert (
        len(lines) == 6 and 'flag="--tokenizer-mode auto" ours=null reason="fast tokenizers alone are read"' in lines[4]
    )

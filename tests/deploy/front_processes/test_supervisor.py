"""`Supervisor` with children that have no server and no model."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from millrace.deploy.cli.fronts.supervise import _start
from millrace.deploy.cli.serve import StopSignals
from millrace.deploy.config import ServerConfig
from millrace.deploy.front_processes.child_slot import ChildSlot
from millrace.deploy.front_processes.supervisor import ServerPlan, Supervisor
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from tests.deploy.sockets import on_loop, until

LIGHT = "tests.deploy.front_processes.light_child"


def plan(**server: Any) -> ServerPlan:
    return ServerPlan(
        front_module=LIGHT,
        core_module=LIGHT,
        engine_config=EngineConfig(threads=1),
        server_config=ServerConfig(port=0, front_processes=2, **server),
        sources={},
    )


@asynccontextmanager
async def supervised(made: ServerPlan) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(made)
    try:
        supervisor.open()
        yield supervisor
    finally:
        await supervisor.aclose()


@on_loop
async def test_a_front_that_ends_is_replaced_and_all_end_in_order(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with supervised(plan()) as supervisor:
        await supervisor.start()
        assert supervisor.models == ["light"] and supervisor.port > 0
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o077 == 0
        first, second = supervisor.fronts
        kept, killed = second.pid, first.pid
        os.kill(killed, signal.SIGKILL)
        await until(lambda: first.num_restarts == 1 and first.state == "ready")
        assert first.pid not in (0, killed) and second.pid == kept and second.num_restarts == 0
        assert not supervisor.failed.is_set()
        await supervisor.stop()
        assert {slot.state for slot in [*supervisor.fronts, *supervisor.cores]} == {"stopped"}
        assert supervisor.failure is None
    assert not list(tmp_path.iterdir())


@on_loop
async def test_what_a_first_child_cannot_do_is_raised_as_it_says_it() -> None:
    async with supervised(plan(host="localhost")) as supervisor:
        with pytest.raises(ConfigError, match="it has no name"):
            await supervisor.start()


@on_loop
async def test_a_signal_drains_a_front_that_serves_while_another_does_not_start() -> None:
    async with supervised(plan(host="127.0.0.2")) as supervisor:
        stop = StopSignals(120.0)
        stop.on_early = lambda: pytest.fail("it is not early")
        try:
            starting = asyncio.create_task(_start(supervisor, stop))
            await until(lambda: supervisor.serves.is_set() and stop.on_early is None)
            assert not starting.done()
            os.kill(os.getpid(), signal.SIGTERM)
            assert not await asyncio.wait_for(starting, 60.0)
            assert supervisor.fronts[0].state == "ready", "it lives until it has drained"
            await asyncio.wait_for(supervisor.stop(), 60.0)
            assert {slot.state for slot in supervisor.fronts} == {"stopped"} and supervisor.failure is None
        finally:
            stop.close()


class LongPause:
    def note_ready(self) -> None:
        pass

    def note_end(self, now_s: float) -> float | None:
        return 600.0

    def describe(self) -> str:
        return "never"


class EndsAtOnce(ChildSlot):
    async def _run_one(self) -> str:
        self.note_ready()
        return "at once"


@on_loop
async def test_a_stop_does_not_wait_for_the_pause_before_a_restart() -> None:
    slot = EndsAtOnce("child", "none", list, lambda word: None, lambda: None, LongPause())
    running = asyncio.create_task(slot.run())
    await until(lambda: slot.num_restarts == 1)
    slot.stop()
    await asyncio.wait_for(running, 60.0)
    assert slot.state == "stopped"

"""Engines for several fronts with scripted devices, and fronts for them, in one process: no model, ready at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from millrace.runtime.env.env import LiveEnv
from millrace.runtime.processes.transport import SocketTransport
from millrace.stages.config import EngineConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.machines.connected_hosts import look_at_first
from millrace.stages.machines.engine_server import EngineServer
from millrace.stages.machines.engine_sources import Address
from millrace.stages.machines.membership import Members
from millrace.stages.machines.route_engine import OwnPeer, RouteEngine, front_config
from millrace.stages.outputs import ModelInfo
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.engine import SMALL, _device, _loaded, _model, _resolved
from millrace.stages.testing.scripted.script import Script
from millrace.stages.traffic.labels import Labels
from millrace.stages.traffic.traffic_rules import TrafficRules

KEY = b"k" * 16
CONFIG = replace(SMALL, max_num_seqs=8)
SCRIPT = Script()
LONG = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


class ScriptedMachines:
    """Engines by address. One that is not there refuses connections."""

    def __init__(self, step_s: float = 0.001, config: EngineConfig = CONFIG) -> None:
        self.config, self.step_s = _resolved(config, {}), step_s  # of engines that start now
        self._env = LiveEnv(0)
        self.servers: dict[str, EngineServer] = {}
        self.stuck: list[str] = []  # engines that a front takes for such, while its test runs

    async def start(self, *names: str, labels: Labels | None = None, script: Script = SCRIPT, **overrides: Any) -> None:
        """Starts engines at these hosts, port 1. Those of another script have other weights."""
        for name in names:
            config = replace(self.config, **overrides)
            options: dict[str, Any] = {"prefix_key": KEY, "link_timeout_s": None, "labels": labels}
            server = EngineServer(config, self._env, partial(self._load, script), **options)
            await server.start()
            if script is not SCRIPT:
                server._files = {**server._files, "model.safetensors": f"{script}"}
            self.servers[f"{name}:1"] = server

    async def stop(self, name: str) -> None:
        """Ends an engine, as when its process does."""
        await self.servers.pop(f"{name}:1").aclose()

    async def aclose(self) -> None:
        for server in self.servers.values():
            await server.aclose()
        await self._env.aclose()

    def _load(self, script: Script, config: EngineConfig, env: Any, phases: Any) -> Any:
        model = _model(config, script, env, self.step_s)
        return _loaded(config, model), _device(model)

    def peer(self, address: Address) -> ScriptedPeer:
        return ScriptedPeer(self, f"{address[0]}:{address[1]}")

    async def read_text(self, config: EngineConfig, phases: Any, env: Any) -> Callable[[ModelInfo], Any]:
        loaded = _loaded(self.config, _model(self.config, SCRIPT, env))
        return lambda info: replace(loaded, info=info)

    @asynccontextmanager
    async def front(
        self, *sources: Any, own: EngineConfig | None = None, traffic: TrafficRules | None = None
    ) -> AsyncIterator[RouteEngine]:
        """A front of the engines that the sources name."""
        members = Members(sources, self.peer)
        await members.open()
        ready = await look_at_first(members, traffic)
        config = front_config(own or EngineConfig(), ready, len(members.peers))
        async with RouteEngine(config, members, KEY, read_text=self.read_text, traffic=traffic) as engine:
            yield engine
            assert not self.stuck


class ScriptedPeer:
    """See `EnginePeer`."""

    def __init__(self, machines: ScriptedMachines, name: str) -> None:
        self._machines, self.name = machines, name

    def note_stuck(self) -> None:
        self._machines.stuck.append(self.name)

    async def connect(self) -> SocketTransport:
        server = self._machines.servers.get(self.name)
        if server is None or server.state != "ready":
            raise ConnectionRefusedError
        return await OwnPeer(server).connect()


class Named:
    """A source that a test changes; see `EngineSource`."""

    text, period_s = "a test", 0.01

    def __init__(self, *names: str) -> None:
        self.names: Sequence[str] = names

    async def look(self) -> Sequence[Address]:
        return [(name, 1) for name in self.names]


def with_machines(test: Callable[[ScriptedMachines], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Runs a test on a loop, with machines that end after it."""

    @wraps(test)
    def run() -> None:
        async def live() -> None:
            machines = ScriptedMachines()
            try:
                await test(machines)
            finally:
                await machines.aclose()

        asyncio.run(live())

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest would look for a fixture
    return run


async def answer(engine: Engine, prompt: str, params: SamplingParams = SHORT) -> list[int]:
    """The tokens of an answer."""
    return [token async for output in engine.generate(prompt, params) for token in output.outputs[0].token_ids]


def expected(prompt: str, params: SamplingParams = SHORT, script: Script = SCRIPT) -> list[int]:
    """What any engine of a script answers."""
    return script.expected(list(prompt.encode()), params)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(250.0):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def states(engine: Engine) -> dict[str, str]:
    """The state of each engine, by host."""
    return {one["address"].removesuffix(":1"): one["state"] for one in engine.engines}

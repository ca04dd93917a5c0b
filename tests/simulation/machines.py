"""Runs of a front with engines on machines of their own, in virtual time: these live on when a link ends.

As `fleet.py`, with the same draws, strikes and checks. A machine starts its engine again when it has ended. The front,
the engine servers and the links between them are the real ones; links have their pings and their limit of silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

from millrace.runtime.processes.link import Link
from millrace.runtime.processes.transport import SocketTransport
from millrace.runtime.simulation.run import SimEnv, SimResult
from millrace.runtime.startup.phases import Phases
from millrace.stages.config import EngineConfig
from millrace.stages.engine import engine
from millrace.stages.fleet.front_table import front_of, to_front
from millrace.stages.machines import engine_peers, engine_server, front_link
from millrace.stages.machines.engine_server import LINK_TIMEOUT_S, EngineServer
from millrace.stages.machines.membership import Members
from millrace.stages.machines.route_engine import RouteEngine, front_config, look_at_all
from millrace.stages.outputs import ModelInfo
from millrace.stages.split import process_client
from millrace.stages.split.engine_core import EngineCore
from millrace.stages.testing.scripted.engine import _loaded, _model, _resolved
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.simulation.fleet import FleetWorld, load_scripted, run_fleet_seed, watch_requests
from tests.simulation.memory_link import MemorySocket, env_of_a_process, take_memory_sockets
from tests.simulation.world import Report

KEY = b"k" * 16
RESTART_S = 0.5  # until a machine starts its engine again
DRAIN_S = 30.0
HANDSHAKE_S = 5.0  # until a connection that nothing answers is given up


class Machine:
    """An engine server, and those that replace it; see `EnginePeer`, and `FleetChild` of `fleet.py`."""

    def __init__(self, world: MachinesWorld, index: int) -> None:
        self.name = f"machine{index}"
        self.model: Any = None
        self.is_killed = False
        self.process: Any = None  # the server; None: it starts, or has ended
        self.ends: list[MemorySocket] = []  # of connections, those here
        self.silent_until_s = 0.0
        self._world, self._index = world, index
        self._killed = asyncio.Event()
        self._task = asyncio.ensure_future(self._run())

    async def aclose(self) -> None:
        """Ends the machine."""
        self._task.cancel()
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def connect(self) -> SocketTransport:
        loop = asyncio.get_running_loop()
        if loop.time() < self.silent_until_s:
            await asyncio.sleep(HANDSHAKE_S)
            raise TimeoutError
        if self.process is None or self.process.state != "ready":
            raise ConnectionRefusedError
        ours, theirs = MemorySocket.pair(loop, self._world.env.random("link"))
        self.ends.append(theirs)
        self.process.take(SocketTransport(cast(Any, theirs)))
        return SocketTransport(cast(Any, ours))

    def note_stuck(self) -> None:
        """Its own machine does not notice."""

    def kill(self) -> None:
        """As SIGKILL of its process: nothing more leaves it."""
        self.is_killed = True
        for end in self.ends:
            end.cut()
        self._killed.set()

    def report(self) -> None:
        if self.process is not None:
            self.process._report_to_routers()

    def name_of(self, request_id: str) -> str:
        return to_front(request_id)

    def requests_of(self, end: MemorySocket) -> set[str]:
        """The requests that came over the connection with this end here."""
        if self.process is None:
            return set()
        numbers = {front.number for front in self.process.fronts.values() if front._link._transport.sock is end}
        return {to_front(one) for one in self.process._exit.live if front_of(one) in numbers}

    async def _run(self) -> None:
        for number in itertools.count():
            env = env_of_a_process(self._world.env)
            labels = self._world.labels_of(self._index)
            options: Any = {"prefix_key": KEY, "link_timeout_s": LINK_TIMEOUT_S, "labels": labels}
            server = EngineServer(self._world.config, env, self._load, **options)
            server._instance = f"{self._index}/{number}"  # the env's secrets are alike in all processes
            try:
                await server.start()
                server._files = {**server._files, **self._world.files_of(self._index)}
                self.process, self.ends, self.is_killed = server, [], False
                await self._serve(server)
            except OSError:
                pass  # a start that fails
            finally:
                self.process = None
                await server.aclose()
                await env.aclose()
            await asyncio.sleep(RESTART_S)

    async def _serve(self, server: EngineServer) -> None:
        self._killed.clear()
        ends: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(one.wait()) for one in (self._killed, server.drain_asked, server.ended)
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if server.drain_asked.is_set() and not self.is_killed:
                by = "migrate" if server.asked_by == "migrate" else "finish"
                ends.append(asyncio.ensure_future(server.drain(DRAIN_S, by)))  # type: ignore[arg-type]
                await asyncio.wait([ends[0], ends[-1]], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
            await asyncio.wait(ends)

    def _load(self, config: EngineConfig, env: Any, phases: Phases) -> Any:
        return load_scripted(self._world, self, config, self._world.setup.config.data_parallel_size)


class MachinesWorld(FleetWorld):
    """See `FleetWorld`."""

    rules: TrafficRules | None = None

    def labels_of(self, index: int) -> dict[str, str]:
        """What the operator says of an engine."""
        return {}

    def files_of(self, index: int) -> dict[str, str]:
        """Digests of files that are other ones in an engine."""
        return {}

    async def live(self) -> Report:
        with _on_machines(self.env):
            count = self.setup.config.data_parallel_size
            self.config = _resolved(replace(self.setup.config, data_parallel_size=1), {})
            machines = [Machine(self, index) for index in range(count)]
            self.children = cast(Any, machines)
            try:
                ready = await look_at_all(machines, self.rules)
                config = front_config(self.setup.config, ready)
                members, parts = Members.of(machines), {"read_text": self._read_text, "traffic": self.rules}
                made = RouteEngine(config, members, KEY, env=self.env, **parts)
                watch_requests(made, self)
                self.engine = cast(Any, made)
                await made.start()
                try:
                    return await self._live(self.engine)
                finally:
                    await made.stop()
            finally:
                for machine in machines:
                    await machine.aclose()
                await self.env.aclose()
                self.failure.cancel()

    async def _live(self, engine: Any) -> Report:
        for core in engine.core.processes.cores:
            core.leave = partial(self._note_silence, core.leave)
        return await super()._live(engine)

    def _note_silence(self, leave: Callable[[], None]) -> None:
        self.report.states["silent"] += 1
        leave()

    def child_of(self, core: EngineCore) -> Any:
        return self.children[core.index]

    def ends_of(self, core: EngineCore) -> tuple[Any, Any] | None:
        host: Any = None if core.client is None else core.client._child
        return None if host is None else (host.transport.sock, host.transport.sock.peer)

    def requests_in(self, core: EngineCore) -> set[str]:
        ends = self.ends_of(core)
        return set() if ends is None else self.child_of(core).requests_of(ends[1])

    def note_partition(self, child: Any, seconds: float) -> None:
        child.silent_until_s = self.env.now() + seconds
        for end in child.ends:
            end.holds_end = end.peer.holds_end = True

    async def _read_text(self, config: EngineConfig, phases: Any, env: Any) -> Callable[[ModelInfo], Any]:
        loaded = _loaded(self.config, _model(self.config, self.script, env))
        return lambda info: replace(loaded, info=info)


@contextlib.contextmanager
def _on_machines(env: SimEnv) -> Iterator[None]:
    """Links use the virtual clock, and what looks at files and memory does nothing."""
    take_memory_sockets(env.loop)
    link, no_gc = partial(Link, clock=env.now), SimpleNamespace(collect=lambda: 0)
    with (
        patch.object(process_client, "Link", link),
        patch.object(front_link, "Link", link),
        patch.object(engine_peers, "Link", link),
        patch.object(engine_server, "digests_of", lambda config, with_times: {}),
        patch.object(engine_server, "gc", no_gc),
        patch.object(engine, "gc", no_gc),
    ):
        yield


def run_machines_seed(seed: int, *, keep_trace: bool = False) -> SimResult[Report]:
    """As `run_fleet_seed`, with engines on machines of their own."""
    return run_fleet_seed(seed, keep_trace=keep_trace, make_world=MachinesWorld, flags=" --machines")

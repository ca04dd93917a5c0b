"""The fronts of one server in this process: real ones, with scripted engines, links and Unix sockets."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.deploy.config import ServerConfig
from millrace.deploy.front_processes.all_fronts import AllFronts
from millrace.deploy.front_processes.front_member import FrontMember
from millrace.deploy.front_processes.kept_metrics import KeptMetrics
from millrace.deploy.front_processes.other_fronts import OtherFronts
from millrace.deploy.front_processes.words import (
    CODEC,
    LINK_TIMEOUT_S,
    FleetStates,
    FrontState,
    MetricsAsked,
    MetricsTaken,
    TrafficSettings,
)
from millrace.deploy.http.listening import ListeningSockets
from millrace.deploy.server.server import Server
from millrace.runtime.processes.link import Link
from millrace.runtime.processes.transport import SocketTransport
from millrace.stages.engine.engine import Engine


class SupervisorEnd:
    """The supervisor's end of the link to one front."""

    def __init__(
        self,
        number: int,
        sock: socket.socket,
        metrics: KeptMetrics,
        on_traffic: Callable[[TrafficSettings], object] = lambda word: None,
    ) -> None:
        self._number, self._metrics, self._on_traffic = number, metrics, on_traffic
        self._link = Link(SocketTransport(sock), CODEC, self._receive, lambda error: None, timeout_s=LINK_TIMEOUT_S)
        self._link.start()

    def post(self, word: Any) -> None:
        self._link.post(word)

    def close(self) -> None:
        self._link.close()

    def _receive(self, word: Any) -> None:
        if isinstance(word, MetricsTaken):
            self._metrics.take(self._number, word)
        elif isinstance(word, MetricsAsked):
            self._metrics.ask(self, word.number)
        elif isinstance(word, TrafficSettings):
            self._on_traffic(word)


@dataclass(frozen=True)
class LocalFronts:
    """All fronts. Each has a port of its own, so that a test can choose one; with `shares_port` they have one."""

    servers: Sequence[Server]
    metrics: KeptMetrics
    states: Sequence[FrontState]
    ends: Mapping[int, SupervisorEnd]

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    def tell(self, states: Sequence[FrontState]) -> None:
        """The supervisor says how the fronts are."""
        for end in self.ends.values():
            end.post(FleetStates(states, has_engines=True))


@asynccontextmanager
async def local_fronts(
    engines: Sequence[Engine], config: ServerConfig, *, shares_port: bool = False, models: Sequence[str] = ()
) -> AsyncIterator[LocalFronts]:
    """Serves started engines, each behind a front, and under a name of its own if there are `models`."""
    config = replace(config, front_processes=len(engines))
    ends: dict[int, SupervisorEnd] = {}
    metrics = KeptMetrics(lambda: ends)
    names = [(model,) for model in models] or [()] * len(engines)
    states = [FrontState(number, os.getpid(), "ready", None, 0, names[number]) for number in range(len(engines))]
    servers: list[Server] = []

    def tell_traffic(word: TrafficSettings) -> None:
        for number, end in ends.items():
            if word.model is None or word.model in names[number]:
                end.post(word)

    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for number, engine in enumerate(engines):
            ours, theirs = socket.socketpair()
            ends[number] = SupervisorEnd(number, ours, metrics, tell_traffic)
            stack.callback(ends[number].close)
            member = FrontMember(theirs, ends_process=False)
            member.link.start()
            stack.callback(member.close)
            own = replace(config, served_model_name=names[number]) if models else config
            fronts = OtherFronts(member, number, folder, own)
            listening = ListeningSockets.open(own, shares_port=shares_port)
            if shares_port:
                config = replace(config, port=listening.port)
            server = await stack.enter_async_context(Server(own, listening, {}, AllFronts(fronts)))
            server.attach(engine)
            if engine.traffic is not None:
                member.follow_traffic(engine.traffic.change)
            stack.callback(member.tell_last_metrics)
            member.tell_metrics(fronts.own_metrics)
            member.has_started = True
            member.link.setup.set_result(None)  # all later words are no setup
            servers.append(server)
        fronts_of_all = LocalFronts(servers, metrics, states, ends)
        fronts_of_all.tell(states)
        yield fronts_of_all

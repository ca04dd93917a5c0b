"""The engines of a front that run already, elsewhere: `ConnectedHosts` connects to them, and starts none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ...runtime.env.log import get_logger
from ...runtime.processes.auth import AuthError
from ...runtime.processes.transport import SocketTransport
from ..config import EngineConfig
from ..engine.core import EngineSetup
from ..errors import ConfigError
from ..executor.engine_host import StartHost
from ..fleet.hosts import Fleet, Hosts
from ..fleet.placement import Place
from ..outputs import ModelInfo
from ..split.engine_core import EngineCore
from ..split.process_client import EngineDied
from ..split.protocol import EngineReady
from ..traffic.traffic_rules import GROUPS, TrafficRules
from .engine_peers import AGAIN_PAUSE_S, LONGEST_PAUSE_S, EnginePeer, look_at, reached, reason_of
from .engine_server import LINK_TIMEOUT_S
from .likeness import check_alike
from .membership import Members

OTHERS_S = 0.5  # that the start of a front waits for further engines, once one is there

log = get_logger("millrace.stages")


class ConnectedHost:
    """See `EngineHost`: an engine is over for its front when the connection is."""

    death_s = 0.0

    def __init__(self, peer: EnginePeer, transport: SocketTransport, link_timeout_s: float | None) -> None:
        self.transport, self.link_timeout_s = transport, link_timeout_s
        self.pid = 0  # of another machine
        self._peer, self._sock = peer, transport.sock
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if self._sock.fileno() >= 0:
            self._peer.note_stuck()
        with suppress(OSError):  # it is closed
            self._sock.shutdown(socket.SHUT_RDWR)
        if not self._ended.done():
            self._ended.set_result(f"the end of the connection to {self._peer.name}")


class ConnectedHosts:
    """See `Hosts`. An engine that is away is dialled until it is there again, with longer and longer pauses."""

    setting, inline = "--engine", "`millrace serve` on one machine"
    drain_themselves = outlive_links = True

    def __init__(
        self,
        setup: EngineSetup,
        members: Members,
        prefix_key: bytes | None,
        link_timeout_s: float | None = LINK_TIMEOUT_S,
    ) -> None:
        self._setup, self._members, self._link_timeout_s = setup, members, link_timeout_s
        self.prefix_key = prefix_key
        self._waiting: dict[int, SocketTransport] = {}  # connections that were made for the next start
        self._reached: dict[int, EnginePeer] = {}  # the last one that was reached, by place

    def places(self) -> Sequence[Place]:
        """Without shares: the engines run already."""
        return [Place(self._setup.config)] * len(self._members.peers)

    def present(self) -> Sequence[int]:
        return list(self._members.present)

    def name_of(self, index: int) -> str | None:
        peer = self._members.peers[index]
        return None if peer is None else peer.name

    def start_host(self, index: int) -> StartHost | None:
        return partial(self._connect, index)

    def config_of(self, core: EngineCore, cores: Sequence[EngineCore]) -> EngineConfig:
        return self._setup.config

    def config_of_text(self) -> EngineConfig:
        return replace(self._setup.config, data_parallel_size=1)

    async def open(self) -> None:
        """Does nothing."""

    async def first(
        self, starting: Mapping[int, asyncio.Future[EngineReady]], rules: TrafficRules
    ) -> dict[int, EngineReady]:
        """Of the engines that are there, or as soon as one is: the others are reached later."""
        pending: set[asyncio.Future[EngineReady]] = set(starting.values())
        limit_s: float | None = None
        while pending:
            done, pending = await asyncio.wait(pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            if any(one.exception() is None for one in done):
                limit_s = OTHERS_S
        ready = {index: one.result() for index, one in starting.items() if one.done() and one.exception() is None}
        if not ready:
            await asyncio.gather(*starting.values())  # raises
        standard = self._members.standard
        if standard is None:
            index, first = next(iter(ready.items()))
            standard = self._members.standard = (self._peer(index).name, first)
        names, fitting = [standard[0]], [standard[1]]
        for index in list(ready):
            try:
                check_alike([*names, self._peer(index).name], [*fitting, ready[index]], rules)
                names.append(self._peer(index).name)
                fitting.append(ready[index])
            except ConfigError as error:
                log.error("engine.unlike", place=index, reason=str(error))
                del ready[index]
                if not ready:
                    raise
        return ready

    def check_first(self, ready: Sequence[EngineReady]) -> None:
        """Does nothing: those that differ were left out."""

    def check(self, core: EngineCore, cores: Sequence[EngineCore], info: ModelInfo, rules: TrafficRules) -> None:
        """As `check_alike` with the first engine, and with those that serve now."""
        assert self._members.standard is not None and core.ready is not None
        name, first = self._members.standard
        own = self._peer(core.index).name
        others = {self._peer(one.index).name: one.ready for one in cores if one.is_serving and one is not core}
        served = {name: first} | {other: ready for other, ready in others.items() if ready is not None}
        check_alike([*served, own], [*served.values(), core.ready], rules)
        if (most := core.ready.info.max_model_len) < (due := first.info.max_model_len):
            message = f"engine {own} has max_model_len = {most}, and engine {name} {due}"
            raise ConfigError(f"{message}; start both with the same setting and memory for it")

    def note_rules(self, cores: Sequence[EngineCore], rules: TrafficRules) -> None:
        """Engines that come are judged by one that serves those requests that no share is for, if there is one."""
        serving = [core for core in cores if core.is_serving and core.ready is not None]
        serving.sort(key=lambda core: GROUPS.index(rules.group_of(core.labels)))
        if serving and serving[0].ready is not None:
            self._members.standard = (self._peer(serving[0].index).name, serving[0].ready)

    def follow(self, fleet: Fleet) -> None:
        self._members.follow(fleet)

    async def look(self, index: int, on_failure: Callable[[str], object]) -> None:
        """Waits until the engine can be reached."""
        self._drop(index)
        peer = self._peer(index)
        longest_pause_s = AGAIN_PAUSE_S if self._reached.get(index) is peer else LONGEST_PAUSE_S

        def failed(error: Exception) -> None:
            on_failure(f"engine {peer.name} is not reached: {reason_of(error)}")

        self._waiting[index] = await reached(peer, failed, longest_pause_s)

    async def close(self) -> None:
        await self._members.aclose()
        for index in list(self._waiting):
            self._drop(index)

    def _peer(self, index: int) -> EnginePeer:
        peer = self._members.peers[index]
        assert peer is not None, f"place {index} has no engine"
        return peer

    def _drop(self, index: int) -> None:
        if (transport := self._waiting.pop(index, None)) is not None:
            transport.close()

    async def _connect(self, index: int) -> ConnectedHost:
        peer, transport = self._peer(index), self._waiting.pop(index, None)
        if transport is None:
            try:
                transport = await peer.connect()
            except (AuthError, OSError) as error:
                raise EngineDied(f"engine {peer.name} cannot be reached: {reason_of(error)}") from None
        self._reached[index] = peer
        return ConnectedHost(peer, transport, self._link_timeout_s)


async def look_at_first(members: Members, rules: TrafficRules | None = None) -> list[EngineReady]:
    """What the engines are that can be reached, as soon as there is one; then waits a little for the others.

    Raises `ConfigError` for what is wrong with engines that stay: with all of them, or with one beside others, as
    `check_alike` has it.
    """
    looks: dict[str, asyncio.Task[EngineReady]] = {}
    try:
        while True:
            named = {peer.name: peer for peer in members.present.values()}
            for name in looks.keys() - named.keys():
                looks.pop(name).cancel()
                members.unreached.pop(name, None)
            for name in named.keys() - looks.keys():
                looking = look_at(named[name], on_failure=partial(members.note_unreached, name))
                looks[name] = asyncio.ensure_future(looking)
            if ready := await _answered(looks, members.period_s):
                members.unreached.clear()
                names = list(ready)
                if members.is_fixed:
                    check_alike(names, list(ready.values()), rules)
                members.standard = (names[0], ready[names[0]])
                return list(ready.values())
            if members.is_fixed:
                await asyncio.gather(*looks.values())  # raises
            refused = [name for name, look in looks.items() if look.done()]
            for name in refused:  # perhaps it is another one when it is looked at again
                log.error("engine.refused", engine=name, reason=str(looks.pop(name).exception()))
            if refused and not looks:
                await asyncio.sleep(members.period_s or OTHERS_S)  # else those that wait have taken as long
            await members.look_again()
    finally:
        for look in looks.values():
            look.cancel()
        if looks:
            await asyncio.wait(looks.values())


async def _answered(looks: Mapping[str, asyncio.Task[EngineReady]], period_s: float | None) -> dict[str, EngineReady]:
    """What was told until the first look succeeded and for `OTHERS_S` more, or all failed, or the period is over."""
    ready: dict[str, EngineReady] = {}
    pending: set[asyncio.Task[EngineReady]] = set(looks.values())
    limit_s = period_s
    if not pending:
        await asyncio.sleep(period_s or OTHERS_S)
    while pending:
        done, pending = await asyncio.wait(pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        ready = {name: look.result() for name, look in looks.items() if look.done() and look.exception() is None}
        if not done:
            break
        limit_s = OTHERS_S if ready else period_s
    return ready


def hosts_of(
    members: Members, prefix_key: bytes | None, link_timeout_s: float | None
) -> Callable[[EngineSetup], Hosts]:
    """What a fleet of these engines makes its `Hosts` with."""
    return lambda setup: ConnectedHosts(setup, members, prefix_key, link_timeout_s)

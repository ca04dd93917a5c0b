"""The engines of a front that run already, elsewhere: `ConnectedHosts` connects to them, and starts none."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

from ...runtime.env.log import get_logger
from ...runtime.processes.auth import AuthError, FleetKey
from ...runtime.processes.frames import LinkError
from ...runtime.processes.link import Link
from ...runtime.processes.link_channels import InboundChannel, OutboundChannel
from ...runtime.processes.tcp import dial
from ...runtime.processes.transport import SocketTransport
from ..config import EngineConfig
from ..engine.core import EngineSetup
from ..errors import ConfigError
from ..executor.engine_host import StartHost
from ..fleet.fleet_processes import SAME
from ..fleet.hosts import Hosts
from ..fleet.placement import Place
from ..messages import StepTokens, TokenRequest
from ..pipeline import ENTRY_CAPACITY, TEXT_CAPACITY, TO_DETOKENIZE, TO_SCHEDULE
from ..split.engine_core import EngineCore
from ..split.process_client import EngineDied
from ..split.protocol import CODEC, EngineReady, NotStarted, Setup
from .engine_server import LINK_TIMEOUT_S

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between two tries to reach an engine: each pause is twice the last one
WELCOME_S = 10.0  # from the connection to what the engine is

log = get_logger("millrace.stages")


class EnginePeer(Protocol):
    """An engine that runs already."""

    @property
    def name(self) -> str:
        """Where it is, for logs and errors."""

    async def connect(self) -> SocketTransport:
        """A new connection to it. Raises `AuthError` if it has another key, and OSError."""


class TcpPeer:
    """An engine at an address; see `EnginePeer`."""

    def __init__(self, host: str, port: int, key: FleetKey | None) -> None:
        self._host, self._port, self._key = host, port, key
        self.name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def connect(self) -> SocketTransport:
        return await dial(self._host, self._port, self._key)


class ConnectedHost:
    """See `EngineHost`: an engine is over for its front when the connection is."""

    death_s = 0.0

    def __init__(self, name: str, transport: SocketTransport, link_timeout_s: float | None) -> None:
        self.transport, self.link_timeout_s = transport, link_timeout_s
        self.pid = 0  # of another machine
        self._name, self._sock = name, transport.sock
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait(self) -> str:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        with suppress(OSError):  # it is closed
            self._sock.shutdown(socket.SHUT_RDWR)
        if not self._ended.done():
            self._ended.set_result(f"the end of the connection to {self._name}")


class ConnectedHosts:
    """See `Hosts`. An engine that is away is dialled until it is there again, with longer and longer pauses."""

    setting, inline = "--engine", "`millrace serve` on one machine"

    def __init__(
        self,
        setup: EngineSetup,
        peers: Sequence[EnginePeer],
        prefix_key: bytes | None,
        link_timeout_s: float | None = LINK_TIMEOUT_S,
    ) -> None:
        self._setup, self._peers, self._link_timeout_s = setup, peers, link_timeout_s
        self.prefix_key = prefix_key
        self._waiting: dict[int, SocketTransport] = {}  # connections that were made for the next start

    def places(self) -> Sequence[Place]:
        """Without shares: the engines run already."""
        return [Place(self._setup.config)] * len(self._peers)

    def start_host(self, index: int) -> StartHost | None:
        return partial(self._connect, index)

    def config_of(self, core: EngineCore, cores: Sequence[EngineCore]) -> EngineConfig:
        return self._setup.config

    def config_of_text(self) -> EngineConfig:
        return replace(self._setup.config, data_parallel_size=1)

    async def open(self) -> None:
        """Does nothing."""

    async def look(self, index: int) -> None:
        """Waits until the engine can be reached."""
        self._drop(index)
        self._waiting[index] = await reached(self._peers[index])

    async def close(self) -> None:
        for index in list(self._waiting):
            self._drop(index)

    def _drop(self, index: int) -> None:
        if (transport := self._waiting.pop(index, None)) is not None:
            transport.close()

    async def _connect(self, index: int) -> ConnectedHost:
        peer, transport = self._peers[index], self._waiting.pop(index, None)
        if transport is None:
            try:
                transport = await peer.connect()
            except (AuthError, OSError) as error:
                raise EngineDied(f"engine {peer.name} cannot be reached: {_reason(error)}") from None
        return ConnectedHost(peer.name, transport, self._link_timeout_s)


async def reached(peer: EnginePeer, on_failure: Callable[[Exception], object] = lambda error: None) -> SocketTransport:
    """A connection to an engine, as soon as there is one. `on_failure` gets each error, and may raise another."""
    pause_s, last = FIRST_PAUSE_S, ""
    while True:
        try:
            return await peer.connect()
        except (AuthError, OSError) as error:
            on_failure(error)
            if (reason := _reason(error)) != last:
                log.warning("engine.unreachable", engine=peer.name, reason=reason)
                last = reason
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


async def look_at(peer: EnginePeer, link_timeout_s: float | None = LINK_TIMEOUT_S) -> EngineReady:
    """What an engine is, once it can be reached. Raises `ConfigError` for another key or version."""

    def refuse(error: Exception) -> None:
        if isinstance(error, AuthError):
            raise ConfigError(f"engine {peer.name}: {error}; give both the same --fleet-key-file")

    while True:
        transport = await reached(peer, refuse)
        try:
            return await _asked(transport, peer, link_timeout_s)
        except EngineDied as error:
            log.warning("engine.unreachable", engine=peer.name, reason=str(error))
            await asyncio.sleep(FIRST_PAUSE_S)


async def _asked(transport: SocketTransport, peer: EnginePeer, link_timeout_s: float | None) -> EngineReady:
    told: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()

    def receive(word: object) -> None:
        if told.done():
            return
        if isinstance(word, EngineReady):
            told.set_result(word)
        elif isinstance(word, NotStarted):
            told.set_exception(ConfigError(f"engine {peer.name}: {word.reason}"))

    def lost(error: LinkError | None) -> None:
        if not told.done():
            is_other = error is not None and "same version" in str(error)
            reason = "it closed the connection" if error is None else str(error)
            kind = ConfigError if is_other else EngineDied
            told.set_exception(kind(f"engine {peer.name}: {reason}"))

    link = Link(transport, CODEC, receive, lost, timeout_s=link_timeout_s)
    requests: OutboundChannel[TokenRequest] = OutboundChannel("->".join(TO_SCHEDULE), ENTRY_CAPACITY)
    tokens: InboundChannel[StepTokens] = InboundChannel("->".join(TO_DETOKENIZE), TEXT_CAPACITY)
    link.add_outbound(requests)
    link.add_inbound(tokens)
    link.start()
    link.post(Setup(EngineConfig(), None, 0, is_elsewhere=True))
    try:
        async with asyncio.timeout(WELCOME_S):
            return await told
    except TimeoutError:
        raise EngineDied(f"engine {peer.name}: no word in {WELCOME_S:g} s") from None
    finally:
        link.close()


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def check_alike(names: Sequence[str], ready: Sequence[EngineReady]) -> None:
    """Raises `ConfigError` if engines differ in the model or in what a front must know."""
    first = ready[0]
    for name, one in zip(names[1:], ready[1:], strict=True):
        _check_files(names[0], name, first.files, one.files)
        assert first.config is not None and one.config is not None
        for setting in ("max_num_seqs", "enable_prefix_caching", "steps_in_flight"):
            due, found = getattr(first.config, setting), getattr(one.config, setting)
            if due != found:
                message = f"engine {name} has {setting} = {found}, and engine {names[0]} {due}"
                raise ConfigError(f"{message}; start both with the same setting")
        for fact in SAME:
            due, found = getattr(first.info, fact), getattr(one.info, fact)
            if due != found:
                message = f"engine {name} has {fact} = {found}, and engine {names[0]} {due}"
                raise ConfigError(f"{message}; start both with the same {fact}")


def _check_files(first_name: str, name: str, first: Mapping[str, str], found: Mapping[str, str]) -> None:
    if dict(first) != dict(found):
        differing = sorted(one for one in {*first, *found} if first.get(one) != found.get(one))
        message = f"engine {name} has another model than engine {first_name}: {', '.join(differing)} differ"
        raise ConfigError(f"{message}; start both with the same model")


def hosts_of(peers: Sequence[EnginePeer], prefix_key: bytes | None) -> Callable[[EngineSetup], Hosts]:
    """What a fleet of these engines makes its `Hosts` with."""
    return lambda setup: ConnectedHosts(setup, peers, prefix_key)

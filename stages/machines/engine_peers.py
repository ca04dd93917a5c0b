"""An engine that runs already, as a front reaches it: its address, connections to it, and what it is."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Protocol

from ...runtime.env.awake_time import AwakeTimeout
from ...runtime.env.log import get_logger
from ...runtime.processes.auth import AuthError, FleetKey, KeyRefused
from ...runtime.processes.frames import LinkError, NoLink
from ...runtime.processes.link import Link
from ...runtime.processes.link_channels import InboundChannel, OutboundChannel
from ...runtime.processes.tcp import dial
from ...runtime.processes.tls import FleetTls, TlsError
from ...runtime.processes.transport import SocketTransport
from ..config import EngineConfig
from ..errors import ConfigError
from ..messages import StepTokens, TokenRequest
from ..pipeline import ENTRY_CAPACITY, TEXT_CAPACITY, TO_DETOKENIZE, TO_SCHEDULE
from ..split.process_client import EngineDied
from ..split.protocol import CODEC, EngineReady, NotStarted, Setup
from .engine_server import LINK_TIMEOUT_S
from .engine_sources import Address

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0  # between two tries to reach an engine: each pause is twice the last one
AGAIN_PAUSE_S = 1.0  # the longest one for an engine that was reached before: its successor may be there soon
SURE_REFUSALS = 3  # of a key, one after the other: until then the engine may have ended at that moment
FLAGS = " (--fleet-key-file, --fleet-tls-cert, --fleet-tls-key, --fleet-tls-ca)"
WELCOME_S = 10.0  # from the connection to what the engine is

log = get_logger("millrace.stages")


class EnginePeer(Protocol):
    """An engine that runs already."""

    @property
    def name(self) -> str:
        """Where it is, for logs and errors."""

    async def connect(self) -> SocketTransport:
        """A new connection to it. Raises `AuthError` if it has another key, and OSError."""

    def note_stuck(self) -> None:
        """It makes no progress, or gives no sign of life: the front gives up a connection that has not ended."""


class TcpPeer:
    """An engine at an address; see `EnginePeer`."""

    def __init__(
        self,
        address: Address,
        key: FleetKey | None,
        tls: FleetTls | None = None,
        certified_name: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`certified_name`: what its certificate must be for; None: the host of its address."""
        self._address, self._key = address, key
        self._tls, self._certified_name = tls, certified_name
        self.name = name_of(address)

    async def connect(self) -> SocketTransport:
        return await dial(*self._address, self._key, tls=self._tls, server_name=self._certified_name())

    def note_stuck(self) -> None:
        """Does nothing: its own machine is to replace it."""


def name_of(address: Address) -> str:
    """An address as text."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def reached(
    peer: EnginePeer,
    on_failure: Callable[[Exception], object] = lambda error: None,
    longest_pause_s: float = LONGEST_PAUSE_S,
) -> SocketTransport:
    """A connection to an engine, as soon as there is one. `on_failure` gets each error, and may raise another."""
    pause_s, last = FIRST_PAUSE_S, ""
    while True:
        try:
            return await peer.connect()
        except (AuthError, OSError) as error:
            on_failure(error)
            if (reason := reason_of(error)) != last:
                log.warning("engine.unreachable", engine=peer.name, reason=reason)
                last = reason
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_pause_s)


async def look_at(
    peer: EnginePeer,
    link_timeout_s: float | None = LINK_TIMEOUT_S,
    on_failure: Callable[[str], object] = lambda reason: None,
) -> EngineReady:
    """What an engine is, once it can be reached. Raises `ConfigError` for another key or version.

    `on_failure` is called with why it cannot be reached yet.
    """
    num_refused = 0

    def refuse(error: Exception) -> None:
        nonlocal num_refused
        num_refused = num_refused + 1 if isinstance(error, KeyRefused) else 0
        is_sure = not isinstance(error, KeyRefused) or num_refused >= SURE_REFUSALS
        if isinstance(error, AuthError) and is_sure:
            raise ConfigError(f"engine {peer.name}: {reason_of(error)}")
        on_failure(f"engine {peer.name}: {reason_of(error)}")

    pause_s, last = FIRST_PAUSE_S, ""
    while True:
        transport = await reached(peer, refuse)
        try:
            ready = await _asked(transport, peer, link_timeout_s)
            if ready.config is None:
                raise ConfigError(f"engine {peer.name} is no `millrace engine`, or of an older version; update it")
            return ready
        except EngineDied as error:
            if str(error) != last:
                log.warning("engine.unreachable", engine=peer.name, reason=str(error))
                last = str(error)
            on_failure(str(error))
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


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
            is_other = isinstance(error, NoLink) or (error is not None and "same version" in str(error))
            reason = "it closed the connection" if error is None else str(error)
            reason += FLAGS if isinstance(error, NoLink) else ""
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
        async with AwakeTimeout(WELCOME_S):
            return await told
    except TimeoutError:
        raise EngineDied(f"engine {peer.name}: no word in {WELCOME_S:g} s") from None
    finally:
        link.close()


def reason_of(error: Exception) -> str:
    """Why an engine could not be reached, and what to look at."""
    if isinstance(error, TlsError):
        return f"{error} (--fleet-tls-cert, --fleet-tls-key, --fleet-tls-ca)"
    if isinstance(error, AuthError):
        return f"{error}; give both the same --fleet-key-file"
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    if text.startswith("Connect call failed") and isinstance(error, OSError) and error.errno:  # asyncio's own words
        text = os.strerror(error.errno)
    if isinstance(error, socket.gaierror):
        return f"{text}: the name is not known here; look at its spelling, and at the name service"
    if isinstance(error, ConnectionRefusedError):
        return f"{text}: nothing listens there; the engine still loads, has ended, or listens at another address"
    if isinstance(error, TimeoutError):
        return "no answer in time; look at the address, and at firewalls on the way"
    return text

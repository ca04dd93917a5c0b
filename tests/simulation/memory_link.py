"""Sockets and processes in memory, in virtual time: a split engine whose two processes share one simulated loop.

The real engine process, its client and the link between them run unchanged. Only what makes a process or a socket is
replaced, see `in_memory`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from millrace.runtime.env.env import Env
from millrace.runtime.processes.transport import SocketTransport
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.startup.phases import Phases
from millrace.stages.config import EngineConfig
from millrace.stages.engine import engine
from millrace.stages.split import engine_core, engine_process, process_client
from millrace.stages.split.engine_process import EngineProcess, Load

MOST_DELAY_S = 0.001  # of what is sent
HELD_S = 0.5  # between two looks at a stream that is held


class MemorySocket:
    """One end of a stream of bytes. What is sent arrives later, in order, often several sends at once."""

    family = socket.AF_UNIX  # as a pair of sockets between processes has it

    def __init__(self, loop: asyncio.AbstractEventLoop, dice: Random) -> None:
        self._loop, self._dice = loop, dice
        self.peer: MemorySocket | None = None
        self.on_readable: Callable[[], object] | None = None
        self._received = bytearray()
        self._has_ended = self._is_due = False
        self._held_until = 0.0  # nothing is read before
        self.holds_end = False  # nor the end of the stream

    @classmethod
    def pair(cls, loop: asyncio.AbstractEventLoop, dice: Random) -> tuple[MemorySocket, MemorySocket]:
        ours, theirs = cls(loop, dice), cls(loop, dice)
        ours.peer, theirs.peer = theirs, ours
        return ours, theirs

    def setblocking(self, is_blocking: bool) -> None:
        pass

    def setsockopt(self, *option: int) -> None:
        pass

    def send(self, data: memoryview) -> int:
        assert self.peer is not None
        if self._has_ended or self.peer._has_ended:
            raise BrokenPipeError
        self.peer._received += data
        self.peer._wake()
        return len(data)

    def recv(self, most: int) -> bytes:
        if not self._received and not self._has_ended:
            raise BlockingIOError
        data = bytes(self._received[:most])
        del self._received[:most]
        return data

    def fileno(self) -> int:
        """As of a socket; only its sign is asked for."""
        assert self.peer is not None
        return -1 if self.peer._has_ended else 0

    def shutdown(self, how: int) -> None:
        """In both directions."""
        self.cut()

    def close(self) -> None:
        assert self.peer is not None
        self.peer._has_ended = True
        self.peer._wake()

    def cut(self) -> None:
        """The connection breaks: both ends read what has arrived, and then its end."""
        assert self.peer is not None
        self.peer.close()
        self.close()

    def hold(self, seconds: float) -> None:
        """Nothing is read here for so long, or until the other end closes, unless `holds_end`."""
        self._held_until = self._loop.time() + seconds
        self._wake()

    def _wake(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._loop.call_later(self._dice.uniform(0.0, MOST_DELAY_S), self._read)

    def _read(self) -> None:
        self._is_due = False
        if (self.holds_end or not self._has_ended) and (left_s := self._held_until - self._loop.time()) > 0:
            self._is_due = True
            self._loop.call_later(min(left_s, HELD_S), self._read)
            return
        if self.on_readable is not None:
            self.on_readable()
        if self.on_readable is not None and (self._received or self._has_ended):
            self._wake()  # it stays readable


class MemoryChild:
    """An engine process that is a task. It gets its model from `load`."""

    env: SimEnv
    load: Load
    death_s = 1.0

    def __init__(self, ours: MemorySocket, theirs: MemorySocket) -> None:
        self.sock, self.theirs = ours, theirs
        self.transport, self.link_timeout_s = SocketTransport(ours), None  # type: ignore[arg-type]
        self.process = EngineProcess(theirs, (), self._load)  # type: ignore[arg-type]
        self.pid = id(self.process)
        self._task = asyncio.ensure_future(self.process.run())

    @classmethod
    async def start(cls, module: str, files: Sequence[int], environment: dict[str, str]) -> MemoryChild:
        return cls(*MemorySocket.pair(cls.env.loop, cls.env.random("link")))

    def _load(self, config: EngineConfig, env: Env, phases: Phases) -> Any:
        return self.load(config, env, phases)

    async def wait(self) -> str:
        await asyncio.wait([self._task])
        return "killed" if self._task.cancelled() else f"exit status {self._task.result()}"

    def kill(self) -> None:
        self._task.cancel()


def env_of_a_process(env: SimEnv) -> SimEnv:
    """The same loop, clock and dice; workers of its own, which end with the process."""
    own = copy(env)
    own._workers, own._pool = {}, None
    return own


def take_memory_sockets(loop: Any) -> None:
    """From now on the loop takes a `MemorySocket` where it takes a socket."""
    loop.add_reader = lambda sock, callback: setattr(sock, "on_readable", callback)
    loop.remove_reader = lambda sock: setattr(sock, "on_readable", None)


@contextlib.contextmanager
def in_memory(env: SimEnv, load: Load, kind: type[MemoryChild] = MemoryChild) -> Iterator[None]:
    """Split engines on `env` have engine processes in memory, which get their models from `load`."""
    child = type("Child", (kind,), {"env": env, "load": staticmethod(load)})
    take_memory_sockets(env.loop)
    with (
        patch.object(process_client, "Child", child),
        patch.object(engine_core, "NUM_RINGS", 0),
        patch.object(engine_process, "LiveEnv", lambda: env_of_a_process(env)),
        patch.object(engine_process, "end_with_parent", lambda sock: None),
        patch.object(engine_process, "gc", SimpleNamespace(collect=lambda: 0, freeze=lambda: None)),
        patch.object(engine, "gc", SimpleNamespace(collect=lambda: 0)),  # a collection takes longer than a run
        patch.object(EngineProcess, "_digests", staticmethod(lambda config: {})),
    ):
        yield

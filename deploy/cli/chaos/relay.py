"""`Relay`: a TCP relay in this process, which cuts, stalls, delays and halves what a front and an engine send."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Literal, Protocol

READ_BYTES = 1 << 16
MAX_HELD = 256  # pieces that wait in one direction, such as of a stalled link

Way = Literal["up", "down"]  # from the front to the engine, and back
Edit = Callable[[bytes], bytes]


class ConnectionWatch(Protocol):
    """What a relay tells of one connection."""

    def passed(self, way: Way, data: bytes) -> None:
        """These bytes came from one end."""

    def closed(self) -> None:
        """One of the ends has closed it, or the relay has cut it."""


class Relay:
    """Listens on loopback, and joins each connection to one to `target`. Call `start`, in the end `aclose`.

    target         host and port of the engine; None: it is away, and connections are closed at once
    is_cut         connections are reset, and new ones closed at once
    stalled        directions in which nothing passes; it is held here
    delay_s        least and most seconds that each piece comes late; order is kept
    halves_next    once: of the next piece only the first half passes, and then the connection is reset
    edits          makes what passes in each direction, for a new connection
    """

    def __init__(
        self, draw: random.Random, watch: Callable[[], ConnectionWatch], edits: Callable[[], dict[Way, Edit]] = dict
    ) -> None:
        self.target: tuple[str, int] | None = None
        self.is_cut = False
        self.stalled: frozenset[Way] = frozenset()
        self.delay_s: tuple[float, float] | None = None
        self.halves_next = False
        self.edits = edits
        self.draw, self._watch = draw, watch
        self.changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._connections: set[RelayedConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def address(self) -> str:
        """Where the front connects to."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
        self.cut_now()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def cut_now(self) -> None:
        """Resets the connections that there are."""
        for connection in list(self._connections):
            connection.abort()

    def note_change(self) -> None:
        """What passes has changed."""
        change, self.changed = self.changed, asyncio.Event()
        change.set()

    async def wait_for_connection(self) -> None:
        """Waits until there is a connection."""
        while not self._connections:
            await self.changed.wait()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._join(reader, writer)
        except asyncio.CancelledError:
            pass  # NOTE: at the end of the run; the server of asyncio would print a stack
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.target is None or self.is_cut:
            return
        try:
            their_reader, their_writer = await asyncio.open_connection(*self.target)
        except OSError:
            return
        connection = RelayedConnection(self, self._watch(), self.edits())
        self._connections.add(connection)
        self.note_change()
        try:
            await connection.run((reader, writer), (their_reader, their_writer))
        finally:
            self._connections.discard(connection)
            their_writer.transport.abort()


Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class RelayedConnection:
    """One connection through a relay, from `run` to its end."""

    def __init__(self, relay: Relay, watch: ConnectionWatch, edits: dict[Way, Edit]) -> None:
        self._relay, self._watch, self._edits = relay, watch, edits
        self._transports: list[asyncio.WriteTransport] = []
        self._is_over = False

    async def run(self, front: Stream, engine: Stream) -> None:
        """Passes on what comes, until both ends have closed, or it is aborted."""
        self._transports = [front[1].transport, engine[1].transport]
        held: dict[Way, asyncio.Queue[tuple[bytes, float]]] = {"up": asyncio.Queue(MAX_HELD)}
        held["down"] = asyncio.Queue(MAX_HELD)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read("up", front[0], held["up"]))
            group.create_task(self._read("down", engine[0], held["down"]))
            group.create_task(self._write("up", held["up"], engine[1]))
            group.create_task(self._write("down", held["down"], front[1]))

    def abort(self) -> None:
        """Resets both ends."""
        self._end()
        for transport in self._transports:
            transport.abort()

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._watch.closed()

    async def _read(self, way: Way, reader: asyncio.StreamReader, held: asyncio.Queue[tuple[bytes, float]]) -> None:
        """Reads also while nothing passes: the end of a connection is known at once."""
        while True:
            try:
                data = await reader.read(READ_BYTES)
            except OSError:
                data = b""
                self.abort()
            if not data:
                self._end()
            else:
                self._watch.passed(way, data)
                if (edit := self._edits.get(way)) is not None and not (data := edit(data)):
                    continue
            delay_s = 0.0 if self._relay.delay_s is None else self._relay.draw.uniform(*self._relay.delay_s)
            await held.put((data, asyncio.get_running_loop().time() + delay_s))
            if not data:
                return

    async def _write(self, way: Way, held: asyncio.Queue[tuple[bytes, float]], writer: asyncio.StreamWriter) -> None:
        relay, loop = self._relay, asyncio.get_running_loop()
        while True:
            data, due_s = await held.get()
            if (late_s := due_s - loop.time()) > 0:
                await asyncio.sleep(late_s)
            while way in relay.stalled and not writer.transport.is_closing():
                await relay.changed.wait()
            try:
                if not data:
                    if writer.can_write_eof() and not writer.transport.is_closing():
                        writer.write_eof()
                    return
                if writer.transport.is_closing():
                    continue  # the end has gone, and what came for it is lost
                if relay.halves_next and len(data) > 1:
                    relay.halves_next = False
                    writer.write(data[: len(data) // 2])
                    await writer.drain()
                    self.abort()
                else:
                    writer.write(data)
                    await writer.drain()
            except OSError:
                self.abort()

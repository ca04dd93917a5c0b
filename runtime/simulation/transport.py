"""A simulated connection for links: bytes take time, arrive in pieces, and may stop to arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from .env import SimEnv

BUFFER_BYTES = 1 << 16  # sent and not received, in each direction
STALL_S = (0.01, 3.0)
PARTITION_S = (0.5, 30.0)
PARTIAL = 0.1  # share of calls that take, or return, only a part


class SimConnection:
    """Two ends of a connection in one simulated loop; `ends` are transports for `Link`.

    Each piece takes a time drawn from `delay_s`, and order is kept. Fault points, drawn at each send:

    link.cut        the connection breaks: both ends see its end, and what was underway is lost
    link.half       nothing that this end sends arrives any more, and it does not notice
    link.stall      what this end sends arrives later, by a drawn time
    link.partition  nothing arrives in either direction for a drawn time
    """

    def __init__(self, env: SimEnv, delay_s: tuple[float, float] = (0.0, 0.001)) -> None:
        there, back = _Way(env, delay_s), _Way(env, delay_s)
        self._env = env
        self._ways = (there, back)
        self.ends = (SimTransport(self, there, back), SimTransport(self, back, there))

    def cut(self) -> None:
        """Breaks the connection."""
        for way in self._ways:
            way.cut()

    def block(self) -> None:
        """Stops both directions until `unblock`; what is sent waits."""
        for way in self._ways:
            way.is_blocked = True

    def unblock(self) -> None:
        """Ends `block`."""
        for way in self._ways:
            way.is_blocked = False
            way.arm()

    def draw_faults(self, way: _Way) -> None:
        """Lets the fault points strike that are due at a send."""
        env = self._env
        if env.fault("link.cut"):
            self.cut()
        if env.fault("link.half"):
            way.is_lost = True
        if env.fault("link.stall"):
            way.stall(env.random("link.stall").uniform(*STALL_S))
        if env.fault("link.partition"):
            self.block()
            env.loop.call_later(env.random("link.partition").uniform(*PARTITION_S), self.unblock)


class SimTransport:
    """One end of a `SimConnection`."""

    def __init__(self, connection: SimConnection, outgoing: _Way, incoming: _Way) -> None:
        self._connection = connection
        self._outgoing, self._incoming = outgoing, incoming
        self.failure: str | None = None

    def start(
        self, on_readable: Callable[[], None], on_writable: Callable[[], None], timeout_s: float | None = None
    ) -> None:
        self._incoming.listen(on_readable)
        self._outgoing.on_room = on_writable

    def recv(self) -> bytes | None:
        return self._incoming.take()

    def send(self, data: memoryview) -> int:
        self._connection.draw_faults(self._outgoing)
        return self._outgoing.put(bytes(data))

    def close(self) -> None:
        self._incoming.stop()
        self._outgoing.end()

    def lose_what_is_sent(self) -> None:
        """From now on nothing arrives that this end sends."""
        self._outgoing.is_lost = True


class _Way:
    """One direction: bytes on their way, and those that have arrived."""

    def __init__(self, env: SimEnv, delay_s: tuple[float, float]) -> None:
        self.is_blocked = self.is_lost = False
        self.on_room: Callable[[], None] | None = None
        self._env = env
        self._draw = env.random("link")
        self._delay_s = delay_s
        self._underway: deque[tuple[float, bytes]] = deque()  # (when it arrives, piece); b"": the end
        self._last_s = 0.0  # when the last piece arrives, at the earliest
        self._arrived = bytearray()
        self._num_held = 0  # bytes underway, or arrived and not received
        self._on_readable: Callable[[], None] | None = None
        self._awaits_room = self._has_ended = self._is_over = self._is_stopped = False

    # -- the sender

    def put(self, data: bytes) -> int:
        if self._is_stopped or self._has_ended:
            raise BrokenPipeError("the other end of the simulated connection has gone")
        if self.is_lost:
            return len(data)
        taken = min(len(data), BUFFER_BYTES - self._num_held)
        if taken and self._draw.random() < PARTIAL:
            taken = self._draw.randrange(1, taken + 1)
        if taken:
            middle = self._draw.randrange(taken + 1)
            for piece in (data[:middle], data[middle:taken]):
                if piece:
                    self._send(piece)
            self._num_held += taken
        self._awaits_room = taken < len(data)
        self._offer_room()
        return taken

    def end(self) -> None:
        """The sender closes: what was sent arrives, and then the end."""
        if not self._has_ended:
            self._has_ended = True
            self.on_room = None
            if not self.is_lost:
                self._send(b"")

    def cut(self) -> None:
        self._underway.clear()
        self._has_ended = True
        self._is_over = True
        self._notify()

    def stall(self, seconds: float) -> None:
        self._last_s = max(self._last_s, self._env.now()) + seconds

    def _send(self, piece: bytes) -> None:
        due_s = max(self._last_s, self._env.now() + self._draw.uniform(*self._delay_s))
        self._last_s = due_s
        self._underway.append((due_s, piece))
        self._env.loop.call_at(due_s, self.arm)

    def _offer_room(self) -> None:
        if self._awaits_room and self._num_held < BUFFER_BYTES:
            self._env.loop.call_soon(self._call_on_room)

    def _call_on_room(self) -> None:
        if self._awaits_room and self.on_room is not None:
            self._awaits_room = False
            self.on_room()

    # -- the receiver

    def arm(self) -> None:
        """Delivers what is due."""
        has_news = False
        while self._underway and not self.is_blocked and self._underway[0][0] <= self._env.now():
            _, piece = self._underway.popleft()
            self._arrived += piece
            self._is_over = self._is_over or not piece
            has_news = True
        if has_news:
            self._notify()

    def listen(self, on_readable: Callable[[], None]) -> None:
        self._on_readable = on_readable
        self._notify()

    def take(self) -> bytes | None:
        if not self._arrived:
            return b"" if self._is_over else None
        size = len(self._arrived)
        if self._draw.random() < PARTIAL:
            size = self._draw.randrange(1, size + 1)
        data = bytes(self._arrived[:size])
        del self._arrived[:size]
        self._num_held -= size
        self._offer_room()
        self._notify()
        return data

    def stop(self) -> None:
        """The receiver closes."""
        self._is_stopped = True
        self._on_readable = None
        self._arrived.clear()
        self._num_held = 0
        self._offer_room()

    def _notify(self) -> None:
        if self._arrived or self._is_over:
            self._env.loop.call_soon(self._call_on_readable)

    def _call_on_readable(self) -> None:
        if self._on_readable is not None and (self._arrived or self._is_over):
            self._on_readable()

"""A link between two processes over a socketpair: channels and control messages.

    one end                                             the other
    OutboundChannel.send -> items, while credits last -> InboundChannel, up to its capacity
                         <- credits, as items are received <-
    Link.post            -> words, in order with items -> on_word

A word is a control message that needs no credit. A frame is 16 bytes (kind, edge, lengths of its two parts), then a
message as `wire.py` encodes it. Frames are sent together, once per turn of the loop, and everything that has arrived is
read together. So a turn costs one system call each way. Order is kept over all edges and words of one direction. An
invalid frame ends the link with a `LinkError` that describes it: a stream cannot be resumed in its middle.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any, Generic, TypeVar

import orjson

from ..channel import Channel
from .wire import ALIGNMENT, Buffer, Codec, WireError

T = TypeVar("T")

VERSION = 1  # of the frames and their meaning
MAX_FRAME_BYTES = 64 << 20  # a prompt of a million tokens has 4 MiB
READ_BYTES = 1 << 18
READS_AT_ONCE = 4  # before other callbacks of the loop run
SOCKET_BYTES = 1 << 20  # socket buffer requested in each direction

FRAME = struct.Struct("<HBBIII")  # magic, kind, edge, bytes of the header, bytes of the body, count of credits
MAGIC = 0x4C4D
HELLO, WORD, ITEM, CREDIT, CLOSE = range(1, 6)  # kinds


class LinkError(Exception):
    """The other end sent an invalid frame or has another version. The message says what it sent."""


class Link:
    """One end of a link. Declare the edges, `start` it on the loop that uses it, `close` it.

    `on_lost` is called once, with None when the other end has gone, or with the error. Not after `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        codec: Codec,
        on_word: Callable[[Any], None],
        on_lost: Callable[[LinkError | None], None],
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self._sock = sock
        self._codec = codec
        self._on_word = on_word
        self._on_lost = on_lost
        self._max_frame_bytes = max_frame_bytes
        self._outbound: list[OutboundChannel[Any]] = []
        self._inbound: list[InboundChannel[Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = Context()  # of no request: its id would mark the log lines of a link that breaks
        self._queued: list[Buffer] = []  # frames to send at the next turn
        self._unsent = memoryview(b"")  # what did not fit into the socket's buffer
        self._is_woken = False  # a flush is scheduled
        self._received = bytearray()
        self._is_met = False  # the other end has sent its hello
        self.is_open = False
        self._is_closing = False
        self.num_sends = self.num_frames_sent = self.num_bytes_sent = 0

    def add_outbound(self, channel: OutboundChannel[Any]) -> None:
        """Before `start`, in the order in which the other end adds its inbound channels."""
        self._outbound.append(channel)

    def add_inbound(self, channel: InboundChannel[Any]) -> None:
        """Before `start`, in the order in which the other end adds its outbound channels."""
        self._inbound.append(channel)

    def start(self) -> None:
        """Begins to send and receive frames, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BYTES)
        self.is_open = True
        self._put(HELLO, 0, orjson.dumps(self._introduction(self._outbound, self._inbound)), [])
        for edge, outbound in enumerate(self._outbound):
            outbound._bind(self, edge)
        for edge, inbound in enumerate(self._inbound):
            inbound._bind(self, edge)
        self._loop.add_reader(self._sock, self._on_readable)

    def post(self, word: Any) -> None:
        """Sends a word, in order with items, without waiting. Does nothing if the link is lost.

        Raises `WireError` if it cannot be encoded. The caller bounds their number.
        """
        if self.is_open:
            self._put(WORD, 0, *self._codec.encode(word))

    def close(self) -> None:
        """Sends what the socket has room for, and closes it. Idempotent."""
        if self.is_open:
            self._is_closing = True
            self._flush()
            self._end()

    # -- sending

    def _introduction(self, outbound: list[Any], inbound: list[Any]) -> dict[str, Any]:
        edges = [[[channel.name, channel.capacity] for channel in side] for side in (outbound, inbound)]
        return {"version": VERSION, "messages": self._codec.fingerprint, "edges": edges}

    def _put(self, kind: int, edge: int, header: bytes, body: list[Buffer], count: int = 0) -> None:
        size = sum(map(len, body))
        if len(header) + size > self._max_frame_bytes:
            raise WireError(f"a message of {len(header) + size} bytes cannot be sent: at most {self._max_frame_bytes}")
        padding = -len(header) % ALIGNMENT
        self._queued += (FRAME.pack(MAGIC, kind, edge, len(header) + padding, size, count), header, b" " * padding)
        self._queued += body
        self.num_frames_sent += 1
        self._wake()

    def _wake(self) -> None:
        if not self._is_woken and self.is_open:
            self._is_woken = True
            assert self._loop is not None
            self._loop.call_soon(self._turn, context=self._context)

    def _turn(self) -> None:
        self._is_woken = False
        if self.is_open:
            self._flush()

    def _flush(self) -> None:
        for edge, inbound in enumerate(self._inbound):
            if inbound.num_owed:
                count, inbound.num_owed = inbound.num_owed, 0
                self._queued.append(FRAME.pack(MAGIC, CREDIT, edge, 0, 0, count))
        if self._unsent:
            return  # `_on_writable` sends the rest when there is room
        data = memoryview(b"".join(self._queued))
        self._queued.clear()
        if len(data):
            self._send(data)

    def _send(self, data: memoryview) -> None:
        assert self._loop is not None
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            if not self._is_closing:
                self._on_readable()  # the last words of the other end may have arrived, such as why it has gone
            self._lose(None)
            return
        self.num_sends += 1
        self.num_bytes_sent += sent
        was_waiting, self._unsent = bool(self._unsent), data[sent:]
        if self._unsent and not was_waiting:
            self._loop.add_writer(self._sock, self._on_writable)

    def _on_writable(self) -> None:
        assert self._loop is not None
        self._send(self._unsent)
        if self.is_open and not self._unsent:
            self._loop.remove_writer(self._sock)
            self._flush()

    # -- receiving

    def _on_readable(self) -> None:
        has_ended = False
        for _ in range(READS_AT_ONCE):
            try:
                data = self._sock.recv(READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                data = b""
            if not data:
                has_ended = True
                break
            self._received += data
            if len(data) < READ_BYTES:
                break
        try:
            self._take_frames()
        except (LinkError, WireError) as error:
            self._lose(error if isinstance(error, LinkError) else LinkError(str(error)))
            return
        if has_ended:
            torn = f"the other end closed the link in the middle of a frame, after {len(self._received)} bytes of it"
            self._lose(LinkError(torn) if self._received else None)

    def _take_frames(self) -> None:
        at, received = 0, self._received
        try:
            while self.is_open and len(received) - at >= FRAME.size:
                magic, kind, edge, header_bytes, body_bytes, count = FRAME.unpack_from(received, at)
                if magic != MAGIC:
                    raise LinkError(f"a frame begins with {magic:#06x}: must be {MAGIC:#06x}")
                if header_bytes + body_bytes > self._max_frame_bytes:
                    raise LinkError(f"a frame of {header_bytes + body_bytes} bytes: at most {self._max_frame_bytes}")
                end = at + FRAME.size + header_bytes + body_bytes
                if len(received) < end:
                    break
                frame = memoryview(bytes(received[at + FRAME.size : end]))  # a copy: messages keep views of it
                at = end
                self._take(kind, edge, frame[:header_bytes], frame[header_bytes:], count)
        finally:
            del received[:at]

    def _take(self, kind: int, edge: int, header: memoryview, body: memoryview, count: int) -> None:
        if not self._is_met:
            if kind != HELLO:
                raise LinkError(f"a frame of kind {kind} before the hello")
            return self._meet(bytes(header))
        match kind:
            case _ if kind == ITEM:
                self._edge(self._inbound, edge)._arrive(self._codec.decode(header, body))
            case _ if kind == WORD:
                self._on_word(self._codec.decode(header, body))
            case _ if kind == CREDIT:
                self._edge(self._outbound, edge)._pay(count)
            case _ if kind == CLOSE:
                self._edge(self._inbound, edge).close()
            case _:
                raise LinkError(f"a frame of unknown kind {kind}")

    def _meet(self, hello: bytes) -> None:
        """Checks the hello: the other end must have the same version, messages and edges."""
        try:
            received = orjson.loads(hello)
        except orjson.JSONDecodeError:
            raise LinkError("a hello that is not JSON") from None
        expected = orjson.loads(orjson.dumps(self._introduction(self._inbound, self._outbound)))
        if received != expected:
            raise LinkError(
                f"the other end is {received}, and must be {expected}: both ends must have the same version"
            )
        self._is_met = True

    @staticmethod
    def _edge(channels: list[Any], edge: int) -> Any:
        if edge >= len(channels):
            raise LinkError(f"a frame for edge {edge}: there are {len(channels)}")
        return channels[edge]

    # -- the end

    def _lose(self, error: LinkError | None) -> None:
        if self.is_open and not self._is_closing:
            self._end()
            self._on_lost(error)

    def _end(self) -> None:
        assert self._loop is not None
        self.is_open = False
        self._loop.remove_reader(self._sock)
        if self._unsent:
            self._loop.remove_writer(self._sock)
        self._sock.close()
        for outbound in self._outbound:
            outbound._unbind()
        for inbound in self._inbound:
            inbound._unbind()


class OutboundChannel(Channel[T], Generic[T]):
    """The sending half of a channel that crosses a link.

    Senders use it like any other channel: `send` waits while `capacity` items are on the other side and not received,
    or promised.

    Without a link, items are kept here. When a link is lost, the items it carried are dropped, as it is unknown which
    were received. `on_refused` gets an item that cannot be encoded; the item then counts as received. `on_send` is
    called with each item, also with those that `hold` drops.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
        on_send: Callable[[T], object] | None = None,
        on_refused: Callable[[T, WireError], object] | None = None,
    ) -> None:
        super().__init__(name, capacity, clock)
        self._link: Link | None = None
        self._edge = 0
        self._on_send = on_send
        self._on_refused = on_refused
        self._kept: deque[T] = deque()  # items kept until there is a link; they are in `queued` too
        self._passes: Callable[[T], bool] | None = None  # the items that are not dropped; None: all

    def hold(self, passes: Callable[[T], bool]) -> None:
        """Drops what is kept, and from now on each item for which `passes` is false, until `release`.

        For a sender that remembers its items (`on_send`) and sends them again.
        """
        self._passes = passes
        if self._kept:
            self._kept.clear()
            self.queued.clear()
            self._on_capacity_freed()

    def release(self) -> None:
        """Ends `hold`."""
        self._passes = None

    def _put(self, item: T, now: float | None = None) -> None:
        if self._on_send is not None:
            self._on_send(item)
        if self._passes is not None and not self._passes(item):
            return
        if self._link is None:
            self._kept.append(item)
        elif not self._carry(item):
            return
        super()._put(item, now)

    def _carry(self, item: T) -> bool:
        """Sends the item over the link. Returns False if it was refused."""
        assert self._link is not None
        try:
            self._link._put(ITEM, self._edge, *self._link._codec.encode(item))
        except WireError as error:
            if self._on_refused is None:
                raise
            self._on_refused(item, error)
            return False
        return True

    def _bind(self, link: Link, edge: int) -> None:
        self._link, self._edge = link, edge
        kept, self._kept = self._kept, deque()
        self.queued.clear()
        self.queued.extend(item for item in kept if self._carry(item))
        if self.is_closed:
            link._put(CLOSE, edge, b"", [])
        self._on_capacity_freed()

    def _unbind(self) -> None:
        self._link = None
        self.queued.clear()
        self._on_capacity_freed()

    def _pay(self, count: int) -> None:
        """The other side received `count` items."""
        if count > len(self.queued):
            raise LinkError(f"edge {self.name}: {count} credits for {len(self.queued)} items")
        depth = len(self.queued)
        self._recent_high_water = max(self._recent_high_water, depth)
        self._high_water = max(self._high_water, depth)
        del self.queued[:count]
        self._on_capacity_freed()

    def _on_capacity_freed(self) -> None:
        now = self._clock()
        if self._full_since is not None and len(self.queued) < self.capacity:
            self._seconds_full += now - self._full_since
            self._full_since = None
        if not self.queued:
            self._empty_since = now
        self._wake_senders()

    def close(self) -> None:
        if not self.is_closed and self._link is not None:
            self._link._put(CLOSE, self._edge, b"", [])
        super().close()


class InboundChannel(Channel[T], Generic[T]):
    """The receiving half: queues what arrives; receiving returns credits to the sender.

    When its link is lost, it stays with what had arrived, and may be bound to another link. `on_arrival` is called with
    each item before it is queued.
    """

    def __init__(
        self,
        name: str,
        capacity: int,
        clock: Callable[[], float] = time.monotonic,
        on_arrival: Callable[[T], object] | None = None,
    ) -> None:
        super().__init__(name, capacity, clock)
        self._link: Link | None = None
        self._on_arrival = on_arrival
        self._num_owned = 0  # items that came over the current link; only these return credits
        self.num_owed = 0  # credits to send at the next turn

    def recv_all(self, now: float | None = None) -> list[T]:
        items = super().recv_all(now)
        if items and self._link is not None:
            self.num_owed += self._num_owned
            self._num_owned = 0
            self._link._wake()
        return items

    def _arrive(self, item: T) -> None:
        if self._num_owned + self.num_owed >= self.capacity:
            raise LinkError(f"edge {self.name}: an item came without a credit: it holds {self.capacity}")
        self._num_owned += 1
        if self._on_arrival is not None:
            self._on_arrival(item)
        if not self.is_closed:
            self._put(item)

    def _bind(self, link: Link, edge: int) -> None:
        self._link, self._num_owned, self.num_owed = link, 0, 0

    def _unbind(self) -> None:
        self._link, self._num_owned, self.num_owed = None, 0, 0

"""A link between two processes over a stream of bytes: channels and control messages.

    one end                                             the other
    OutboundChannel.send -> items, while credits last -> InboundChannel, up to its capacity
                         <- credits, as items are received <-
    Link.post            -> words, in order with items -> on_word

A word is a control message that needs no credit. Frames (`frames.py`) are sent together, once per turn of the loop, and
everything that has arrived is read together. So a turn costs one system call each way. Order is kept over all edges and
words of one direction. An invalid frame ends the link with a `LinkError` that describes it: a stream cannot be resumed
in its middle.

Each end begins with a hello: its version, edges, and types with their fields. Messages wait for that of the other end,
as they are encoded with the fields that both know (`type_fields.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from typing import Any

import orjson

from .frames import (
    CLOSE,
    CREDIT,
    HELLO,
    HELLO_START,
    ITEM,
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    PING,
    PONG,
    WORD,
    FrameReader,
    LinkError,
    NoLink,
    pack_frame,
    what_speaks,
)
from .link_channels import InboundChannel, OutboundChannel
from .liveness import PING_TIME, PONG_TIMES, Heartbeat
from .transport import READ_BYTES, Transport
from .type_fields import codec_for, describe
from .wire import Buffer, Codec, WireError

VERSION = 2  # of the frames and their meaning, and of fields without a default
READS_AT_ONCE = 4  # before other callbacks of the loop run


class Link:
    """One end of a link. Declare the edges, `start` it on the loop that uses it, `close` it.

    `on_lost` is called once, with None when the other end has gone, or with the error. Not after `close`.

    timeout_s   after so long without a frame the other end counts as lost, and this end pings it each second. `clock`
                and the other end's may then differ: each `Moment` is shifted when it arrives. None: both ends are on
                one machine, where the end of a process ends its link, and share one clock
    only_reports  what this end sends only reports: of it, an end of an older version gets the fields that it knows
    """

    def __init__(
        self,
        transport: Transport,
        codec: Codec,
        on_word: Callable[[Any], None],
        on_lost: Callable[[LinkError | None], None],
        *,
        timeout_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        only_reports: bool = False,
    ) -> None:
        self._transport = transport
        self._codec = self._shared_codec = codec  # the first with moments shifted; with the other end's fields if met
        self._on_word = on_word
        self._on_lost = on_lost
        self._clock = clock
        self._max_frame_bytes = max_frame_bytes
        self._only_reports = only_reports
        self._outbound: list[OutboundChannel[Any]] = []
        self._inbound: list[InboundChannel[Any]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = Context()  # of no request: its id would mark the log lines of a link that breaks
        self._early: list[tuple[int, int, Any]] = []  # kinds, edges and messages that wait for the hello
        self._queued: list[Buffer] = []  # frames to send at the next turn
        self._pong: bytes | None = None  # the answer to the last ping, to send at the next turn
        self._unsent = memoryview(b"")  # what did not fit into the transport's buffer
        self._is_woken = False  # a flush is scheduled
        self._frames = FrameReader(MAX_HELLO_BYTES)
        self._has_begun = False  # a frame has come
        self._is_met = False  # the other end has sent its hello
        self.heartbeat: Heartbeat | None = None
        if timeout_s is not None:
            self.heartbeat = Heartbeat(timeout_s, clock, self._ping, self._note_silence, self._shift)
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
        self.is_open = True
        hello = self._introduction(self._outbound, self._inbound)
        hello |= {"types": describe(self._codec), "clock_s": self._clock()}
        self._put(HELLO, header=orjson.dumps(hello))
        for edge, outbound in enumerate(self._outbound):
            outbound.bind(self, edge)
        for edge, inbound in enumerate(self._inbound):
            inbound.bind(self, edge)
        timeout_s = None if self.heartbeat is None else self.heartbeat.silence.timeout_s
        self._transport.start(self._on_readable, self._on_writable, timeout_s)
        if self.heartbeat is not None:
            self.heartbeat.start()

    def post(self, word: Any) -> None:
        """Sends a word, in order with items, without waiting. Does nothing if the link is lost.

        Raises `WireError` if it cannot be encoded; before the other end's hello, that loses the link instead. The
        caller bounds the number of words.
        """
        if self.is_open:
            self.carry(WORD, 0, word)

    def flush(self) -> None:
        """Sends at once what is due at the end of this turn, as far as the transport has room."""
        if self.is_open:
            self._flush()

    def close(self) -> None:
        """Sends what the transport has room for, and closes it. Idempotent."""
        if self.is_open:
            self._is_closing = True
            self._flush()
            self._end()

    # -- sending

    @staticmethod
    def _introduction(outbound: list[Any], inbound: list[Any]) -> dict[str, Any]:
        edges = [[[channel.name, channel.capacity] for channel in side] for side in (outbound, inbound)]
        return {"version": VERSION, "edges": edges}

    def carry(self, kind: int, edge: int, message: Any = None) -> None:
        """As `Carrier.carry`; for the channels."""
        if not self._is_met:
            self._early.append((kind, edge, message))
        elif kind == CLOSE:
            self._put(CLOSE, edge)
        else:
            self._put(kind, edge, *self._shared_codec.encode(message))

    def wake(self) -> None:
        """As `Carrier.wake`; for the channels."""
        if not self._is_woken and self.is_open:
            self._is_woken = True
            assert self._loop is not None
            self._loop.call_soon(self._turn, context=self._context)

    def _put(self, kind: int, edge: int = 0, header: bytes = b"", body: list[Buffer] | None = None) -> None:
        self._queued += pack_frame(kind, edge, header, body or (), max_frame_bytes=self._max_frame_bytes)
        self.num_frames_sent += 1
        self.wake()

    def _turn(self) -> None:
        self._is_woken = False
        if self.is_open:
            self._flush()

    def _flush(self) -> None:
        for edge, inbound in enumerate(self._inbound):
            if inbound.num_owed:
                count, inbound.num_owed = inbound.num_owed, 0
                self._queued += pack_frame(CREDIT, edge, count=count)
        if self._unsent:
            return  # `_on_writable` sends the rest when there is room
        if self._pong is not None:
            pong, self._pong = self._pong, None
            self._queued += pack_frame(PONG, header=pong)
        data = memoryview(b"".join(self._queued))
        self._queued.clear()
        if len(data):
            self._send(data)

    def _send(self, data: memoryview) -> None:
        try:
            sent = self._transport.send(data)
        except OSError:
            if not self._is_closing:
                self._on_readable()  # the last words of the other end may have arrived, such as why it has gone
            self._lose(self._failure())
            return
        self.num_sends += 1
        self.num_bytes_sent += sent
        self._unsent = data[sent:]

    def _on_writable(self) -> None:
        self._send(self._unsent)
        if self.is_open and not self._unsent:
            self._flush()

    # -- receiving

    def _on_readable(self) -> None:
        has_ended = False
        try:
            for _ in range(READS_AT_ONCE):
                data = self._transport.recv()
                if not data:
                    has_ended = data is not None
                    break
                self._frames.feed(data)
                self._take_frames()
                if len(data) < READ_BYTES or not self.is_open:
                    break
        except LinkError as error:
            self._lose(self._no_link() or error)
            return
        if self.heartbeat is not None:
            self.heartbeat.silence.has_heard = True
        if has_ended:
            torn = f"the other end closed the link in the middle of a frame, after {len(self._frames)} bytes of it"
            self._lose(self._failure() or self._no_link() or (LinkError(torn) if len(self._frames) else None))

    def _take_frames(self) -> None:
        frames = self._frames
        while self.is_open and (frame := frames.next()) is not None:
            self._take(*frame)

    def _take(self, kind: int, edge: int, header: memoryview, body: memoryview, count: int) -> None:
        if not self._is_met:
            self._has_begun = True
            if kind != HELLO:
                raise LinkError(f"a frame of kind {kind} before the hello")
            return self._meet(bytes(header))
        match kind:
            case _ if kind == ITEM:
                self._edge(self._inbound, edge).arrive(self._decode(header, body))
            case _ if kind == WORD:
                self._on_word(self._decode(header, body))
            case _ if kind == CREDIT:
                self._edge(self._outbound, edge).pay(count)
            case _ if kind == CLOSE:
                self._edge(self._inbound, edge).close()
            case _ if kind == PING and len(header) == PING_TIME.size:
                self._note_ping(header)
            case _ if kind == PONG and len(header) == PONG_TIMES.size:
                self._note_pong(header)
            case _:
                raise LinkError(f"a frame of unknown kind {kind}, or of a wrong length")

    def _decode(self, header: memoryview, body: memoryview) -> Any:
        try:
            return self._codec.decode(header, body)
        except WireError as error:
            raise LinkError(str(error)) from None

    @staticmethod
    def _edge(channels: list[Any], edge: int) -> Any:
        if edge >= len(channels):
            raise LinkError(f"a frame for edge {edge}: there are {len(channels)}")
        return channels[edge]

    # -- meeting

    def _meet(self, hello: bytes) -> None:
        """Checks the hello of the other end. Then sends what has waited for it."""
        try:
            received, self._shared_codec = self._checked(hello)
        except WireError as error:
            raise LinkError(str(error)) from None
        except RecursionError:
            raise LinkError("a hello that is nested too deeply") from None
        self._codec = self._shared_codec
        self._is_met = True
        self._frames.max_frame_bytes = self._max_frame_bytes
        if self.heartbeat is not None:
            try:
                self.heartbeat.meet(received.get("clock_s"))
            except ValueError as error:
                raise LinkError(str(error)) from None
        early, self._early = self._early, []
        for kind, edge, message in early:
            try:
                self.carry(kind, edge, message)
            except WireError as error:
                if kind != ITEM:
                    raise LinkError(str(error)) from None
                self._outbound[edge].refuse(message, error)

    def _checked(self, hello: bytes) -> tuple[dict[str, Any], Codec]:
        """The hello and the codec for its sender, which must have the same version and edges."""
        try:
            received = orjson.loads(hello)
        except orjson.JSONDecodeError:
            raise LinkError("a hello that is not JSON") from None
        expected = self._introduction(self._inbound, self._outbound)
        found = {name: received.get(name) for name in expected} if isinstance(received, dict) else received
        if found != expected:
            raise LinkError(
                f"the other end is {str(found)[:500]}, and must be {expected}: both ends must have the same version"
            )
        return received, codec_for(self._codec, received.get("types"), only_reports=self._only_reports)

    # -- pings

    def _ping(self, content: bytes) -> None:
        if not self._unsent:  # else the other end does not read, and pings would queue up
            self._put(PING, header=content)

    def _note_ping(self, content: memoryview) -> None:
        self._pong = bytes(content) + PING_TIME.pack(self._clock())
        self.wake()
        if self.heartbeat is not None:
            try:
                self.heartbeat.note_ping(content)
            except ValueError as error:
                raise LinkError(str(error)) from None

    def _note_pong(self, content: memoryview) -> None:
        if self.heartbeat is None:
            raise LinkError("an answer came to a ping that was not sent")
        try:
            self.heartbeat.note_pong(content)
        except ValueError as error:
            raise LinkError(str(error)) from None

    def _note_silence(self) -> None:
        assert self.heartbeat is not None
        self._lose(LinkError(f"the other end has sent nothing for {self.heartbeat.silence.timeout_s:g} s"))

    def _shift(self, offset_s: float) -> None:
        self._codec = self._shared_codec.shifted(-offset_s) if offset_s else self._shared_codec

    # -- the end

    def _no_link(self) -> LinkError | None:
        """What the other end must be, if what it sent first is no frame."""
        first = self._frames.first
        if self._has_begun or not first or first.startswith(HELLO_START[: len(first)]):
            return None
        wants = "it does not begin as a link, so perhaps it wants a key; give both ends the same file of a key, or none"
        return NoLink(what_speaks(first, has_key=False) or wants)

    def _failure(self) -> LinkError | None:
        failure = self._transport.failure
        return None if failure is None else LinkError(f"the connection failed: {failure}")

    def _lose(self, error: LinkError | None) -> None:
        if self.is_open and not self._is_closing:
            self._end()
            self._on_lost(error)

    def _end(self) -> None:
        self.is_open = False
        self._early.clear()
        if self.heartbeat is not None:
            self.heartbeat.stop()
        self._transport.close()
        for outbound in self._outbound:
            outbound.unbind()
        for inbound in self._inbound:
            inbound.unbind()

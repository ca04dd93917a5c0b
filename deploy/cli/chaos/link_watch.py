"""What passes over the links of a fleet: which request is at which engine, read from the frames in the relays."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from ....runtime.processes.auth import HANDSHAKE_BYTES
from ....runtime.processes.frames import HELLO, ITEM, WORD, FrameReader, LinkError
from ....runtime.processes.wire import FIRST_TYPE
from .awake_clock import AwakeClock
from .relay import Way

LATE_CLOSE_S = 2.0  # the end of a connection may be read so much later than what came after it on another one


@dataclass(frozen=True, slots=True)
class Resend:
    """A request went to another engine, or to the same one over a new connection."""

    at_s: float
    front: str
    request_id: str
    before: str  # the engine that had it
    after: str


@dataclass(eq=False, slots=True)
class LinkSpan:
    """One connection, and the requests in it."""

    front: str
    engine: str
    opened_s: float
    closed_s: float | None = None
    requests: dict[str, float] = field(default_factory=dict)  # to when it was sent


@dataclass(slots=True)
class LinkHistory:
    """All connections of a run."""

    spans: list[LinkSpan] = field(default_factory=list)
    resends: list[Resend] = field(default_factory=list)
    doubts: list[tuple[LinkSpan, LinkSpan, str, float]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    num_sent: int = 0
    _last: dict[tuple[str, str], LinkSpan] = field(default_factory=dict)  # where a request of a front is, or was last

    def violations(self) -> list[str]:
        """Requests that were in flight over two open connections at once (I15), and frames that are none."""
        found = list(self.broken)
        for first, second, request_id, at_s in self.doubts:
            if first.closed_s is None or first.closed_s > at_s + LATE_CLOSE_S:
                where = f"{first.front} sent it to {second.engine}, and the link to {first.engine} was open"
                found.append(f"I15: request {request_id} was at two engines: {where}")
        return found

    def deaths(self, front: str, began_s: float, ended_s: float) -> int:
        """How many connections of a front ended in this time."""
        spans = (span for span in self.spans if span.front == front and span.closed_s is not None)
        return sum(began_s <= (span.closed_s or 0.0) <= ended_s for span in spans)

    def sent(self, span: LinkSpan, request_id: str, at_s: float) -> None:
        """A prompt of a request went over a connection."""
        if request_id.startswith("warm-up"):
            return
        self.num_sent += 1
        key = (span.front, request_id)
        before = self._last.get(key)
        if before is not None and before is not span:
            self.resends.append(Resend(at_s, span.front, request_id, before.engine, span.engine))
            if request_id in before.requests and before.closed_s is None:
                self.doubts.append((before, span, request_id, at_s))
        self._last[key] = span
        span.requests[request_id] = at_s

    def ended(self, span: LinkSpan, request_ids: Iterable[str]) -> None:
        """One end said that it has done with these."""
        for request_id in request_ids:
            span.requests.pop(request_id, None)


class SpanWatch:
    """See `ConnectionWatch`: reads the frames of one connection, behind the proof of the key.

    A connection is a link once the engine has proven its key, which it does to an end with the key alone: what
    strangers send to the relay's port is none of the fleet's frames.
    """

    def __init__(self, history: LinkHistory, clock: AwakeClock, front: str, engine: str) -> None:
        self._history, self._clock = history, clock
        self._span = LinkSpan(front, engine, clock.now())
        self._is_link, self._doubt = False, ""
        self._readers: dict[Way, FrameReader] = {"up": FrameReader(), "down": FrameReader()}
        self._to_skip: dict[Way, int] = {"up": HANDSHAKE_BYTES, "down": HANDSHAKE_BYTES}
        self._names: dict[Way, list[str]] = {"up": [], "down": []}  # of types, by tag

    def passed(self, way: Way, data: bytes) -> None:
        skipped = min(self._to_skip[way], len(data))
        self._to_skip[way] -= skipped
        if not self._is_link and not self._to_skip["down"]:
            self._is_link = True
            self._history.spans.append(self._span)
            self._history.broken.extend([self._doubt] if self._doubt else [])
        if skipped == len(data):
            return
        reader = self._readers[way]
        reader.feed(data[skipped:])
        try:
            while (frame := reader.next()) is not None:
                self._take(way, frame[0], frame[2])
        except (LinkError, ValueError, LookupError, TypeError) as error:
            self._doubt = f"link {self._span.front}-{self._span.engine}: {way}: {error}"
            self._history.broken.extend([self._doubt] if self._is_link else [])
            self._to_skip[way] = 1 << 62

    def closed(self) -> None:
        self._span.closed_s = self._clock.now()

    def _take(self, way: Way, kind: int, header: memoryview) -> None:
        if kind == HELLO:
            self._names[way] = [one[0] for one in orjson.loads(header)["types"]]
        elif kind == ITEM and way == "up":
            self._history.sent(self._span, orjson.loads(header)[1], self._clock.now())
        elif kind == WORD:
            tree = orjson.loads(header)
            name = self._names[way][tree[0] - FIRST_TYPE]
            if name == "RequestsEnded":
                self._history.ended(self._span, strings_of(tree[1]))
            elif name == "RequestFailed":
                self._history.ended(self._span, [tree[1]])


def strings_of(tree: list[Any]) -> list[str]:
    """The texts of a packed sequence."""
    return [one for one in tree[1:] if isinstance(one, str)]

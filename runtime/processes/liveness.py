"""What pings tell of the other end of a link: whether it is there, and how its clock differs."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

from ..env.awake_time import LATE_S

PING_S = 1.0  # between two pings
NUM_TRIPS = 8  # the last round trips that the offset is chosen from
MAX_TIME_S = 1e15  # that a clock can show

PING_TIME = struct.Struct("<d")  # of the sender's clock
PONG_TIMES = struct.Struct("<dd")  # the ping's, and that of the answering clock


class PeerClock:
    """How far the other end's clock is ahead: that of the least round trip of the last `NUM_TRIPS`.

    The answer was made at some time of the round trip, so the offset is wrong by at most half of it. An offset within
    this error counts as 0: two processes of one machine have one clock.
    """

    def __init__(self) -> None:
        self._trips: deque[tuple[float, float]] = deque(maxlen=NUM_TRIPS)  # (round trip, offset), seconds
        self._greeting_s: float | None = None  # the offset by hello and pings alone: too small by the way here

    @property
    def round_trip_s(self) -> float | None:
        """The least of the last ones; None before the first answer."""
        return min(self._trips)[0] if self._trips else None

    @property
    def offset_s(self) -> float:
        """Seconds to subtract from the other end's time to get this end's."""
        if not self._trips:
            return self._greeting_s or 0.0
        round_trip_s, offset_s = min(self._trips)
        return 0.0 if abs(offset_s) <= round_trip_s / 2 else offset_s

    def note_greeting(self, there_s: float, now_s: float) -> None:
        """A hello or ping came, sent at `there_s`. The quickest one counts: a hello may wait for a late end."""
        offset_s = there_s - now_s
        self._greeting_s = offset_s if self._greeting_s is None else max(self._greeting_s, offset_s)

    def note_trip(self, sent_s: float, there_s: float, now_s: float) -> None:
        """The answer of a ping came, answered at `there_s`. Raises ValueError if it cannot be one."""
        round_trip_s = now_s - sent_s
        if not round_trip_s >= 0.0 or not abs(there_s) < MAX_TIME_S:
            raise ValueError(f"a ping sent at {sent_s!r} and answered at {there_s!r} came back at {now_s!r}")
        self._trips.append((round_trip_s, there_s - (sent_s + now_s) / 2))


class Silence:
    """For how long the other end has been silent, counted in ticks.

    Ticks of this process and not a clock: a process that was stopped itself has heard nothing in that time either. The
    other end may have stood still with it, so after a late tick all of the timeout begins anew: once, until something
    is heard again, as this process may always be late.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.tick_s = min(PING_S, timeout_s / 4)
        self.has_heard = False  # since the last tick; set at each arrival
        self._num_silent = 0
        self._has_begun_anew = False

    def tick(self, late_s: float = 0.0) -> bool:
        """Call it each `tick_s`; it came `late_s` too late. Returns whether the other end was silent for too long."""
        if self.has_heard:
            self._num_silent, self._has_begun_anew = 0, False
        elif late_s >= LATE_S and not self._has_begun_anew:
            self._num_silent, self._has_begun_anew = 0, True
        else:
            self._num_silent += 1
        self.has_heard = False
        return self._num_silent * self.tick_s >= self.timeout_s


class Heartbeat:
    """The pings of one end of a link, from `start` to `stop`.

    send_ping    sends a ping with this content; called each second once the other end has said hello
    on_silence   the other end has sent nothing for `timeout_s`; called once
    on_offset    `clock.offset_s` may have changed
    """

    def __init__(
        self,
        timeout_s: float,
        clock: Callable[[], float],
        send_ping: Callable[[bytes], None],
        on_silence: Callable[[], None],
        on_offset: Callable[[float], None],
    ) -> None:
        self.silence = Silence(timeout_s)
        self.peer_clock = PeerClock()
        self._clock = clock
        self._send_ping = send_ping
        self._on_silence = on_silence
        self._on_offset = on_offset
        self._is_met = False
        self._context = Context()  # of no request
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to count silence, on the running loop."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self.silence.tick_s
        self._timer = loop.call_at(due_s, self._tick, loop, due_s, context=self._context)

    def stop(self) -> None:
        """Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def meet(self, there_s: Any) -> None:
        """The hello came, sent at `there_s`. Raises ValueError if that is no time."""
        if type(there_s) not in (int, float) or not abs(there_s) < MAX_TIME_S:
            shown = there_s if type(there_s) in (int, float) else f"a {type(there_s).__name__}"
            raise ValueError(f"a hello with clock_s = {shown}: must be a time in seconds")
        self._is_met = True
        self.peer_clock.note_greeting(there_s, self._clock())
        self._on_offset(self.peer_clock.offset_s)
        self._ping()

    def note_ping(self, content: bytes | memoryview) -> None:
        """A ping came, of the length of `PING_TIME`. Raises ValueError if it shows no time."""
        (there_s,) = PING_TIME.unpack(content)
        if not abs(there_s) < MAX_TIME_S:
            raise ValueError(f"a ping sent at {there_s!r}: must be a time in seconds")
        if self.peer_clock.round_trip_s is None:
            self.peer_clock.note_greeting(there_s, self._clock())
            self._on_offset(self.peer_clock.offset_s)

    def note_pong(self, content: bytes | memoryview) -> None:
        """The answer of a ping came, of the length of `PONG_TIMES`. Raises ValueError if it cannot be one."""
        sent_s, there_s = PONG_TIMES.unpack(content)
        self.peer_clock.note_trip(sent_s, there_s, self._clock())
        self._on_offset(self.peer_clock.offset_s)

    def _tick(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self._timer = None
        if self.silence.tick(loop.time() - due_s):
            self._on_silence()
            return
        self.start()
        if self._is_met:
            self._ping()

    def _ping(self) -> None:
        self._send_ping(PING_TIME.pack(self._clock()))

"""Orders from one thread to several members, which all obey them in order, and a group that ends as one.

A member is a process or a thread with one end of a socket pair. It answers each order when it has obeyed it. The line
ends all members as soon as one is gone, fails, does something else than the leader, or lets an order wait too long.
No event loop: the leader's thread sends, and a thread of the line reads answers and watches the time.
"""

from __future__ import annotations

import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..workers.thread_start import ThreadNotStarted, start_thread
from .frames import ITEM, WORD, FrameReader, LinkError, pack_frame
from .wire import Codec

T = TypeVar("T")

RECEIVED_BYTES = 1 << 16
LEAST_S = 8.0  # that a member may take for an order
PATIENCE = 20  # times what is expected of an order, if that is more
MEASURED_WORK = (
    16  # of an order from which the seconds of a unit of work are taken; less is mostly what each order takes
)
MAX_ORDER_BYTES = 1 << 30  # a step of 256 rows with a million tokens each has 64 MiB of block tables
START_S = 600.0  # for an order of the start, before `serving`
SLICE_S = 0.25  # between two looks at the time
PAUSE_S = 0.75  # a look that comes so much too late was a pause of this process or machine, which counts for no member
VERDICT_S = 0.5  # that the leader waits for the cause, when its own work has failed


class LineEnded(RuntimeError):
    """The members have ended, or were ended. The message says since when and why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A member has obeyed an order."""

    mark: int  # of all that the member did; equal to the leader's
    about: str  # its last action, in words
    value: Any = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A member could not obey an order, and ends."""

    text: str


@dataclass(frozen=True, slots=True)
class _Sent:
    """An order under way."""

    moment_s: float
    about: str
    work: int


class Member(Protocol):
    """A process or thread that obeys orders, as its leader sees it."""

    name: str
    sock: socket.socket

    def kill(self) -> None:
        """Ends it at once, whatever it does. Idempotent."""

    def end_cause(self) -> str | None:
        """How it has ended; None if it has not, or nothing is known."""


def order_codec(types: Sequence[type]) -> Codec:
    """The codec of a line whose orders have these types."""
    return Codec([Answer, Failure, *types])


class OrderLine:
    """The leader's end. `send` and `ask` are called on one thread at a time, and `obeying` on one, perhaps another."""

    def __init__(
        self,
        members: Sequence[Member],
        codec: Codec,
        abort: Callable[[], object] | None = None,
        least_s: float = LEAST_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`abort` makes the leader's own work fail where it waits for a member. `clock` gives seconds.

        Raises `ThreadNotStarted` and OSError; the members are then the caller's to end.
        """
        self.cause: str | None = None  # of the end
        self.on_end: list[Callable[[str], object]] = []  # called once, on the thread that finds the cause
        self.on_close: list[Callable[[], object]] = []  # called once by `close`, after the end
        self._members, self._codec, self._abort, self._least_s = members, codec, abort, least_s
        self._is_serving = False
        self._number = 0  # of the last order
        self._sent: dict[int, _Sent] = {}  # by order that some member has not answered
        self._marks: dict[int, tuple[int, str]] = {}  # the leader's, of these
        self._answers: list[dict[int, Answer]] = [{} for _ in members]  # of these
        self._clock, self._paused_s = clock, 0.0  # of all pauses
        self._longest_s = 0.0  # of the last orders
        self._unit_s = 0.0  # the most that a unit of work took
        self._changed = threading.Condition()
        self._is_closed = False
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="millrace-orders", daemon=True)
        try:
            start_thread(self._thread)
        except ThreadNotStarted:
            os.close(self._wake)
            os.close(self._waker)
            raise

    def limit_s(self, work: int = 0) -> float:
        """Seconds that a member may take for an order of so much work now."""
        expected_s = max(self._longest_s, self._unit_s * work)
        return max(self._least_s, PATIENCE * expected_s) if self._is_serving else START_S

    def serving(self) -> None:
        """The start is over: members answer within `limit_s` from now on."""
        self._is_serving = True

    def check(self) -> None:
        """Raises `LineEnded` if the line has ended."""
        if self.cause is not None:
            raise LineEnded(self.cause)

    def send(self, order: Any, about: str, work: int = 0) -> int:
        """Sends an order to all members. Raises `LineEnded`, and `WireError` for one too large, which none gets.

        `about` is what it is, in words; `work` is a measure of its time, as the tokens of a step.
        """
        header, body = self._codec.encode(order)
        return self._send([(header, body)] * len(self._members), about, work)

    def send_each(self, orders: Sequence[Any], about: str) -> int:
        """As `send`, with an order for each member."""
        return self._send([self._codec.encode(order) for order in orders], about)

    def _send(self, encoded: Sequence[tuple[bytes, Any]], about: str, work: int = 0) -> int:
        self.check()
        number = self._number + 1
        frames = [b"".join(pack_frame(ITEM, 0, *parts, number, MAX_ORDER_BYTES)) for parts in encoded]
        with self._changed:
            self._number = number
            self._sent[number] = _Sent(self._now(), about, work)
        try:
            for member, frame in zip(self._members, frames, strict=True):
                member.sock.sendall(frame)
        except OSError as error:
            self._fail(f"order {number} ({about}) cannot be sent: {error}")
        return number

    @contextmanager
    def obeying(self, number: int, mark: Callable[[], tuple[int, str]]) -> Iterator[None]:
        """The leader's own part of an order. An error in it ends the line, and is raised as `LineEnded`.

        `mark` returns the leader's mark, and its last action, afterwards.
        """
        try:
            yield
        except Exception as error:
            text = str(error).partition("\n")[0]
            self._fail(f"{type(error).__name__} of the leader in order {number}: {text}", error)
        with self._changed:
            self._marks[number] = mark()
            self._compare(number)

    def ask(self, order: Any, about: str) -> list[Any]:
        """Sends an order and waits for the value that each member answers."""
        return self.answers(self.send(order, about))

    def answers(self, number: int) -> list[Any]:
        """Waits for the values of an order that the leader takes no part in. Raises `LineEnded`."""
        with self._changed:
            while self.cause is None and not all(number in answers for answers in self._answers):
                self._changed.wait(SLICE_S)
            self.check()
            values = [answers[number].value for answers in self._answers]
            self._forget(number)
        return values

    def unless_ended(self, call: Callable[[], T], limit_s: float = math.inf, about: str = "") -> T:
        """What `call` returns, or raises. Leaves it to a thread of its own, and raises `LineEnded`, when the line ends.

        For a call that would wait for a member that is gone. One that takes over `limit_s` ends the line; `about` is
        what it is, in words. Raises `ThreadNotStarted`.
        """
        found: Future[T] = Future()

        def run() -> None:
            try:
                found.set_result(call())
            except BaseException as error:
                found.set_exception(error)

        start_thread(threading.Thread(target=run, name="millrace-order", daemon=True))
        began_s = self._now()
        while not wait([found], min(SLICE_S, limit_s)).done:
            self.check()
            if self._now() - began_s > limit_s:
                self.end(f"{about} took over {limit_s:g} s")
        return found.result()

    def end(self, cause: str) -> None:
        """Ends all members. The first cause counts."""
        with self._changed:
            if self.cause is not None:
                return
            self.cause = cause
            self._changed.notify_all()
        for member in self._members:
            member.kill()
        if self._abort is not None:
            self._abort()
        for callback in [] if self._is_closed else self.on_end:
            callback(cause)

    def close(self) -> None:
        """Ends all members without a cause. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self.end("the group was closed")
            os.write(self._waker, b"x")
            if threading.current_thread() is not self._thread:
                self._thread.join()
            for callback in self.on_close:
                callback()
            for member in self._members:
                member.sock.close()
            os.close(self._wake)
            os.close(self._waker)

    def _fail(self, cause: str, error: BaseException | None = None) -> None:
        """Ends the line for an error of the leader, unless a member is found to be its cause. Raises `LineEnded`."""
        with self._changed:
            self._changed.wait_for(lambda: self.cause is not None, VERDICT_S)
        self.end(cause)
        raise LineEnded(self.cause) from error

    def _now(self) -> float:
        """Seconds without the pauses."""
        return self._clock() - self._paused_s

    # -- on the line's thread

    def _watch(self) -> None:
        readers = [FrameReader() for _ in self._members]
        places = {member.sock.fileno(): place for place, member in enumerate(self._members)}
        poll = select.poll()
        for number in (*places, self._wake):
            poll.register(number, select.POLLIN)
        looked_s = self._clock()
        while not self._is_closed:
            ready = poll.poll(SLICE_S * 1000)
            late_s = self._clock() - looked_s - SLICE_S
            self._paused_s += late_s if late_s > PAUSE_S else 0.0
            looked_s = self._clock()
            for number, _ in ready:
                place = places.get(number)
                if place is not None and not self._read(place, readers[place]):
                    poll.unregister(number)
            self._look()

    def _read(self, place: int, reader: FrameReader) -> bool:
        """Takes what has come from a member; False at its end."""
        member = self._members[place]
        try:
            received = member.sock.recv(RECEIVED_BYTES)
        except OSError:
            received = b""
        if not received:
            self.end(f"{member.name} has ended ({_cause_of(member)})")
            return False
        try:
            reader.feed(received)
            while (frame := reader.next()) is not None:
                self._take(place, frame[4], self._codec.decode(frame[2], frame[3]))
        except (LinkError, ValueError) as error:
            self.end(f"{member.name} sent what is no answer: {error}")
        return True

    def _take(self, place: int, number: int, word: Any) -> None:
        if isinstance(word, Failure):
            return self.end(f"{self._members[place].name} in order {number} ({self._about(number)}): {word.text}")
        with self._changed:
            self._answers[place][number] = word
            self._compare(number)
            self._changed.notify_all()

    def _compare(self, number: int) -> None:
        """Once all have obeyed an order that the leader takes part in, their marks must be equal."""
        if number not in self._marks or not all(number in answers for answers in self._answers):
            return
        (mark, about), sent = self._marks[number], self._sent[number]
        unlike = [
            f"{member.name}: {answers[number].about}"
            for member, answers in zip(self._members, self._answers, strict=True)
            if answers[number].mark != mark
        ]
        if unlike:
            said = f"ranks parted at order {number} ({self._about(number)}): the leader's last call is {about}"
            self.end("; ".join([said, *unlike]))
        took_s = self._now() - sent.moment_s
        self._longest_s = max(self._longest_s * (1 - 1 / 256), took_s)
        if sent.work >= MEASURED_WORK:
            self._unit_s = max(self._unit_s, took_s / sent.work)
        self._forget(number)

    def _look(self) -> None:
        """Ends the line if a member takes too long."""
        with self._changed:
            number = min(self._sent, default=None)
            if number is None or self.cause is not None:
                return
            sent = self._sent[number]
            took_s = self._now() - sent.moment_s
            late = [
                member.name
                for member, answers in zip(self._members, self._answers, strict=True)
                if number not in answers
            ]
        if took_s > self.limit_s(sent.work) and late:
            self.end(f"{' and '.join(late)} did not answer order {number} ({sent.about}) in {took_s:.1f} s")

    def _about(self, number: int) -> str:
        return self._sent[number].about if number in self._sent else "answered"

    def _forget(self, number: int) -> None:
        for table in (self._sent, self._marks, *self._answers):
            table.pop(number, None)  # type: ignore[attr-defined]


class OrderReader:
    """A member's end, which blocks."""

    def __init__(self, sock: socket.socket, codec: Codec) -> None:
        self._sock, self._codec, self._frames = sock, codec, FrameReader(MAX_ORDER_BYTES)
        self._number = 0

    def next(self) -> Any:
        """Waits for the next order; None at the end of the line."""
        while (frame := self._frames.next()) is None:
            try:
                received = self._sock.recv(RECEIVED_BYTES)
            except OSError:
                return None
            if not received:
                return None
            self._frames.feed(received)
        self._number = frame[4]
        return self._codec.decode(frame[2], frame[3])

    def answer(self, mark: int, about: str, value: Any = None) -> None:
        """Says that the last order is obeyed."""
        self._post(Answer(mark, about, value))

    def fail(self, text: str) -> None:
        """Says that the last order cannot be obeyed."""
        self._post(Failure(text))

    def _post(self, word: Any) -> None:
        header, body = self._codec.encode(word)
        with suppress(OSError):
            self._sock.sendall(b"".join(pack_frame(WORD, 0, header, body, self._number)))


def _cause_of(member: Member) -> str:
    """How a member has ended; its process may take a moment to be gone."""
    until = time.monotonic() + VERDICT_S / 4
    while (cause := member.end_cause()) is None and time.monotonic() < until:
        time.sleep(0.01)
    return cause or "it has closed its end"

"""Orders to several members: answers, deadlines, and a group that ends as one with its cause named."""

from __future__ import annotations

import itertools
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from millrace.runtime.processes import order_line
from millrace.runtime.processes.order_line import LineEnded, OrderLine, OrderReader, order_codec
from millrace.runtime.processes.wire import WireError
from tests.counts import count


@dataclass(frozen=True, slots=True)
class Add:
    """An order of this test."""

    number: int


CODEC = order_codec([Add])
Obey = Callable[[OrderReader, Add], None]


class Pupil:
    """A member that is a thread; `obey` answers each order."""

    def __init__(self, number: int, obey: Obey) -> None:
        self.name, self.is_killed = f"rank {number}", False
        self.sock, theirs = socket.socketpair()
        self._thread = threading.Thread(target=self._live, args=(theirs, obey), daemon=True)
        self._thread.start()

    def _live(self, sock: socket.socket, obey: Obey) -> None:
        reader = OrderReader(sock, CODEC)
        with sock:
            while (order := reader.next()) is not None and order.number >= 0:
                obey(reader, order)

    def kill(self) -> None:
        self.is_killed = True
        self.sock.shutdown(socket.SHUT_RDWR)

    def end_cause(self) -> str | None:
        return "signal 9 (SIGKILL)"


def add(reader: OrderReader, order: Add) -> None:
    reader.answer(order.number, f"add {order.number}", order.number + 1)


is_over = threading.Event()  # the test; for members that never answer


def late(reader: OrderReader, order: Add) -> None:
    if order.number != 2 or not is_over.wait(300):
        add(reader, order)


def failing(reader: OrderReader, order: Add) -> None:
    reader.fail("ValueError: 3 is too much") if order.number == 3 else add(reader, order)


@pytest.fixture
def made() -> Iterator[Callable[..., tuple[OrderLine, list[Pupil]]]]:
    lines = []
    is_over.clear()

    def make(*obeys: Obey, **options: Any) -> tuple[OrderLine, list[Pupil]]:
        pupils = [Pupil(number, obey) for number, obey in enumerate(obeys, 1)]
        lines.append(OrderLine(pupils, CODEC, **options))
        return lines[-1], pupils

    yield make
    for line in lines:
        line.close()
    is_over.set()


def own(line: OrderLine, number: int, mark: int) -> None:
    with line.obeying(line.send(Add(number), f"add {number}"), lambda: (mark, f"add {mark}")):
        pass


def cause_of(line: OrderLine) -> str:
    until = time.monotonic() + 60
    while line.cause is None and time.monotonic() < until:
        time.sleep(0.005)
    return str(line.cause)


def test_all_members_obey_in_order_and_answer_with_values(made: Any) -> None:
    line, _ = made(add, add)
    assert [line.ask(Add(number), "add") for number in range(5)] == [[n + 1, n + 1] for n in range(5)]
    for number in range(200):
        own(line, number, number)
    assert line.answers(line.send_each([Add(7), Add(9)], "add")) == [8, 10]
    assert line.cause is None


def test_a_member_that_ends_ends_all_and_is_named(made: Any) -> None:
    ended: list[str] = []
    line, pupils = made(add, add, abort=lambda: ended.append("aborted"))
    line.on_end.append(ended.append)
    line.send_each([Add(1), Add(-1)], "add")
    assert cause_of(line) == "rank 2 has ended (signal 9 (SIGKILL))"
    until = time.monotonic() + 60
    while len(ended) < 2 and time.monotonic() < until:  # the thread that found the cause tells it next
        time.sleep(0.005)
    assert all(pupil.is_killed for pupil in pupils) and ended == ["aborted", line.cause]
    with pytest.raises(LineEnded, match="rank 2 has ended"):
        line.send(Add(1), "add")


def test_a_member_that_is_too_late_ends_all_with_the_order_named(made: Any) -> None:
    ticks = itertools.count()  # a look at the time takes 0.3 s, whatever the machine does: less than a pause
    line, _ = made(add, late, least_s=1.0, clock=lambda: next(ticks) / 10)
    assert line.ask(Add(1), "add 1") == [2, 2]
    line.serving()
    own(line, 2, 2)
    found = re.fullmatch(r"rank 2 did not answer order 2 \(add 2\) in (.*) s", cause_of(line))
    assert found is not None and 1.0 <= float(found[1]) <= 1.5


def test_an_order_that_is_too_large_reaches_no_member_and_ends_nothing(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order_line, "MAX_ORDER_BYTES", 8)
    line, _ = made(add, add, least_s=0.3)
    line.serving()
    with pytest.raises(WireError, match="at most 8"):
        line.send_each([Add(1), Add(10**15)], "add")
    monkeypatch.undo()
    time.sleep(0.7)
    line._least_s = 60.0
    assert line.ask(Add(4), "add") == [5, 5] and line.cause is None


def test_a_pause_of_the_whole_machine_counts_for_no_member(made: Any) -> None:
    pause_s = 0.0
    line, _ = made(late, least_s=20.0, clock=lambda: time.monotonic() + pause_s)
    line.serving()
    number = line.send(Add(2), "add 2")
    pause_s = 300.0
    time.sleep(0.6)
    assert line.cause is None and not line._answers[0] and line._sent[number].about == "add 2"


def test_an_order_of_more_work_than_ever_has_its_share_of_time(made: Any) -> None:
    line, _ = made(add, least_s=0.3)
    assert line.limit_s(1000) > 60  # of the start
    line.serving()
    began = time.monotonic()
    with line.obeying(line.send(Add(1), "add", 20), lambda: (1, "add 1")):
        time.sleep(0.04)
    while line.limit_s() == 0.3:
        time.sleep(0.001)
    most_s = 20 * (time.monotonic() - began)
    assert 0.8 <= line.limit_s() <= most_s and line.limit_s(2000) == pytest.approx(100 * line.limit_s())


def test_a_call_of_the_leader_that_takes_too_long_ends_all_and_is_named(made: Any) -> None:
    line, pupils = made(add, add)
    assert line.unless_ended(lambda: 7, 5.0, "a sum") == 7
    is_over = threading.Event()
    with pytest.raises(LineEnded, match=r"^the first sum took over 0.3 s$"):
        line.unless_ended(is_over.wait, 0.3, "the first sum")
    is_over.set()
    assert all(pupil.is_killed for pupil in pupils)


def test_a_member_that_fails_ends_all_with_its_words(made: Any) -> None:
    line, _ = made(add, failing)
    with pytest.raises(LineEnded, match=r"rank 2 in order 1 \(adding\): ValueError: 3 is too much"):
        line.ask(Add(3), "adding")


def test_members_that_do_something_else_than_the_leader_are_named(made: Any) -> None:
    line, _ = made(add, add)
    own(line, 4, 5)
    assert cause_of(line) == (
        "ranks parted at order 1 (add 4): the leader's last call is add 5; rank 1: add 4; rank 2: add 4"
    )


def test_an_error_of_the_leader_ends_all_and_is_the_cause_of_the_error(made: Any) -> None:
    line, pupils = made(add)
    with pytest.raises(LineEnded, match=r"ValueError of the leader in order 1: no") as caught:
        with line.obeying(line.send(Add(1), "add"), lambda: (1, "add 1")):
            raise ValueError("no\nmore")
    assert isinstance(caught.value.__cause__, ValueError) and pupils[0].is_killed


DEEDS = ("ends", "fails", "hangs", "parts", "babbles")


@pytest.mark.parametrize("seed", range(count(in_ci=5, full=200)))
def test_whatever_one_member_does_all_end_once_and_it_is_named(made: Any, seed: int) -> None:
    draw = random.Random(seed)
    deed, victim, when = DEEDS[seed % len(DEEDS)], draw.randint(1, 3), draw.randint(1, 40)

    def misbehave(reader: OrderReader, order: Add) -> None:
        if order.number != when:
            return add(reader, order)
        if deed == "ends":
            reader._sock.shutdown(socket.SHUT_RDWR)
        elif deed == "fails":
            reader.fail("OSError: no")
        elif deed == "parts":
            reader.answer(-1, "something else")
        elif deed == "babbles":
            reader._sock.sendall(draw.randbytes(64))

    causes: list[str] = []
    least_s = 1.0 if deed == "hangs" else 60.0
    line, pupils = made(*(misbehave if number == victim else add for number in (1, 2, 3)), least_s=least_s)
    line.on_end.append(causes.append)
    line.serving()
    with pytest.raises(LineEnded):
        for number in range(1, 20_000):
            own(line, number, number)
            time.sleep(0.001 * (number > when))
    until = time.monotonic() + 60
    while not causes and time.monotonic() < until:  # the line's thread calls back after the leader may know
        time.sleep(0.005)
    assert causes == [line.cause] and f"rank {victim}" in causes[0], (deed, causes)
    assert not any(f"rank {other}" in causes[0] for other in {1, 2, 3} - {victim}), (deed, causes)
    assert all(pupil.is_killed for pupil in pupils)

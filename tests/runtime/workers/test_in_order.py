"""Items that either of two threads may process: once, in order."""

from __future__ import annotations

import threading

import pytest

from millrace.runtime.workers.in_order import InOrder


def test_all_that_is_to_be_done_is_done_once_and_in_order() -> None:
    done: list[int] = []
    items: InOrder[int] = InOrder(lambda item: None, done.append)
    turns = [items.append(item) for item in range(5)]
    items.do_through(turns[1])
    assert done == [0, 1]
    items.do_all()
    items.do_all()
    items.do_through(turns[0])
    assert done == [0, 1, 2, 3, 4]


def test_an_item_that_another_thread_did_while_this_one_waited_is_not_done_again() -> None:
    done: list[int] = []
    is_waiting, may_go_on = threading.Event(), threading.Event()

    def wait(item: int) -> None:
        if threading.current_thread() is slow:
            is_waiting.set()
            may_go_on.wait(10)

    items: InOrder[int] = InOrder(wait, done.append)
    items.append(1)
    slow = threading.Thread(target=items.do_all)
    slow.start()
    assert is_waiting.wait(10)
    items.do_all()
    assert done == [1]
    may_go_on.set()
    slow.join(10)
    assert done == [1] and not slow.is_alive()


def test_an_item_that_fails_raises_for_its_own_caller_and_delays_no_other() -> None:
    tried: list[int] = []

    def do(item: int) -> None:
        tried.append(item)
        if item == 7:
            raise ValueError(item)

    items: InOrder[int] = InOrder(lambda item: None, do)
    first, broken, last = (items.append(item) for item in (6, 7, 8))
    items.do_through(first)
    items.do_through(last)
    with pytest.raises(ValueError, match="7"):
        items.do_through(broken)
    assert tried == [6, 7, 8]
    items.append(9)
    items.do_all()
    assert tried == [6, 7, 8, 9]


def test_an_item_whose_wait_fails_stays_in_the_queue() -> None:
    done: list[int] = []
    troubles = [OSError("the device is gone")]

    def wait(item: int) -> None:
        if troubles:
            raise troubles.pop()

    items: InOrder[int] = InOrder(wait, done.append)
    turn = items.append(7)
    with pytest.raises(OSError, match="gone"):
        items.do_through(turn)
    assert done == []
    items.do_through(turn)
    assert done == [7]

"""A thread that prepares ahead: order, items that are taken late or never, and its end."""

from __future__ import annotations

import threading

from millrace.runtime.workers.ahead_thread import AheadThread


def test_items_are_prepared_in_order_ahead_of_the_one_that_is_taken():
    prepared: list[int] = []
    has_all = threading.Event()

    def prepare(item: list[int]) -> int:
        prepared.append(item[0])
        if len(prepared) == 4:
            has_all.set()
        return 10 * item[0]

    thread = AheadThread("test-ahead", prepare)
    items = [[number] for number in range(4)]
    for item in items:
        thread.offer(item)
    assert has_all.wait(20) and prepared == [0, 1, 2, 3]
    assert list(thread.take(items[1])) == [0, 10]
    assert list(thread.take(items[3])) == [20, 30]
    late = [7]
    assert list(thread.take(late)) == [70], "what was not offered is offered now"
    thread.close()
    thread.close()
    assert list(thread.take([8])) == []
    assert "test-ahead" not in [each.name for each in threading.enumerate()]

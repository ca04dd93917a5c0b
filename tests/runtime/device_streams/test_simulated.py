"""The simulated device keeps the order that streams and events promise, and no other."""

from __future__ import annotations

import threading
from random import Random

import numpy as np
import pytest

from millrace.runtime.device_streams.simulated import DeviceStuck, SimStreams


def run_of(seed: int, *, waits: bool) -> list[str]:
    """Two streams that record their work. The second waits for the middle of the first, or does not."""
    device, seen = SimStreams(Random(seed)), []
    first, second, event = device.stream("first"), device.stream("second"), device.event()
    first.launch(lambda: seen.append("a"))
    first.record(event)
    first.launch(lambda: seen.append("b"))
    if waits:
        second.wait(event)
    second.launch(lambda: seen.append("c"))
    second.launch(lambda: seen.append("d"))
    device.wait()
    return seen


def test_a_stream_keeps_its_order_and_events_order_streams() -> None:
    runs = [run_of(seed, waits=True) for seed in range(200)]
    for seen in runs:
        assert seen.index("a") < seen.index("b") and seen.index("a") < seen.index("c") < seen.index("d")
    assert {"".join(seen) for seen in runs} == {"abcd", "acbd", "acdb"}


def test_without_an_event_every_order_happens() -> None:
    orders = {"".join(run_of(seed, waits=False)) for seed in range(400)}
    assert orders == {"abcd", "acbd", "acdb", "cabd", "cadb", "cdab"}


def test_one_seed_is_one_order() -> None:
    assert [run_of(5, waits=False) for _ in range(3)] == [run_of(5, waits=False)] * 3


def test_nothing_is_sure_to_be_done_but_what_was_waited_for() -> None:
    done_early = 0
    for seed in range(50):
        device, seen = SimStreams(Random(seed)), []
        stream, event = device.stream("only"), device.event()
        stream.launch(lambda seen=seen: seen.append(1))
        stream.record(event)
        stream.launch(lambda seen=seen: seen.append(2))
        done_early += bool(seen)
        event.wait()
        assert seen[:1] == [1] and event.query()
    assert 0 < done_early < 50


def test_an_event_stands_for_its_last_recording_and_a_wait_for_the_one_it_saw() -> None:
    device, seen = SimStreams(Random(0), laziness=1.0), []
    first, second, event = device.stream("first"), device.stream("second"), device.event()
    assert event.query(), "never recorded"
    first.record(event)
    second.wait(event)
    second.launch(lambda: seen.append("second"))
    first.wait(mark := device.event())  # never recorded: nothing to wait for
    first.launch(lambda: seen.append("first"))
    first.record(event)
    assert not event.query() and mark.query()
    event.wait()
    assert "first" in seen and event.query()
    device.wait()
    assert sorted(seen) == ["first", "second"]


def copy_and_launch(seed: int, *, waits: bool) -> np.ndarray:
    """What a launch sees of an array that another stream copies to."""
    device = SimStreams(Random(seed), laziness=0.2)
    copies, work, copied = device.stream("copies"), device.stream("work"), device.event()
    source, destination = np.arange(1, 9, dtype=np.int32), np.zeros(8, np.int32)
    seen = np.zeros(8, np.int32)
    copies.copy(destination, source)
    copies.record(copied)
    if waits:
        work.wait(copied)
    work.launch(lambda: seen.__setitem__(slice(None), destination))
    device.wait()
    assert (destination == source).all()
    return seen


def test_a_copy_is_seen_whole_behind_its_event_and_torn_without() -> None:
    assert all((copy_and_launch(seed, waits=True) == np.arange(1, 9)).all() for seed in range(100))
    seen = {tuple(copy_and_launch(seed, waits=False)) for seed in range(100)}
    garbage = 0x6B6B6B6B
    assert seen == {(0,) * 8, (garbage,) * 8, (1, 2, 3, 4, *[garbage] * 4), tuple(range(1, 9))}


def test_the_source_of_a_copy_is_read_late() -> None:
    device = SimStreams(Random(0), laziness=1.0)
    stream, source, destination = device.stream("only"), np.full(4, 1), np.zeros(4, np.int64)
    stream.copy(destination, source)
    source[:] = 2
    device.wait()
    assert (destination == 2).all()


def test_a_graph_is_the_launches_it_captured_each_time_it_is_replayed() -> None:
    device, seen = SimStreams(Random(0)), []
    stream = device.stream("only")

    def work() -> None:
        stream.launch(lambda: seen.append("a"))
        stream.launch(lambda: seen.append("b"))

    graph = stream.capture(work)
    device.wait()
    assert not seen and graph.num_replays == 0
    for _ in range(2):
        stream.replay(graph)
    device.wait()
    assert seen == ["a", "b"] * 2 and graph.num_replays == 2


def test_what_may_not_be_captured_is_refused() -> None:
    device = SimStreams(Random(0))
    stream, event = device.stream("only"), device.event()
    with pytest.raises(AssertionError, match="Record while a graph is captured"):
        stream.capture(lambda: stream.record(event))
    with pytest.raises(AssertionError, match="Copy while a graph is captured"):
        stream.capture(lambda: stream.copy(np.zeros(1), np.ones(1)))
    stream.launch(lambda: None)  # the failed captures are over
    device.wait()


def test_streams_that_wait_for_each_other_are_told_at_once() -> None:
    device = SimStreams(Random(0), laziness=1.0)
    first, second = device.stream("first"), device.stream("second")
    mine, theirs = device.event(), device.event()
    mine.num_recorded = theirs.num_recorded = 1  # each behind a wait for the other
    first.wait(theirs)
    second.wait(mine)
    with pytest.raises(DeviceStuck, match="first: wait, second: wait"):
        device.wait()


def test_an_error_on_the_device_is_raised_by_every_wait_from_then_on() -> None:
    device = SimStreams(Random(0), laziness=1.0)
    stream, event = device.stream("only"), device.event()
    stream.launch(lambda: 1 // 0)
    stream.record(event)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            event.wait()
    with pytest.raises(ZeroDivisionError):
        device.wait()


def test_the_device_has_a_clock_of_its_own() -> None:
    device = SimStreams(Random(0))
    stream, first, second = device.stream("only"), device.event(), device.event()
    stream.record(first)
    for _ in range(5):
        stream.launch(lambda: None)
    stream.record(second)
    device.wait()
    assert second.us_since(first) == 6.0 and first.us_since(second) == -6.0


def test_each_thread_is_told_of_the_stream_that_it_uses() -> None:
    device, found = SimStreams(Random(0)), []
    first, second = device.stream("first"), device.stream("second")
    first.use()
    second.use()
    other = threading.Thread(target=lambda: found.append(device.used))
    other.start()
    other.join(10)
    assert (device.used, found) == ("second", [None])

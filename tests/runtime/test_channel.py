"""Channels: order, waiting, cancellation, closing and counting."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from millrace.runtime.channel import Channel, ChannelClosed, ControlLane
from millrace.runtime.wakeups import Wakeup


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(main)


async def settle() -> None:
    """Lets everything that is ready run, several hops deep."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_items_come_out_in_the_order_in_which_they_went_in() -> None:
    channel: Channel[int] = Channel("c", 3)
    assert [channel.try_send(i) for i in (1, 2, 3, 4)] == [True, True, True, False]
    assert channel.recv_all() == [1, 2, 3]
    assert channel.recv_all() == []


def test_a_capacity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="channel c: capacity = 0: must be at least 1"):
        Channel("c", 0)


def test_send_waits_for_room_and_waiting_senders_get_it_in_order_of_arrival() -> None:
    async def main() -> None:
        channel: Channel[int] = Channel("c", 1)
        senders = [asyncio.create_task(channel.send(i)) for i in range(4)]
        await settle()
        assert len(channel) == 1 and channel.num_waiting == 3
        received = []
        for _ in range(4):
            received += channel.recv_all()
            await settle()
        assert received == [0, 1, 2, 3]
        assert all(sender.done() for sender in senders)

    run(main())


def test_try_send_does_not_overtake_a_waiting_sender() -> None:
    async def main() -> None:
        channel: Channel[str] = Channel("c", 1)
        channel.try_send("first")
        waiting = asyncio.create_task(channel.send("second"))
        await settle()
        assert channel.recv_all() == ["first"]
        assert not channel.try_send("third")  # the room is promised, though the sender has not run yet
        await waiting
        assert channel.recv_all() == ["second"]

    run(main())


def test_a_cancelled_waiting_sender_leaves_nothing_behind() -> None:
    async def main() -> None:
        channel: Channel[str] = Channel("c", 1)
        channel.try_send("first")
        waiting = asyncio.create_task(channel.send("never"))
        await settle()
        waiting.cancel()
        await settle()
        assert channel.num_waiting == 0
        assert channel.recv_all() == ["first"]
        assert channel.try_send("next") and channel.recv_all() == ["next"]

    run(main())


def test_a_sender_cancelled_after_it_was_promised_room_passes_the_wake_up_on() -> None:
    async def main() -> None:
        channel: Channel[str] = Channel("c", 1)
        channel.try_send("first")
        woken = asyncio.create_task(channel.send("cancelled"))
        next_one = asyncio.create_task(channel.send("second"))
        await settle()
        channel.recv_all()  # promises the room to `woken` ...
        woken.cancel()  # ... which is cancelled before it runs
        await asyncio.wait_for(next_one, 60.0)
        assert channel.recv_all() == ["second"]
        assert channel.try_send("third")

    run(main())


def test_reserved_room_is_held_until_it_is_used_or_released() -> None:
    async def main() -> None:
        channel: Channel[int] = Channel("c", 2)
        used, released = await channel.reserve(), await channel.reserve()
        assert not channel.try_send(9)
        waiting = asyncio.create_task(channel.reserve())
        await settle()
        assert not waiting.done()
        released.release()
        released.release()  # does nothing the second time
        (await waiting).send(2)
        used.send(1)
        used.release()  # does nothing after use
        assert channel.recv_all() == [2, 1]
        with pytest.raises(RuntimeError, match="permit used twice"):
            used.send(3)

    run(main())


def test_a_closed_channel_takes_nothing_and_delivers_what_it_holds() -> None:
    async def main() -> None:
        channel: Channel[int] = Channel("chat", 2)
        channel.try_send(1)
        channel.try_send(2)
        channel.close()
        channel.close()
        with pytest.raises(ChannelClosed, match="channel chat is closed"):
            channel.try_send(3)
        with pytest.raises(ChannelClosed):
            await channel.send(3)
        assert [item async for item in channel] == [1, 2]

    run(main())


def test_closing_wakes_waiting_senders_with_an_error() -> None:
    async def main() -> None:
        channel: Channel[int] = Channel("c", 1)
        channel.try_send(1)
        senders = [asyncio.create_task(channel.send(i)) for i in (2, 3)]
        await settle()
        channel.close()
        for sender in senders:
            with pytest.raises(ChannelClosed, match="while a sender waited"):
                await sender
        assert channel.recv_all() == [1]

    run(main())


def test_room_promised_before_the_close_cannot_be_used_after_it() -> None:
    """Else `send` would succeed with an item that its receiver, which saw the end, never takes."""

    async def main() -> None:
        channel: Channel[int] = Channel("c", 1)
        permit = await channel.reserve()
        channel.close()
        assert [item async for item in channel] == []
        with pytest.raises(ChannelClosed):
            permit.send(1)
        assert len(channel) == 0

    run(main())


def test_a_receiver_that_waits_gets_what_comes_and_ends_with_the_close() -> None:
    async def main() -> None:
        channel: Channel[int] = Channel("c", 2)
        received: list[int] = []

        async def receive() -> None:
            received.extend([item async for item in channel])

        receiver = asyncio.create_task(receive())
        for i in range(10):
            await channel.send(i)
        await settle()
        channel.close()
        await asyncio.wait_for(receiver, 60.0)
        assert received == list(range(10))

    run(main())


def test_a_cancelled_receive_loses_no_item() -> None:
    async def main() -> None:
        channel: Channel[int] = Channel("c", 1)

        async def receive() -> int:
            async for item in channel:
                return item
            raise AssertionError("closed")

        receiver = asyncio.create_task(receive())
        await settle()
        channel.try_send(1)  # wakes the receiver, which is cancelled before it runs
        receiver.cancel()
        await settle()
        assert await asyncio.wait_for(receive(), 60.0) == 1

    run(main())


def test_counters_and_times_tell_how_long_a_channel_was_full_and_empty() -> None:
    clock = [0.0]
    channel: Channel[int] = Channel("c", 2, clock=lambda: clock[0])
    clock[0] = 1.0
    channel.try_send(1)  # empty for 1 s
    clock[0] = 3.0
    channel.try_send(2)  # full from here
    clock[0] = 7.0
    stats = channel.stats()
    assert (stats.depth, stats.high_water, stats.num_sent, stats.num_received) == (2, 2, 2, 0)
    assert (stats.seconds_full, stats.seconds_empty) == (4.0, 1.0)
    channel.recv_all()
    clock[0] = 8.0
    stats = channel.stats()
    assert (stats.depth, stats.high_water, stats.num_sent, stats.num_received) == (0, 2, 2, 2)
    assert (stats.seconds_full, stats.seconds_empty) == (4.0, 2.0)


# -- wakeups and lanes


def test_a_ring_before_the_wait_is_not_lost() -> None:
    async def main() -> None:
        wakeup = Wakeup()
        wakeup.set()
        await asyncio.wait_for(wakeup.wait(), 60.0)
        waiting = asyncio.create_task(wakeup.wait())
        await settle()
        assert not waiting.done()  # one ring, one wake-up
        wakeup.set()
        await asyncio.wait_for(waiting, 60.0)

    run(main())


def test_a_ring_whose_waiter_was_cancelled_wakes_the_next_one() -> None:
    async def main() -> None:
        wakeup = Wakeup()
        waiting = asyncio.create_task(wakeup.wait())
        await settle()
        wakeup.set()
        waiting.cancel()
        await settle()
        await asyncio.wait_for(wakeup.wait(), 60.0)

    run(main())


def test_a_bell_that_starts_to_listen_late_still_rings_for_what_is_there() -> None:
    async def main() -> None:
        channel: Channel[int] = Channel("c", 1)
        channel.try_send(1)
        wakeup = Wakeup()
        channel.listen(wakeup)
        await asyncio.wait_for(wakeup.wait(), 60.0)
        closed: Channel[int] = Channel("c", 1)
        closed.close()
        closed.listen(wakeup)
        await asyncio.wait_for(wakeup.wait(), 60.0)
        lane = ControlLane("control")
        lane.post(1, "cancel")
        lane.listen(wakeup)
        await asyncio.wait_for(wakeup.wait(), 60.0)

    run(main())


def test_the_control_lane_keeps_the_first_cause_of_each_sequence_in_order_of_posting() -> None:
    lane = ControlLane("control")
    for sequence_id, cause in ((7, "finish"), (3, "cancel"), (7, "deadline")):
        lane.post(sequence_id, cause)
    assert len(lane) == 2
    assert list(lane.take().items()) == [(7, "finish"), (3, "cancel")]
    assert lane.take() == {}


def test_a_control_lane_may_be_rung_with_nothing_to_take() -> None:
    lane = ControlLane("control")
    assert not lane.is_set
    lane.set()
    assert lane.is_set and len(lane) == 0
    assert lane.take() == {} and not lane.is_set
    lane.post(7, "cancel")
    assert lane.is_set and lane.take() == {7: "cancel"} and not lane.is_set


# -- any order of operations, against a model that is a list and a queue of waiters


class ChannelMachine(RuleBasedStateMachine):
    """Every rule leaves the loop idle. The races are between a receive or close and cancels before any task runs."""

    capacity = 3

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.channel: Channel[int] = Channel("c", self.capacity)
        self.items: list[int] = []
        self.waiting: list[tuple[int, asyncio.Task[None]]] = []
        self.permits: list[Any] = []
        self.num_made = 0
        self.num_sent = 0
        self.is_closed = False

    def teardown(self) -> None:
        for _, task in self.waiting:
            task.cancel()
        self.settle()
        self.loop.close()

    def settle(self) -> None:
        self.loop.run_until_complete(settle())

    def give_room(self) -> None:
        """The model: the first waiter gets room first."""
        while self.waiting and len(self.items) + len(self.permits) < self.capacity:
            self.put(self.waiting.pop(0)[0])

    def put(self, item: int) -> None:
        self.items.append(item)
        self.num_sent += 1

    def new_item(self) -> int:
        self.num_made += 1
        return self.num_made

    def has_room(self) -> bool:
        return len(self.items) + len(self.permits) < self.capacity

    @precondition(lambda self: not self.is_closed)
    @rule()
    def send(self) -> None:
        item = self.new_item()
        self.waiting.append((item, self.loop.create_task(self.channel.send(item))))
        self.settle()
        self.give_room()

    @precondition(lambda self: not self.is_closed)
    @rule()
    def try_send(self) -> None:
        item = self.new_item()
        assert self.channel.try_send(item) == self.has_room()
        if self.has_room():
            self.put(item)

    @precondition(lambda self: not self.is_closed and self.has_room())
    @rule()
    def reserve(self) -> None:
        self.permits.append(self.loop.run_until_complete(self.channel.reserve()))

    @precondition(lambda self: self.permits and not self.is_closed)
    @rule()
    def use_permit(self) -> None:
        item = self.new_item()
        self.permits.pop(0).send(item)
        self.put(item)

    @precondition(lambda self: self.permits)
    @rule()
    def release_permit(self) -> None:
        self.permits.pop(0).release()
        self.settle()
        self.give_room()

    @rule(cancelled=st.sets(st.integers(0, 5)), is_closing=st.sampled_from([False, False, False, True]))
    def receive_while_senders_are_cancelled(self, cancelled: set[int], is_closing: bool) -> None:
        assert self.channel.recv_all() == self.items
        self.items = []
        for i, (_, task) in enumerate(self.waiting):
            if i in cancelled:
                task.cancel()
        if is_closing:
            self.channel.close()
        self.settle()
        for i, (_, task) in enumerate(self.waiting):
            assert not is_closing or task.done()
            assert task.cancelled() == (i in cancelled) or is_closing
        if is_closing:
            for _, task in self.waiting:
                assert task.cancelled() or isinstance(task.exception(), ChannelClosed)
            self.is_closed, self.waiting = True, []
        self.waiting = [entry for i, entry in enumerate(self.waiting) if i not in cancelled]
        self.give_room()

    @rule(which=st.integers(0, 5))
    def cancel(self, which: int) -> None:
        if which < len(self.waiting):
            self.waiting.pop(which)[1].cancel()
            self.settle()

    @invariant()
    def the_channel_is_as_the_model(self) -> None:
        stats = self.channel.stats()
        assert stats.depth == len(self.channel) == len(self.items)
        assert self.channel.num_waiting == len(self.waiting)
        assert stats.num_sent == self.num_sent and stats.num_sent == stats.num_received + stats.depth
        assert stats.high_water <= self.capacity
        assert not (self.waiting and self.has_room()), "there is room, but a sender waits for it"


TestAnyOrderOfOperations = pytest.mark.slow(ChannelMachine.TestCase)
TestAnyOrderOfOperations.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)

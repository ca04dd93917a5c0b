"""The exit: each request ends once, by its first cause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.runtime.exit import Exit
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test


@dataclass
class Ask:
    request_id: str


@dataclass
class Box:
    request_id: str
    ends: list[tuple[str, BaseException | None]] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)

    def end(self, cause: str, error: BaseException | None) -> None:
        self.ends.append((cause, error))

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in self.items:
            yield item


class Desk(Exit[Box]):
    def make_outbox(self, request: Ask) -> Box:
        return Box(request.request_id)

    def deliver(self, item: Any) -> None:
        if item.request_id in self.live:
            self.live[item.request_id].items.append(item)


def test_the_first_end_of_a_request_counts_and_later_ones_do_nothing() -> None:
    desk = Desk()
    box = desk.open(Ask("a"))
    assert desk.is_live("a")
    assert desk.end("a", "finished")
    assert not desk.end("a", "cancel")
    desk.fail(Ask("a"), RuntimeError("late"))
    assert box.ends == [("finished", None)] and not desk.is_live("a")


def test_a_request_id_that_is_under_way_is_refused_and_the_first_goes_on() -> None:
    desk = Desk()
    box = desk.open(Ask("a"))
    with pytest.raises(ValueError, match="request a is already live"):
        desk.open(Ask("a"))
    assert desk.is_live("a") and box.ends == []
    desk.end("a", "finished")
    desk.open(Ask("a"))  # an id may be reused once its request has ended


def test_a_failure_ends_all_requests_of_a_message_with_its_error() -> None:
    class Shared(Desk):
        def requests_of(self, item: Any) -> list[str]:
            return list(item)

    desk = Shared()
    boxes = [desk.open(Ask(name)) for name in "abc"]
    error = RuntimeError("the step failed")
    desk.fail(("a", "c"), error)
    assert [box.ends for box in boxes] == [[("error", error)], [], [("error", error)]]
    desk.fail("b", error)  # a bare request id works too
    assert boxes[1].ends == [("error", error)]


def test_callbacks_hear_of_the_end_once_and_see_the_request_gone() -> None:
    desk = Desk()
    heard: list[tuple[str, str, bool]] = []
    desk.on_end.append(lambda box, cause, error: heard.append((box.request_id, cause, desk.is_live(box.request_id))))
    desk.open(Ask("a"))
    desk.end("a", "cancel")
    desk.end("a", "cancel")
    assert heard == [("a", "cancel", False)]


@sim_test(seeds=3)
async def test_a_deadline_ends_a_request_and_a_finish_before_it_disarms_it(env: SimEnv) -> None:
    desk = Desk()
    slow, quick = desk.open(Ask("slow"), deadline_s=2.0), desk.open(Ask("quick"), deadline_s=2.0)
    await env.sleep(1.0)
    desk.end("quick", "finished")
    again = desk.open(Ask("quick"))  # the old deadline must not hit the new one
    await env.sleep(1.5)
    assert slow.ends == [("deadline", None)] and quick.ends == [("finished", None)] and again.ends == []


@sim_test(seeds=6)
async def test_waiting_until_empty_returns_when_the_last_request_has_ended(env: SimEnv) -> None:
    desk = Desk()
    await asyncio.wait_for(desk.wait_until_empty(), 0.1)
    for name in "ab":
        desk.open(Ask(name))
    waiting = [asyncio.create_task(desk.wait_until_empty()) for _ in range(2)]
    await env.sleep(0.1)
    desk.end("a", "finished")
    desk.open(Ask("c"))
    desk.end("b", "finished")
    await env.sleep(0.1)
    assert not any(task.done() for task in waiting)
    desk.end("c", "finished")
    await asyncio.wait_for(asyncio.gather(*waiting), 0.1)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["open", "finish", "cancel", "fail", "deliver"])), max_size=30
    )
)
def test_any_order_of_words_leaves_one_end_a_life_and_nothing_after_it(words: list[tuple[str, str]]) -> None:
    desk = Desk()
    boxes: list[Box] = []
    for name, word in words:
        if word == "open" and not desk.is_live(name):
            boxes.append(desk.open(Ask(name)))
        elif word == "fail":
            desk.fail(Ask(name), RuntimeError())
        elif word == "deliver":
            ended = [box for box in boxes if box.ends]
            before = [len(box.items) for box in ended]
            desk.deliver(Ask(name))
            assert [len(box.items) for box in ended] == before
        else:
            desk.end(name, word)
    for name in "abc":
        desk.end(name, "abort")
    assert all(len(box.ends) == 1 for box in boxes) and desk.live == {}

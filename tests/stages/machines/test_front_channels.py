"""The channels of several fronts: credits for each, parts for each, and an end for one that does not read."""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.stages.fleet.front_table import FrontTable
from millrace.stages.machines.front_channels import MAX_KEPT_STEPS, FanOut, FrontRequests, FrontSteps
from millrace.stages.messages import Started, StepTokens
from millrace.stages.params import SamplingParams
from millrace.stages.pipeline import ENTRY_CAPACITY, TEXT_CAPACITY
from tests.stages.split.test_split import token_request


class Wire:
    """A link without another end: what it was given to carry."""

    def __init__(self) -> None:
        self.carried: list[Any] = []
        self.num_wakes = 0

    def carry(self, kind: int, edge: int, message: Any = None) -> None:
        self.carried.append(message)

    def wake(self) -> None:
        self.num_wakes += 1


def now() -> float:
    return 0.0


def step(number: int, slots: tuple[int, ...] = (0,), *started: Started) -> StepTokens:
    at = np.array(slots, np.intp)
    return StepTokens(number, at, at.astype(np.int64), at * 0, at + 100, np.zeros(len(at), np.int8), started)


def test_prompts_of_two_fronts_queue_in_order_and_each_gets_credits_for_its_own() -> None:
    requests, wires = FrontRequests(now), (Wire(), Wire())
    ends = [requests.add_end(lambda one: one) for _ in wires]
    for end, wire in zip(ends, wires, strict=True):
        end.bind(wire, 0)
    for name, end in (("a", 0), ("b", 1), ("c", 0)):
        ends[end].arrive(token_request(name, 0))
    assert [one.request_id for one in requests.recv_all()] == ["a", "b", "c"]
    assert [end.num_owed for end in ends] == [2, 1]
    requests.drop_end(ends[0])
    ends[1].arrive(token_request("d", 0))
    requests.recv_all()
    assert [end.num_owed for end in ends] == [2, 2]


def test_a_front_may_have_as_many_prompts_here_as_if_it_were_alone() -> None:
    requests = FrontRequests(now)
    ends = [requests.add_end(lambda one: one) for _ in range(2)]
    for end in ends:
        end.bind(Wire(), 0)
        for number in range(ENTRY_CAPACITY):
            end.arrive(token_request(str(number), number))
    assert len(requests.recv_all()) == 2 * ENTRY_CAPACITY


def test_steps_of_a_front_that_does_not_read_are_kept_and_sent_in_order_once_it_does() -> None:
    wire, steps = Wire(), FrontSteps(now, lambda *_: None, lambda: None)
    steps.channel.bind(wire, 0)
    for number in range(TEXT_CAPACITY + 3):
        steps.send(step(number))
    assert [one.step for one in wire.carried] == list(range(TEXT_CAPACITY)) and len(steps) == 3
    steps.channel.pay(2)
    steps.send(step(99))
    assert [one.step for one in wire.carried[-2:]] == [TEXT_CAPACITY, TEXT_CAPACITY + 1] and len(steps) == 2
    steps.channel.pay(5)
    assert [one.step for one in wire.carried[-2:]] == [TEXT_CAPACITY + 2, 99] and len(steps) == 0


def test_a_front_with_too_many_unread_steps_is_given_up_once_and_keeps_nothing() -> None:
    overruns: list[int] = []
    steps = FrontSteps(now, lambda *_: None, lambda: overruns.append(1))
    steps.channel.bind(Wire(), 0)
    for number in range(TEXT_CAPACITY + MAX_KEPT_STEPS):
        steps.send(step(number))
    assert len(steps) == MAX_KEPT_STEPS and not overruns
    for number in range(3):
        steps.send(step(number))
    assert overruns == [1] and len(steps) == 0


def test_the_fan_out_is_never_full_and_gives_each_front_its_part() -> None:
    table, sent = FrontTable(4), list[tuple[int, list[int]]]()
    ids = []
    for front in (0, 1):
        table.add(front)
        ids.append(table.take(front, token_request("r", 7)).first_sequence_id)
    channel = FanOut(table, lambda front, part: sent.append((front, part.sequence_ids.tolist())), now)
    begun = [Started(slot, ids[slot], f"r@{slot}", np.arange(3), 3, SamplingParams(), 0) for slot in (0, 1)]
    assert channel.try_send(step(0, (0, 1), *begun)) and sent == [(0, [7]), (1, [7])]
    for number in range(3 * TEXT_CAPACITY):
        assert channel.try_send(step(number, (1,)))
    assert len(channel) == 0 and sent[2:] == [(1, [7])] * (3 * TEXT_CAPACITY)
    assert channel.stats().num_sent == channel.stats().num_received == 3 * TEXT_CAPACITY + 1

"""Policies: what may be replaced, and that the scheduler stays consistent whatever a policy returns."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.params import SamplingParams
from millrace.stages.schedule.policy import AgeingPriority, Fifo, Policy, make_policy
from millrace.stages.schedule.scheduler import Limits, Scheduler
from millrace.stages.schedule.sequence import Sequence
from tests.stages.schedule.plans import request

pytest_plugins = ["millrace.stages.testing.pytest_plugin"]

LIMITS = Limits(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, block_size=4)


class ShortestPromptFirst(Policy):
    """As in the README."""

    def weight(self, sequence: Sequence) -> float:
        return sequence.num_prompt


class Chaotic(Policy):
    """Returns random results."""

    def __init__(self) -> None:
        self.dice = random.Random(1)
        self.alive: set[int] = set()

    def on_add(self, sequence: Sequence) -> None:
        self.alive.add(sequence.sequence_id)

    def on_end(self, sequence: Sequence) -> None:
        self.alive.remove(sequence.sequence_id)

    def weight(self, sequence: Sequence) -> float:
        return self.dice.random()

    def is_better(self, waiting: Sequence, running: Sequence) -> bool:
        return self.dice.random() < 0.3

    def may_enter(self, first: Sequence, num_blocks: int, num_spare: int) -> bool:
        return self.dice.random() < 0.7


class NotAPolicy:
    pass


class NeedsMore(Policy):
    def __init__(self, more: int) -> None:
        self.more = more


def admitted(policy: Policy, *requests: Any) -> list[int]:
    scheduler = Scheduler(LIMITS, policy)
    for one in requests:
        scheduler.add(one)
    plan = scheduler.plan()
    assert plan is not None
    return [started.sequence_id for started in plan.started]


def test_lower_priorities_enter_first_and_equal_ones_as_they_came():
    assert admitted(Policy(), request(0, 4, priority=1), request(1, 4), request(2, 4)) == [1, 2]


def test_first_come_first_served_looks_at_no_priority():
    assert admitted(Fifo(), request(0, 4, priority=1), request(1, 4), request(2, 4)) == [0, 1]


def test_a_policy_of_ones_own_decides_who_enters():
    assert admitted(ShortestPromptFirst(), request(0, 9), request(1, 5), request(2, 7)) == [1, 2]


@pytest.mark.parametrize(("gap_s", "first"), [(5.0, 1), (15.0, 0)])
def test_waiting_ten_seconds_is_worth_one_priority_with_ageing_of_ten(gap_s: float, first: int):
    old, new = request(0, 4, priority=1, arrival_s=0.0), request(1, 4, priority=0, arrival_s=gap_s)
    assert admitted(AgeingPriority(10.0), old, new)[0] == first


def test_with_ageing_a_stream_of_better_requests_does_not_starve_a_worse_one():
    """One slot, a better request every second, each runs for two: without ageing the worse one never starts."""

    def entered_at(policy: Policy) -> int | None:
        line = Scheduler(LIMITS, policy).waiting
        worse = _sequence(0, priority=1, arrival_s=0.0)
        line.push(worse, policy.rank(worse))
        for second in range(100):
            better = _sequence(second + 1, priority=0, arrival_s=float(second))
            line.push(better, policy.rank(better))
            if second % 2 and line.pop() is worse:
                return second
        return None

    assert entered_at(Policy()) is None
    found = entered_at(AgeingPriority(10.0))
    assert found is not None and found < 30


def test_policies_are_named_by_import_path():
    name = f"{__name__}:ShortestPromptFirst"
    assert type(make_policy(EngineConfig(scheduler=name))).__name__ == "ShortestPromptFirst"
    assert type(make_policy(EngineConfig(scheduler="fifo"))) is Fifo
    assert type(make_policy(EngineConfig(priority_ageing_s=3.0))) is AgeingPriority


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("lifo", "must be priority, fifo or package.module:Class"),
        ("no.such.module:Class", "No module named"),
        ("json:NoSuchClass", "has no attribute 'NoSuchClass'"),
        (f"{__name__}:NotAPolicy", "must be a subclass"),
        (f"{__name__}:NeedsMore", "must be constructible without arguments"),
    ],
)
def test_what_is_no_policy_is_refused_with_the_reason(name: str, complaint: str):
    with pytest.raises(ConfigError, match=complaint):
        make_policy(EngineConfig(scheduler=name))


def test_ageing_with_a_policy_that_knows_none_is_refused():
    with pytest.raises(ConfigError, match="must be unset unless scheduler = priority"):
        make_policy(EngineConfig(scheduler="fifo", priority_ageing_s=1.0))


def test_a_policy_that_answers_at_random_loses_no_token_and_no_block(scripted: Any):
    """In memory for two of twelve."""

    async def main(engine: Any) -> None:
        async def one(i: int) -> None:
            params, prompt = SamplingParams(max_tokens=40, ignore_eos=True, seed=i), [65 + i] * (5 + i)
            found = [t async for o in engine.generate(prompt, params) for t in o.outputs[0].token_ids]
            assert found == engine.model.script.expected(prompt, params)

        await asyncio.gather(*(one(i) for i in range(12)))
        assert engine.scheduler.num_preemptions > 0
        assert not engine.scheduler.policy.alive
        await engine.check_quiet()

    sizes = {"num_gpu_blocks": 14, "block_size": 8, "max_model_len": 64, "max_num_seqs": 6, "num_cpu_blocks": 20}
    scripted(main, scheduler=f"{__name__}:Chaotic", **sizes)


def _sequence(sequence_id: int, *, priority: int, arrival_s: float) -> Sequence:
    one = request(sequence_id, 4)
    return Sequence(sequence_id, one.request_id, one.token_ids, 4, 8, one.params, 0, priority, arrival_s=arrival_s)

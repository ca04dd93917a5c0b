"""Lanes: decoding rows of a model over several ranks are in one step in flight each."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from millrace.stages.allocate.allocator import Allocator
from millrace.stages.messages import StepGrant, StepPlan
from millrace.stages.schedule.scheduler import Scheduler, StepLimits
from millrace.stages.testing.scripted.grant_checker import GrantChecker
from tests.counts import FULL
from tests.stages.allocate.test_steady_decode import decoding, told
from tests.stages.schedule.naive_lanes import LanesWalk
from tests.stages.schedule.plans import plan, request
from tests.stages.schedule.test_scheduler import Bench

NUM_SEEDS = 600 if FULL else 4


def bench_of(num_lanes: int, num_seqs: int = 16, budget: int = 64) -> Bench:
    sizes = {"max_num_seqs": num_seqs, "max_num_batched_tokens": budget, "max_model_len": 64}
    bench = Bench(128, steps_in_flight=num_lanes + 1, num_lanes=num_lanes, **sizes)
    bench.allocator = Allocator(128, 4, num_seqs, 64, num_lanes=num_lanes)
    return bench


def decoding_bench(
    num_lanes: int, num_rows: int, max_tokens: int = 30
) -> tuple[Bench, list[tuple[StepPlan, StepGrant]]]:
    """A bench whose rows all decode, and the plans and grants that are in flight."""
    bench = bench_of(num_lanes)
    for number in range(num_rows):
        bench.scheduler.add(request(number, 3, max_tokens=max_tokens))
    bench.step()
    return bench, all_plans(bench)


def all_plans(bench: Bench) -> list[tuple[StepPlan, StepGrant]]:
    made = []
    while True:
        one, grant = bench.plan()
        if one is None or grant is None:
            return made
        made.append((one, grant))


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_plans_with_lanes_equal_those_of_a_planner_without_memory(seed: int):
    LanesWalk(seed).run()


@pytest.mark.parametrize(
    ("num_lanes", "num_rows", "shares"),
    [(2, 7, [4, 3]), (2, 1, [1]), (3, 7, [3, 3, 1]), (3, 9, [3, 3, 3]), (4, 2, [1, 1]), (1, 7, [7, 7])],
)
def test_decoding_rows_are_dealt_over_as_many_steps_as_ranks(num_lanes: int, num_rows: int, shares: list[int]):
    bench, flights = decoding_bench(num_lanes, num_rows)
    for _ in range(9):
        assert sorted((len(grant.slots) for _, grant in flights), reverse=True) == shares
        if num_lanes > 1:
            slots = np.concatenate([grant.slots for _, grant in flights])
            assert len(set(slots.tolist())) == len(slots) == num_rows
        bench.finish(flights.pop(0)[1])
        flights += all_plans(bench)


def test_a_lane_keeps_its_arrays_while_no_row_comes_or_goes():
    bench, flights = decoding_bench(2, 7)
    lanes = [flight[0].slots for flight in flights]
    for turn in range(12):
        bench.finish(flights.pop(0)[1])
        flights += all_plans(bench)
        made, grant = flights[-1]
        assert made.is_decode and made.slots is lanes[turn % 2] and grant.is_decode
    assert len(bench.allocator._steady.made) == 2


def test_lanes_are_even_again_after_rows_have_left_one_of_them():
    bench, flights = decoding_bench(2, 8)
    for sequence_id in (4, 5, 6):  # of the second lane
        bench.scheduler.end(sequence_id)
    for _ in range(4):
        bench.finish(flights.pop(0)[1])
        flights += all_plans(bench)
    assert sorted(len(grant.slots) for _, grant in flights) == [2, 3]


def test_chunks_of_one_prompt_follow_each_other_through_the_ranks():
    bench = bench_of(3, budget=16)
    bench.scheduler.add(request(0, 50, max_tokens=5))
    flights = all_plans(bench)
    assert [(grant.starts.tolist(), grant.num_tokens.tolist()) for _, grant in flights] == [
        ([0], [16]),
        ([16], [16]),
        ([32], [16]),
        ([48], [2]),
    ]
    for _, grant in flights[:3]:
        bench.finish(grant)
        assert all_plans(bench) == []  # the token that decides its next input is not chosen yet
    bench.finish(flights[3][1])
    assert [grant.starts.tolist() for _, grant in all_plans(bench)] == [[50]]


def test_a_step_has_the_share_of_the_target_that_its_lanes_leave_it():
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4}
    one, three = (Scheduler(StepLimits(**sizes, itl_target_ms=60.0, num_lanes=number)) for number in (1, 3))
    assert one._step_size is not None and three._step_size is not None
    assert (one._step_size.target_s, three._step_size.target_s) == (0.06, 0.02)


def test_the_grant_checker_names_a_row_that_two_steps_in_flight_share():
    grants = []
    allocator = Allocator(24, 4, 4, 16)
    for step, demands in enumerate(({0: 3, 1: 2}, {1: 1}, {0: 1})):
        wishes = plan(step, demands)
        grant, _ = allocator.serve(wishes if not step else replace(wishes, started=()))
        assert grant is not None
        grants.append(grant)
    violations: list[str] = []
    checker = GrantChecker(24, 0, 4, 4, 4, violations, num_lanes=2)
    checker.announce(grants[0])
    checker.announce(grants[1])
    assert violations == ["step 1 has rows of slots [1], whose tokens step 0 in flight chooses"]
    checker.complete(0)
    checker.announce(grants[2])
    assert len(violations) == 1


@pytest.mark.parametrize("block_size", [1, 4])
def test_lanes_that_take_turns_get_what_plans_of_other_arrays_would(block_size: int):
    dice = Random(block_size)
    same, other = (Allocator(192 // block_size, block_size, 6, 64, num_lanes=3) for _ in range(2))
    prompts = plan(0, {slot: dice.randrange(1, 10) for slot in range(6)})
    for allocator in (same, other):
        allocator.serve(prompts)
    lanes = np.array_split(prompts.slots, 3)
    num_steady = 0
    for step in range(1, 60):
        wishes = decoding(step, lanes[step % 3], completed=step - 4)
        num_steady += len(same._steady.made)
        heard = told(*same.serve(wishes))
        assert heard == told(*other.serve(replace(wishes, slots=wishes.slots.copy())))
        same.check()
    assert num_steady > 100 and not other._steady.made

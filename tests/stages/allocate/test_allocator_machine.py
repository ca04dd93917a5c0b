"""The allocator under random plans, drawn by hypothesis: a failure is shrunk to the few rules that it takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.allocate.tiers.host_tier import HostTier
from millrace.stages.messages import Started, StepPlan
from millrace.stages.params import SamplingParams
from tests.counts import count
from tests.stages.allocate.allocator_machine import RULES, SHAPE, Args, Walk, walk
from tests.stages.schedule.plans import plan

CI = settings(
    max_examples=count(100, 2000),
    stateful_step_count=50,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
NUM_WALKS = 60  # of 50 rules; each planted bug shows in one of them
SOMETIMES = ("found", "forked", "preempted", "swapped", "copied back", "void plan", "void", "reset")


def _ints(args: Args) -> dict[str, Any]:
    return {name: st.integers(0, most) for name, most in args.items()}


def _rule(name: str) -> Callable[..., None]:
    """A rule of `Walk`. If it fails, so would the teardown, for the same reason."""

    @rule(**_ints(RULES[name]))
    def follow(self: AllocatorMachine, **args: int) -> None:
        self.is_sound = False
        getattr(self.walk, name)(**args)
        self.is_sound = True

    return follow  # type: ignore[no-any-return]


class AllocatorMachine(RuleBasedStateMachine):
    """Rules that are to be followed more often are here more often."""

    is_sound = False

    @initialize(**_ints(SHAPE))
    def make(self, **shape: int) -> None:
        self.walk = Walk(**shape)
        self.is_sound = True

    start, start_another, start_a_third = _rule("start"), _rule("start"), _rule("start")
    plan, plan_again, plan_once_more = _rule("plan"), _rule("plan"), _rule("plan")
    run, run_on = _rule("run"), _rule("run")
    complete, take_report, end, void = _rule("complete"), _rule("take_report"), _rule("end"), _rule("void")
    reset_prefix_cache, crash = _rule("reset_prefix_cache"), _rule("crash")

    @invariant()
    def allocator_and_memory_agree(self) -> None:
        self.is_sound, was_sound = False, self.is_sound
        self.walk.check()
        self.is_sound = was_sound

    def teardown(self) -> None:
        if self.is_sound:
            self.walk.finish()


@pytest.mark.slow
def test_runs_of_50_rules_leave_allocator_and_naive_memory_in_agreement() -> None:
    run_state_machine_as_test(AllocatorMachine, settings=CI)


@pytest.mark.slow
def test_random_walks_come_by_all_that_is_rare() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WALKS):
        seen += walk(seed, 50)
    assert not [name for name in SOMETIMES if seen[name] < 5], f"too seldom: {dict(seen)}"


# -- what the machine has found, reduced


def starting(
    made: StepPlan, *sequences: tuple[int, int, Sequence[int]], ended: Sequence[int] = (), discarded: Sequence[int] = ()
) -> StepPlan:
    """`made`, in which `sequences` start: (slot, sequence id, tokens)."""
    started = tuple(
        Started(slot, sequence_id, f"r{sequence_id}", np.array(tokens, np.int32), len(tokens), SamplingParams(), 0)
        for slot, sequence_id, tokens in sequences
    )
    return replace(made, started=started, ended=ended, discarded=discarded)


def test_a_row_that_cannot_begin_takes_no_block_from_a_row_that_was_served_before() -> None:
    """Blocks: two of the prompt 0 1 2 3, one of them in slot 1, the other cached and the only one to be had. Slot 2
    decodes into it. Slot 3 would begin with both, takes slot 1's blocks, must wait for them, and goes back."""
    allocator = Allocator(4, 2, 4, 8, PrefixCache(2))
    allocator.serve(starting(plan(0, {0: 5}), (0, 0, [0, 1, 2, 3, 4])))
    step_1 = starting(plan(1, {1: 3, 2: 2}, completed=0), (1, 1, [0, 1, 5]), (2, 2, [6, 6]), ended=[0])
    grant, _ = allocator.serve(step_1)
    assert grant is not None and grant.num_tokens.tolist() == [1, 2] and allocator.pool.num_available == 1
    step_2 = plan(2, {2: 1, 3: 7}, completed=0, victims=[1, 3], may_take={2: 2, 3: 1})
    grant, report = allocator.serve(starting(step_2, (3, 3, [0, 1, 2, 3, 7, 7, 7])))
    assert report.preempted == [1] and report.num_granted.tolist() == [1, 0]
    assert grant is not None and grant.slots.tolist() == [2]


def test_blocks_on_the_host_at_a_reset_of_the_prefix_cache_are_not_found_afterwards() -> None:
    allocator = Allocator(4, 2, 4, 8, PrefixCache(2), HostTier(4, 2))
    allocator.serve(starting(plan(0, {0: 4, 1: 4}), (0, 0, [5, 5, 5, 5]), (1, 1, [0, 1, 2, 3])))
    _, report = allocator.serve(starting(plan(1, {0: 1}, completed=0, victims=[1], may_take={0: 1})))
    assert report.swapped == {1: 4}
    allocator.serve(starting(plan(2, {}, completed=1), ended=[0]))
    allocator.reset_prefix_cache()
    grant, report = allocator.serve(starting(plan(2, {1: 5}, completed=1), (1, 1, [0, 1, 2, 3, 4])))
    assert grant is not None and report.num_cached.tolist() == [4]
    _, report = allocator.serve(starting(plan(3, {2: 5}, completed=2), (2, 2, [0, 1, 2, 3, 4])))
    assert report.num_cached.tolist() == [0]

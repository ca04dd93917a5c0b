"""The scheduler and the allocator together, without an event loop."""

from __future__ import annotations

import random
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.messages import StepDone, StepGrant, StepPlan, StepVoid
from millrace.stages.params import choice_seed
from millrace.stages.schedule.scheduler import Limits, Scheduler
from millrace.stages.schedule.sequence import MAX_PREEMPTIONS, State
from millrace.stages.schedule.slot_table import SlotTable
from tests.stages.schedule.plans import request


class Bench:
    """A scheduler and an allocator, and a device that does what the test says."""

    def __init__(self, num_blocks: int = 64, **limits: Any) -> None:
        fields: dict[str, Any] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 32,
            "block_size": 4,
            "steps_in_flight": 1,
        }
        self.limits = Limits(**{**fields, **limits})
        self.scheduler = Scheduler(self.limits)
        self.allocator = Allocator(
            num_blocks, self.limits.block_size, self.limits.max_num_seqs, self.limits.max_model_len
        )
        self.num_known: dict[int, int] = {}  # sequence id -> tokens
        self.num_prompt: dict[int, int] = {}
        self.answers: dict[int, list[int]] = {}  # sequence id -> places of its tokens, as they came
        self.sequence_in: dict[int, int] = {}  # slot -> sequence id

    def plan(self) -> tuple[StepPlan | None, StepGrant | None]:
        """The next plan and its grant; checks all state."""
        plan = self.scheduler.plan()
        if plan is None:
            return None, None
        grant, report = self.allocator.serve(plan)
        self.allocator.check()
        self.scheduler.on_report(report)
        self.scheduler.check()
        for started in grant.started if grant else ():
            self.sequence_in[started.slot] = started.sequence_id
            self.num_prompt[started.sequence_id] = started.num_prompt
            self.num_known[started.sequence_id] = len(started.token_ids)
        return plan, grant

    def finish(self, grant: StepGrant, stop: set[int] | None = None) -> None:
        """The device is done with `grant`; sequences in `stop` chose EOS."""
        slots = grant.slots[grant.is_sampled].tolist()
        ids = [self.sequence_in[slot] for slot in slots]
        places = [self.num_known[i] - self.num_prompt[i] for i in ids]
        for i, place in zip(ids, places, strict=True):
            self.num_known[i] += 1
            self.answers.setdefault(i, []).append(place)
        limits = [s.limit if (s := self.scheduler.sequences.get(i)) else 0 for i in ids]
        finished = [i in (stop or ()) or self.num_known[i] >= limit for i, limit in zip(ids, limits, strict=True)]
        arrays = (np.array(slots, np.int32), np.array(ids, np.int64), np.array(places, np.int32))
        tokens = np.array([100 + place for place in places], np.int32)
        self.scheduler.on_done(StepDone(grant.step, *arrays, tokens, np.array(finished, np.bool_)))
        self.scheduler.check()

    def step(self, stop: set[int] | None = None) -> StepGrant:
        """One step, planned and done."""
        _, grant = self.plan()
        while grant is None:
            _, grant = self.plan()
        self.finish(grant, stop)
        return grant

    def run(self) -> None:
        """Runs steps until there is no plan."""
        for _ in range(10_000):
            plan, grant = self.plan()
            if grant is not None:
                self.finish(grant)
            elif plan is None:
                return
        raise AssertionError("it never ends")


def served(bench: Bench, grant: StepGrant) -> list[int]:
    return [bench.sequence_in[slot] for slot in grant.slots.tolist()]


def test_nothing_to_do_makes_no_plan():
    assert Bench().scheduler.plan() is None


def test_a_sequence_is_prefilled_then_decoded_until_its_limit():
    bench = Bench()
    bench.scheduler.add(request(0, 5, max_tokens=3))
    assert bench.step().num_tokens.tolist() == [5]
    assert bench.step().num_tokens.tolist() == [1]
    assert bench.step().num_tokens.tolist() == [1]
    bench.run()
    assert bench.answers == {0: [0, 1, 2]}
    assert not bench.scheduler.sequences and bench.allocator.pool.num_free == 64


def test_each_choice_of_a_request_is_a_sequence_of_its_own():
    bench = Bench()
    bench.scheduler.add(request(3, 5, max_tokens=2, n=3))
    bench.run()
    assert sorted(bench.answers) == [3, 4, 5]


def test_choices_have_seeds_of_their_own_and_the_same_ones_each_time():
    assert len({choice_seed(7, choice) for choice in range(100)}) == 100
    assert choice_seed(7, 1) == 1087474080824366186  # in this process and any other


def test_decodes_go_before_prefills():
    bench = Bench(max_num_batched_tokens=8)
    bench.scheduler.add(request(0, 4))
    bench.step()
    bench.scheduler.add(request(1, 20))
    grant = bench.step()
    assert served(bench, grant) == [0, 1] and grant.num_tokens.tolist() == [1, 7]


def test_a_long_prompt_runs_in_chunks_while_others_decode():
    bench = Bench(max_num_batched_tokens=8)
    bench.scheduler.add(request(0, 2, max_tokens=10))
    bench.scheduler.add(request(1, 20, max_tokens=2))
    chunks = [bench.step().num_tokens.tolist() for _ in range(4)]
    assert chunks == [[2, 6], [1, 7], [1, 7], [1, 1]]


def test_without_chunking_a_prompt_waits_until_it_fits_whole():
    bench = Bench(max_num_batched_tokens=32, enable_chunked_prefill=False)
    bench.scheduler.add(request(0, 20))
    bench.scheduler.add(request(1, 20))
    assert bench.step().num_tokens.tolist() == [20]
    assert sorted(bench.step().num_tokens.tolist()) == [1, 20]


def test_admission_is_in_the_order_of_arrival():
    bench = Bench(max_num_seqs=2)
    for i in range(4):
        bench.scheduler.add(request(i, 3, max_tokens=2))
    assert served(bench, bench.step()) == [0, 1]
    bench.step()
    assert served(bench, bench.step()) == [2, 3]


def test_a_lower_priority_number_goes_first():
    bench = Bench(max_num_seqs=1)
    bench.scheduler.add(request(0, 3, priority=5))
    bench.scheduler.add(request(1, 3, priority=-5))
    assert served(bench, bench.step()) == [1]


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_better_request_takes_the_slot_of_the_worst_and_the_others_finish(steps_in_flight: int):
    bench = Bench(max_num_seqs=3, steps_in_flight=steps_in_flight)
    for i, priority in enumerate((1, 5, 5)):
        bench.scheduler.add(request(i, 3, max_tokens=20, priority=priority))
    bench.step()
    bench.scheduler.add(request(3, 3, max_tokens=3, priority=0))
    num_steps = next(number for number in range(1, 10) if 3 in served(bench, bench.step()))
    assert num_steps <= 3
    assert bench.scheduler.sequences[2].num_preempted == 1 and bench.scheduler.num_preemptions == 1
    bench.run()
    assert {i: len(places) for i, places in bench.answers.items()} == {0: 20, 1: 20, 2: 20, 3: 3}
    assert all(places == list(range(len(places))) for places in bench.answers.values())


def test_a_request_of_equal_priority_waits_for_a_slot():
    bench = Bench(max_num_seqs=1)
    bench.scheduler.add(request(0, 3, max_tokens=6))
    bench.step()
    bench.scheduler.add(request(1, 3, max_tokens=6))
    bench.run()
    assert bench.scheduler.num_preemptions == 0


def test_as_many_are_preempted_as_better_ones_wait_and_none_more_than_four_times():
    bench = Bench(max_num_seqs=4)
    for i in range(4):
        bench.scheduler.add(request(i, 3, max_tokens=25, priority=9))
    bench.step()
    for i in range(4, 30):
        bench.scheduler.add(request(i, 3, max_tokens=2, priority=0))
        bench.step()
        assert all(s.num_preempted <= MAX_PREEMPTIONS for s in bench.scheduler.sequences.values())
    assert bench.scheduler.num_preemptions > 4
    bench.run()
    assert sorted(len(places) for places in bench.answers.values()) == [2] * 26 + [25] * 4


def test_a_better_request_takes_the_blocks_it_lacks():
    bench = Bench(num_blocks=8, max_num_seqs=4)
    for i in range(2):
        bench.scheduler.add(request(i, 12, max_tokens=20, priority=9))
    bench.step()
    bench.scheduler.add(request(2, 12, max_tokens=4, priority=0))
    num_steps = next(number for number in range(1, 10) if 2 in served(bench, bench.step()))
    assert num_steps <= 3
    bench.run()
    assert {i: len(places) for i, places in bench.answers.items()} == {0: 20, 1: 20, 2: 4}


def test_no_more_run_than_max_num_seqs():
    bench = Bench(max_num_seqs=2)
    for i in range(6):
        bench.scheduler.add(request(i, 3))
    bench.step()
    assert bench.scheduler.num_running == 2 and bench.scheduler.num_waiting == 4


def test_at_most_k_steps_are_in_flight():
    bench = Bench(steps_in_flight=2)
    bench.scheduler.add(request(0, 3))
    grants = [bench.plan()[1], bench.plan()[1]]
    assert all(grants) and bench.scheduler.plan() is None
    bench.finish(grants[0])
    assert bench.plan()[1] is not None


def test_a_second_step_in_flight_continues_from_tokens_that_are_not_known_yet():
    bench = Bench(steps_in_flight=2)
    bench.scheduler.add(request(0, 3))
    _, first = bench.plan()
    _, second = bench.plan()
    assert first is not None and first.starts.tolist() == [0] and first.num_tokens.tolist() == [3]
    assert second is not None and second.starts.tolist() == [3] and second.num_tokens.tolist() == [1]


def test_a_row_is_never_planned_beyond_its_limit():
    bench = Bench(steps_in_flight=2)
    bench.scheduler.add(request(0, 3, max_tokens=1))
    assert bench.plan()[1] is not None
    assert bench.scheduler.plan() is None


def test_a_finished_sequence_frees_its_blocks_in_the_next_plan_even_if_nothing_runs():
    bench = Bench()
    bench.scheduler.add(request(0, 3))
    bench.step(stop={0})
    plan, grant = bench.plan()
    assert plan is not None and grant is None and list(plan.ended) == [0]
    assert bench.allocator.pool.num_free == 64
    assert bench.scheduler.plan() is None


def test_blocks_freed_while_a_step_is_in_flight_come_back_when_it_is_done():
    bench = Bench(steps_in_flight=2)
    bench.scheduler.add(request(0, 3, max_tokens=20))
    _, first = bench.plan()
    _, second = bench.plan()
    assert first and second
    bench.finish(first, stop={0})
    bench.plan()
    assert bench.allocator.pool.num_quarantined == 1
    bench.finish(second)
    bench.run()
    assert bench.allocator.pool.num_free == 64


@pytest.mark.parametrize("when", ["waiting", "running", "in flight"])
def test_a_cancelled_sequence_is_gone_and_its_blocks_with_it(when: str):
    bench = Bench(steps_in_flight=2)
    bench.scheduler.add(request(0, 3, max_tokens=20))
    if when == "running":
        bench.step()
    grant = bench.plan()[1] if when == "in flight" else None
    bench.scheduler.end(0)
    bench.scheduler.check()
    if grant is not None:
        bench.finish(grant)
    bench.run()
    assert not bench.scheduler.sequences and bench.allocator.pool.num_free == 64


def test_ending_an_unknown_sequence_changes_nothing():
    bench = Bench()
    bench.scheduler.end(99)
    assert bench.scheduler.plan() is None


def test_the_newest_is_preempted_for_the_oldest_and_recomputed_with_its_answer():
    bench = Bench(num_blocks=8, max_num_seqs=2)
    bench.scheduler.add(request(0, 12, max_tokens=20))
    bench.scheduler.add(request(1, 12, max_tokens=20))
    bench.run()
    assert bench.scheduler.num_preemptions >= 1
    assert bench.answers == {0: list(range(20)), 1: list(range(20))}


def test_no_sequence_is_preempted_more_than_four_times():
    bench = Bench(num_blocks=8, max_num_seqs=8, max_model_len=32)
    for i in range(12):
        bench.scheduler.add(request(i, 2, max_tokens=28))
    sequences = list(bench.scheduler.sequences.values())
    bench.run()
    assert max(s.num_preempted for s in sequences) <= MAX_PREEMPTIONS
    assert all(bench.answers[i] == list(range(28)) for i in range(12))


def test_preempted_sequences_come_back_before_new_ones_are_admitted():
    bench = Bench(num_blocks=8, max_num_seqs=2)
    for i in range(3):
        bench.scheduler.add(request(i, 12, max_tokens=19))
    first_served: list[int] = []
    while bench.scheduler.sequences:
        first_served += [i for i in served(bench, bench.step()) if i not in first_served]
        if bench.scheduler.num_preemptions and 2 in first_served:
            assert 1 not in bench.scheduler.sequences or bench.scheduler.sequences[1].state is State.RUNNING
    assert first_served == [0, 1, 2]


def test_a_void_step_is_computed_again_from_the_last_tokens_that_were_told():
    bench = Bench(steps_in_flight=2)
    bench.scheduler.add(request(0, 3, max_tokens=5))
    bench.step()
    _, first = bench.plan()
    _, second = bench.plan()
    assert first and second
    bench.scheduler.on_void(StepVoid(first.step, first.generation, RuntimeError("device")))
    bench.scheduler.on_void(StepVoid(second.step, second.generation, None))
    grant = bench.step()
    assert grant.generation == first.generation + 1
    assert grant.starts.tolist() == [0] and grant.num_tokens.tolist() == [4]
    bench.run()
    assert bench.answers[0] == list(range(5))


def test_the_sequence_that_makes_every_step_fail_is_found_and_the_others_finish():
    bench = Bench()
    for i in range(8):
        bench.scheduler.add(request(i, 3, max_tokens=3))
    given_up: list[int] = []
    for _ in range(200):
        plan, grant = bench.plan()
        if grant is None:
            if plan is None:
                break
            continue
        if 5 in served(bench, grant) and 5 in bench.scheduler.sequences:
            guilty = bench.scheduler.on_void(StepVoid(grant.step, grant.generation, RuntimeError("poison")))
            given_up += [sequence.sequence_id for sequence, _ in guilty]
        else:
            bench.finish(grant)
    assert given_up == [5]
    assert all(bench.answers[i] == [0, 1, 2] for i in range(8) if i != 5)


def test_adding_a_request_twice_changes_nothing():
    bench = Bench()
    bench.scheduler.add(request(0, 3))
    bench.scheduler.add(request(0, 3))
    assert bench.scheduler.num_waiting == 1


def test_a_rebuild_after_a_crash_computes_everything_anew_and_loses_no_token():
    bench = Bench(steps_in_flight=2)
    for i in range(3):
        bench.scheduler.add(request(i, 5, max_tokens=6))
    bench.step()
    _, grant = bench.plan()
    assert grant is not None
    bench.scheduler.rebuild()
    bench.scheduler.check()
    bench.finish(grant)
    bench.run()
    assert all(bench.answers[i] == list(range(6)) for i in range(3))
    assert bench.allocator.pool.num_free == 64


@pytest.mark.parametrize("seed", range(60))
def test_a_random_life_loses_no_token_and_no_block(seed: int):
    """Arrivals, cancels, failing steps and late outcomes in random order, on pools from just enough to plenty."""
    draw = random.Random(seed)
    block_size, max_model_len = draw.choice([1, 2, 4, 16]), draw.choice([8, 32])
    blocks_per_slot = -(-max_model_len // block_size)
    num_seqs, is_chunked = draw.randint(1, 8), draw.random() < 0.7
    budget = max(num_seqs, draw.choice([num_seqs, 13, 64]) if is_chunked else max_model_len)
    num_blocks = blocks_per_slot + draw.randint(0, 3 * blocks_per_slot)
    bench = Bench(
        num_blocks,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        block_size=block_size,
        steps_in_flight=draw.choice([1, 2, 4]),
        enable_chunked_prefill=is_chunked,
    )
    wanted: dict[int, int] = {}
    gone: set[int] = set()
    flights: list[StepGrant] = []
    voided = -1
    to_come = draw.randint(1, 25)
    for _ in range(20_000):
        if len(wanted) < to_come and draw.random() < 0.3:
            num_prompt = draw.randint(1, max_model_len - 1)
            wanted[len(wanted)] = max_tokens = draw.randint(1, max_model_len - num_prompt)
            bench.scheduler.add(request(len(wanted) - 1, num_prompt, max_tokens=max_tokens))
        if wanted and draw.random() < 0.02:
            gone.add(draw.choice(list(wanted)))
            bench.scheduler.end(max(gone))
        _, grant = bench.plan()
        if grant is not None:
            flights.append(grant)
        elif flights and draw.random() < 0.6:
            grant = flights.pop(0)
            if grant.generation <= voided or draw.random() < 0.03:
                voided = max(voided, grant.generation)
                guilty = bench.scheduler.on_void(StepVoid(grant.step, grant.generation, RuntimeError("drawn")))
                gone |= {sequence.sequence_id for sequence, _ in guilty}
            else:
                bench.finish(grant)
        elif len(wanted) == to_come and not bench.scheduler.sequences and not flights:
            break
    else:
        raise AssertionError("it never ends")
    bench.run()
    assert bench.allocator.pool.num_free == num_blocks
    for i in set(wanted) - gone:
        assert bench.answers[i] == list(range(wanted[i]))


def test_the_choices_of_a_prompt_start_together_as_the_first_computes_it_for_all():
    scheduler = Scheduler(Limits(max_num_seqs=16, max_num_batched_tokens=150, max_model_len=200, block_size=4))
    scheduler.add(request(0, 100, n=8))
    scheduler.add(request(8, 60))
    made = scheduler.plan()
    assert made is not None and made.num_wanted.tolist() == [100] * 8 + [60]


def test_beams_that_are_likely_cached_are_let_in_together():
    scheduler = Scheduler(Limits(max_num_seqs=16, max_num_batched_tokens=150, max_model_len=200, block_size=4))
    for beam in range(4):
        scheduler.add(request(beam, 100, num_expected_cached=99))
    made = scheduler.plan()
    assert made is not None and len(made.slots) == 4


def test_after_prompts_that_were_found_in_the_cache_more_of_them_are_let_in_at_once():
    bench = Bench(max_num_seqs=16, max_model_len=64, max_num_batched_tokens=64)
    bench.allocator = Allocator(128, 4, 16, 64, PrefixCache(4))
    num_first = [num_let_in(bench, first) for first in (0, 10, 20)]
    assert num_first[0] == 2, "nothing is known of the cache: as many as can be computed whole"
    assert num_first == sorted(num_first) and num_first[2] == 8


def num_let_in(bench: Bench, first: int) -> int:
    """How many get a slot in the first plan, of eight equal prompts of 40 tokens; all of them end."""
    for i in range(first, first + 8):
        bench.scheduler.add(request(i, 40, max_tokens=1))
    plan, grant = bench.plan()
    assert plan is not None and grant is not None
    bench.finish(grant)
    bench.run()
    return len(plan.started)


def test_no_two_columns_of_the_slot_table_share_memory_as_a_copy_would_split_them():
    columns = [column for column in vars(SlotTable(4)).values() if isinstance(column, np.ndarray)]
    assert len(columns) > 9
    assert not any(np.shares_memory(one, other) for one, other in combinations(columns, 2))

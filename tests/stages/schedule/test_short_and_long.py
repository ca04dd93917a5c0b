"""Sequences that change their rotary factors at a length: planned as short ones, then again as long ones."""

from __future__ import annotations

import random

import numpy as np
import pytest

from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.allocate.tiers.host_tier import HostTier
from millrace.stages.messages import Direction, StepGrant, StepVoid
from millrace.stages.schedule.sequence import State
from tests.stages.schedule.plans import request
from tests.stages.schedule.test_scheduler import Bench

SHORT = 8


class KeyMemory:
    """Whose keys each place of the cache holds: a long sequence's or a short one's. Checks what each row reads."""

    def __init__(self, bench: Bench, num_host_blocks: int) -> None:
        self.bench, self.short_length = bench, bench.limits.short_length
        size = bench.limits.block_size
        self.keys = np.full((bench.allocator.pool.num_blocks, size), -1)  # 1: of a long sequence; -1: none
        self.host = np.full((num_host_blocks, size), -1)
        self.is_long: dict[int, bool] = {}  # by slot
        self.num_long = 0  # starts

    def run(self, grant: StepGrant) -> None:
        """Copies, then writes and reads the keys of each row of `grant`."""
        for started in grant.started:
            self.is_long[started.slot] = started.is_long
            self.num_long += started.is_long
            assert started.is_long == (len(started.token_ids) > self.short_length)
        for copy in grant.copies:
            source = self.host if copy.direction is Direction.IN else self.keys
            target = self.host if copy.direction is Direction.OUT else self.keys
            target[copy.destinations] = source[copy.sources]
        for slot, start, count in zip(
            *(x.tolist() for x in (grant.slots, grant.starts, grant.num_tokens)), strict=True
        ):
            end, is_long = start + count, self.is_long[slot]
            assert is_long or end <= self.short_length, f"a short sequence of {end} tokens"
            blocks = self.bench.allocator.tables.blocks[slot]
            for position in range(start, end):
                self.keys[blocks[position // self.keys.shape[1]], position % self.keys.shape[1]] = is_long
            seen = self.keys[blocks[: -(-end // self.keys.shape[1])]].reshape(-1)[:end]
            assert (seen == is_long).all(), f"slot {slot}, long: {is_long}, reads {seen.tolist()}"


def bench_of(num_blocks: int = 64, num_host_blocks: int = 0, **limits: int | bool) -> tuple[Bench, KeyMemory]:
    bench = Bench(num_blocks, **{"short_length": SHORT, **limits})
    sizes = (num_blocks, bench.limits.block_size, bench.limits.max_num_seqs, bench.limits.max_model_len)
    host = HostTier(num_host_blocks, bench.limits.block_size) if num_host_blocks else None
    bench.allocator = Allocator(*sizes, PrefixCache(bench.limits.block_size), host)
    return bench, KeyMemory(bench, num_host_blocks)


def computed(bench: Bench, memory: KeyMemory, num_prompt: int, max_tokens: int) -> list[tuple[int, int, bool]]:
    """(start, tokens, whether long) of each step of a sequence alone."""
    bench.scheduler.add(request(0, num_prompt, max_tokens=max_tokens))
    steps = []
    while bench.scheduler.sequences:
        grant = bench.step()
        memory.run(grant)
        assert not grant.copies, "keys of a short sequence are of no use to a long one"
        steps.append((int(grant.starts[0]), int(grant.num_tokens[0]), memory.is_long[int(grant.slots[0])]))
    return steps


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "steps"),
    [
        (7, 2, [(0, 7, False), (7, 1, False)]),  # its last token is the ninth, and is never computed
        (7, 4, [(0, 7, False), (7, 1, False), (0, 9, True), (9, 1, True)]),
        (8, 1, [(0, 8, False)]),
        (8, 3, [(0, 8, False), (0, 9, True), (9, 1, True)]),
        (9, 2, [(0, 9, True), (9, 1, True)]),
    ],
)
def test_a_sequence_is_computed_again_at_the_first_token_beyond_its_factors(num_prompt, max_tokens, steps):
    bench, memory = bench_of(num_host_blocks=8)
    assert computed(bench, memory, num_prompt, max_tokens) == steps
    assert bench.answers == {0: list(range(max_tokens))}
    num_switched = int(num_prompt <= SHORT < num_prompt + max_tokens - 1)
    assert bench.scheduler.preemptions.get(("recompute", "rope"), 0) == num_switched
    assert bench.scheduler.num_recomputed_tokens == SHORT * num_switched


def test_steps_that_run_ahead_stop_where_the_factors_change():
    bench, _ = bench_of(steps_in_flight=4)
    bench.scheduler.add(request(0, 6, max_tokens=6))
    bench.scheduler.add(request(1, 3, max_tokens=3))
    ahead = [grant for _ in range(4) if (grant := bench.plan()[1]) is not None]
    assert [grant.num_tokens.tolist() for grant in ahead] == [[6, 3], [1, 1], [1, 1]]
    for grant in ahead:
        bench.finish(grant)
    grant = bench.step()
    assert grant.started[0].is_long and grant.num_tokens.tolist() == [9]


def test_a_long_sequence_finds_no_block_of_a_short_one_and_the_reverse():
    bench, memory = bench_of()
    for number, (length, num_cached) in enumerate([(8, 0), (8, 7), (12, 0), (12, 11), (7, 6), (9, 8)]):
        bench.scheduler.add(request(number, length, max_tokens=1))
        grant = bench.step()
        memory.run(grant)
        assert grant.started[0].num_cached == num_cached, f"{length} tokens"


def test_swapped_keys_are_given_up_where_the_last_token_made_a_sequence_long():
    bench, memory = bench_of(num_blocks=8, num_host_blocks=8, steps_in_flight=2, max_model_len=16, max_num_seqs=2)
    bench.scheduler.add(request(0, 7, max_tokens=4))
    grants = [bench.step(), bench.plan()[1]]
    bench.scheduler.lifecycle.take_slot(0, "slot")  # while its ninth token is computed
    sequence = bench.scheduler.sequences[0]
    _, swapping = bench.plan()
    assert swapping is not None and swapping.copies and sequence.num_swapped == 8
    bench.finish(grants[1])
    bench.finish(swapping)
    grant = bench.step()
    assert grant.started[0].is_long and not grant.copies and grant.num_tokens.tolist() == [9]
    assert bench.allocator.host is not None and bench.allocator.host.num_tokens(0) == 0
    memory.run(grant)


def test_the_change_of_factors_does_not_count_against_protection():
    bench, memory = bench_of()
    bench.scheduler.add(request(0, 8, max_tokens=3))
    sequence = bench.scheduler.sequences[0]
    bench.step()
    bench.step()
    assert sequence.state is State.RUNNING and sequence.is_long and not sequence.num_preempted


@pytest.mark.parametrize("seed", range(30))
def test_no_random_life_mixes_the_keys_of_short_and_long(seed: int):
    """Arrivals, cancels, failing steps and late outcomes in random order, with cached, swapped and forked blocks."""
    draw = random.Random(seed)
    block_size = draw.choice([1, 2, 4])
    per_slot = -(-24 // block_size)
    num_host_blocks = draw.choice([0, 4 * per_slot])
    bench, memory = bench_of(
        per_slot + draw.randint(0, 2 * per_slot),
        num_host_blocks,
        max_num_seqs=draw.randint(1, 5),
        max_num_batched_tokens=draw.choice([8, 64]),
        max_model_len=24,
        block_size=block_size,
        steps_in_flight=draw.choice([1, 2, 4]),
        short_length=draw.randint(1, 20),
    )
    wanted: dict[int, int] = {}
    gone: set[int] = set()
    flights: list[StepGrant] = []
    voided = -1
    for _ in range(5_000):
        if len(wanted) < 12 and draw.random() < 0.3:
            num_prompt = draw.randint(1, 23)
            wanted[len(wanted)] = max_tokens = draw.randint(1, 24 - num_prompt)
            bench.scheduler.add(request(len(wanted) - 1, num_prompt, max_tokens=max_tokens))
        if wanted and draw.random() < 0.01:
            gone.add(draw.choice(list(wanted)))
            bench.scheduler.end(max(gone))
        _, grant = bench.plan()
        if grant is not None:
            flights.append(grant)
            if grant.generation > voided:
                memory.run(grant)
        elif flights and draw.random() < 0.6:
            grant = flights.pop(0)
            if grant.generation <= voided or draw.random() < 0.03:
                voided = max(voided, grant.generation)
                guilty = bench.scheduler.on_void(StepVoid(grant.step, grant.generation, RuntimeError("drawn")))
                gone |= {sequence.sequence_id for sequence, _ in guilty}
            else:
                bench.finish(grant)
        elif len(wanted) == 12 and not bench.scheduler.sequences and not flights:
            break
    else:
        raise AssertionError("it never ends")
    assert memory.num_long
    for i in set(wanted) - gone:
        assert bench.answers[i] == list(range(wanted[i]))

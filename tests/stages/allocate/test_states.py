"""The states of recurrent layers, which travel with the blocks of their sequences."""

from __future__ import annotations

from collections import Counter
from typing import Any

from millrace.kernels.layout.state_layout import StateLayout
from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.tiers.host_tier import HostTier
from millrace.stages.messages import STATES, Direction, Rates
from tests.counts import count
from tests.stages.allocate.states_walk import walk
from tests.stages.schedule.plans import plan


def test_each_row_goes_on_with_the_state_of_its_own_tokens_at_random():
    seen: Counter[str] = Counter()
    for seed in range(4, 4 + count(in_ci=5, full=1500)):
        try:
            seen += walk(seed)[1]
        except Exception as error:
            raise AssertionError(f"python -m tests.stages.allocate.states_walk --seed {seed}") from error
    rare = ("swapped", "out of states", "in of states", "void", "reset", "preempted")
    rare += ("hit", "fork of states", "save of states", "snapshots", "ends of answers", "fork of kind 0")
    assert all(seen[name] for name in rare), seen


def host_of(num_on_host: int = 1, rates: Rates | None = None) -> HostTier:
    """Eight blocks of 2 tokens; a state is as large as five."""
    return HostTier(8, 2, rates, states=StateLayout(5, 4, num_on_host, num_blocks=5.0))


def copies(grant: Any) -> list[tuple[Direction, int, list[int], list[int]]]:
    return [(copy.direction, copy.kind, copy.sources.tolist(), copy.destinations.tolist()) for copy in grant.copies]


def squeezed(host: HostTier) -> tuple[Allocator, Any, Any]:
    """Slot 0 takes from slot 1, which has three tokens, in step 1."""
    allocator = Allocator(4, 2, 4, 8, host=host)
    allocator.serve(plan(0, {0: 4, 1: 3}))
    return allocator, *allocator.serve(plan(1, {0: 1}, completed=0, victims=[1], may_take={0: 1}))


def test_a_victims_state_travels_to_the_host_and_back_with_its_blocks():
    allocator, grant, report = squeezed(host := host_of())
    assert report.swapped == {1: 3} and copies(grant)[1] == (Direction.OUT, STATES, [1], [0])
    assert host.states is not None and host.states.num_in_use == 1
    allocator.serve(plan(2, {0: 1}, completed=1))
    grant, report = allocator.serve(plan(3, {1: 5}, completed=2, ended=[0]))
    assert report.num_cached.tolist() == [3] and grant.starts.tolist() == [3]
    assert copies(grant)[1] == (Direction.IN, STATES, [0], [1])
    assert host.states.num_quarantined == 1, "the step in flight reads it"
    allocator.serve(plan(4, {}, completed=3))
    assert host.states.num_free == 1
    allocator.check()


def test_without_a_place_for_its_state_no_block_of_a_sequence_is_swapped():
    host = host_of()
    assert host.swap_out(7, 3) is not None
    assert host.swap_out(8, 3) is None and host.num_full == 1 and host.pool.num_available == 6
    host.release(7, 5, 4)
    assert host.swap_out(8, 3) is None, "step 5 may still read the place"
    host.complete_steps(5, [], 0)
    assert host.swap_out(8, 3) is not None
    host.check()


def test_copying_a_state_is_weighed_by_its_bytes():
    assert host_of(rates=Rates(copy_s=1.0, compute_s=5.0)).swap_out(1, 3) is not None  # 2 * (2 + 5) against 3 * 5
    host = host_of(rates=Rates(copy_s=1.0, compute_s=4.0))
    assert host.swap_out(1, 3) is None and host.num_dear == 1


def test_half_of_a_host_pool_at_most_is_for_states():
    few, num_blocks = StateLayout(100, 8).with_host(1000, 10)
    assert (few.num_on_host, num_blocks, few.num_blocks) == (5, 50, 10.0)
    assert StateLayout(100, 3).with_host(1000, 10) == (StateLayout(100, 3, 3, num_blocks=10.0), 70)
    assert StateLayout(100, 8).with_host(199, 10) == (StateLayout(100, 8, 0, num_blocks=10.0), 0), (
        "not one state, so no block"
    )
    assert HostTier.of(4, 2, states=StateLayout(100, 8)) is None


def test_after_a_crash_the_places_of_states_are_free_again():
    host = host_of()
    host.swap_out(1, 3)
    host.forget_all(7)
    host.complete_steps(7, [], 0)
    assert host.states is not None and host.states.num_free == 1
    host.check()

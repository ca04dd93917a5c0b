"""Block allocation and preemption in the allocator."""

from __future__ import annotations

import pytest

from millrace.stages.allocate.allocator import Allocator
from tests.stages.schedule.plans import plan


def make(num_blocks: int = 4, block_size: int = 2, num_slots: int = 4, max_model_len: int = 8) -> Allocator:
    return Allocator(num_blocks, block_size, num_slots, max_model_len)


def test_a_pool_too_small_for_the_longest_sequence_is_refused_with_what_would_fit():
    with pytest.raises(ValueError, match="the largest that fits is 8 tokens"):
        Allocator(num_blocks=4, block_size=2, num_slots=1, max_model_len=9)
    Allocator(num_blocks=4, block_size=2, num_slots=1, max_model_len=8)


def test_each_row_gets_its_wish_and_the_blocks_for_it():
    allocator = make()
    grant, report = allocator.serve(plan(0, {0: 3, 1: 1}))
    assert grant is not None
    assert grant.num_tokens.tolist() == [3, 1] and grant.starts.tolist() == [0, 0]
    assert grant.table_slots.tolist() == [0, 0, 1] and grant.table_places.tolist() == [0, 1, 0]
    assert len(set(grant.table_blocks.tolist())) == 3
    assert report.num_free == 1
    allocator.check()


def test_a_decode_takes_a_block_only_when_the_last_one_is_full():
    allocator = make()
    allocator.serve(plan(0, {0: 1}))
    grant, _ = allocator.serve(plan(1, {0: 1}))
    assert grant is not None and len(grant.table_blocks) == 0 and grant.starts.tolist() == [1]
    grant, _ = allocator.serve(plan(2, {0: 1}))
    assert grant is not None and grant.table_places.tolist() == [1]


def test_the_token_budget_cuts_wishes_in_order():
    grant, report = make().serve(plan(0, {0: 2, 1: 3, 2: 1}, budget=4))
    assert report.num_granted.tolist() == [2, 2, 0]
    assert grant is not None and grant.is_sampled.tolist() == [True, False]


def test_a_wish_that_may_not_be_cut_is_left_out_when_the_budget_is_short():
    _, report = make().serve(plan(0, {0: 2, 1: 3}, budget=4, allows_partial=False))
    assert report.num_granted.tolist() == [2, 0]


def test_what_does_not_fit_is_granted_in_part():
    grant, report = make(num_blocks=4).serve(plan(0, {0: 6, 1: 6}))
    assert report.num_granted.tolist() == [6, 2]
    assert grant is not None and grant.is_sampled.tolist() == [True, False]


def test_nothing_granted_is_a_void_report_and_no_step():
    allocator = make()
    allocator.serve(plan(0, {0: 8}))
    grant, report = allocator.serve(plan(1, {1: 2}))
    assert grant is None and report.is_void


def test_a_row_takes_blocks_from_the_victims_it_may_take_newest_first():
    allocator = make()
    allocator.serve(plan(0, {0: 2, 1: 2, 2: 4}))
    allocator.serve(plan(1, {}, completed=0))
    grant, report = allocator.serve(plan(1, {0: 1, 1: 1}, completed=0, victims=[2, 1], may_take={0: 2, 1: 1}))
    assert list(report.preempted) == [2]
    assert grant is not None and grant.slots.tolist() == [0, 1]
    allocator.check()


def test_a_row_never_takes_from_victims_it_may_not_take():
    allocator = make()
    allocator.serve(plan(0, {0: 4, 1: 4}))
    grant, report = allocator.serve(plan(1, {1: 1}, completed=0, victims=[1], may_take={1: 0}))
    assert grant is None and report.is_void and len(report.preempted) == 0


def test_a_victim_loses_what_this_plan_granted_it():
    allocator = make()
    allocator.serve(plan(0, {0: 4, 1: 3}))
    grant, report = allocator.serve(plan(1, {1: 1, 0: 1}, completed=0, victims=[1], may_take={0: 1}))
    assert list(report.preempted) == [1] and report.num_granted.tolist() == [0, 1]
    assert grant is not None and grant.slots.tolist() == [0]
    allocator.check()


def test_a_victims_blocks_are_not_reused_while_a_step_in_flight_may_touch_them():
    allocator = make()
    allocator.serve(plan(0, {0: 4, 1: 4}))
    grant, report = allocator.serve(plan(1, {0: 1}, completed=-1, victims=[1], may_take={0: 1}))
    assert grant is None and list(report.preempted) == [1] and report.num_quarantined == 2
    grant, _ = allocator.serve(plan(1, {0: 1}, completed=0))
    assert grant is not None


def test_quarantined_blocks_are_waited_for_before_another_victim_is_preempted():
    allocator = make(num_blocks=4, num_slots=3)
    allocator.serve(plan(0, {0: 4, 1: 2, 2: 2}))
    _, report = allocator.serve(plan(1, {0: 1}, completed=-1, ended=[2], victims=[1], may_take={0: 1}))
    assert len(report.preempted) == 0 and report.is_void


def test_rows_behind_one_that_waits_for_blocks_get_no_new_ones():
    allocator = make(num_blocks=4, num_slots=3)
    allocator.serve(plan(0, {0: 4, 1: 2}))
    _, report = allocator.serve(plan(1, {2: 8, 1: 1}, completed=0, allows_partial=False))
    assert report.num_granted.tolist() == [0, 0]


def test_a_row_that_may_take_from_others_does_not_wait_behind_one_that_may_not():
    allocator = make(num_blocks=4, num_slots=3)
    allocator.serve(plan(0, {0: 4, 1: 4}))
    grant, report = allocator.serve(plan(1, {0: 1, 1: 1}, completed=0, victims=[0], may_take={1: 1}))
    assert report.preempted == [0] and grant is not None and grant.slots.tolist() == [1]


def test_a_reserved_row_gets_all_its_blocks_at_once_or_none():
    allocator = make(num_blocks=4)
    allocator.serve(plan(0, {0: 2}))
    _, report = allocator.serve(plan(1, {1: 2}, reserved={1: 8}))
    assert report.is_void
    grant, _ = allocator.serve(plan(1, {1: 2}, reserved={1: 6}))
    assert grant is not None and len(grant.table_blocks) == 3


def test_started_sequences_reach_the_device_with_the_first_grant_that_runs_them():
    allocator = make(num_blocks=4)
    grant, _ = allocator.serve(plan(0, {0: 8, 1: 1}))
    assert grant is not None and [s.slot for s in grant.started] == [0]
    grant, _ = allocator.serve(plan(1, {1: 1}, completed=0, ended=[0]))
    assert grant is not None and [s.slot for s in grant.started] == [1]


def test_a_reset_forgets_every_table_and_frees_all_once_the_device_is_done():
    allocator = make()
    allocator.serve(plan(0, {0: 4, 1: 2}))
    report = allocator.reset(plan(1, {0: 1}, completed=-1))
    assert report.is_reset and report.is_void and report.num_quarantined == 4
    grant, _ = allocator.serve(plan(1, {0: 8}, completed=0))
    assert grant is not None and grant.starts.tolist() == [0]
    allocator.check()

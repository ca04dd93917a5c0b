"""Steady decoding gives the same grants as serving row by row."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from millrace.stages.allocate.allocator import Allocator
from millrace.stages.messages import PlanReport, StepGrant, StepPlan
from tests.stages.schedule.plans import plan

NUM_SLOTS, MAX_MODEL_LEN = 6, 64


def decoding(step: int, slots: np.ndarray, *, completed: int) -> StepPlan:
    """One token for each of `slots`, by the very same array."""
    wishes = plan(step, dict.fromkeys(slots.tolist(), 1), completed=completed)
    return replace(wishes, slots=slots, started=(), is_decode=True)


def told(grant: StepGrant | None, report: PlanReport) -> list[object]:
    """The grant and the report as plain data; blocks in the order of their places."""
    heard: list[object] = [report.num_granted.tolist(), report.num_free, report.num_quarantined, report.is_void]
    if grant is not None:
        columns = (grant.table_slots.tolist(), grant.table_places.tolist(), grant.table_blocks.tolist())
        heard += [grant.slots.tolist(), grant.starts.tolist(), grant.num_tokens.tolist(), grant.is_sampled.tolist()]
        heard.append([(slot, place) for slot, place, _ in sorted(zip(*columns, strict=True))])
    return heard


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("seed", range(4))
def test_rows_that_go_on_get_what_plans_of_other_arrays_would(seed: int, block_size: int) -> None:
    dice = Random(seed)
    num_blocks = MAX_MODEL_LEN // block_size * dice.choice([1, 2, NUM_SLOTS])  # so that some pools run dry
    same, other = (Allocator(num_blocks, block_size, NUM_SLOTS, MAX_MODEL_LEN) for _ in range(2))
    prompts = plan(0, {slot: dice.randrange(1, 10) for slot in dice.sample(range(NUM_SLOTS), 4)})
    for allocator in (same, other):
        allocator.serve(prompts)
    slots = prompts.slots
    for step in range(1, 3 * block_size + 8):
        wishes = decoding(step, slots, completed=step - 2)
        heard = told(*same.serve(wishes))
        assert heard == told(*other.serve(replace(wishes, slots=slots.copy())))
        same.check()
        assert (same.tables.num_tokens == other.tables.num_tokens).all()
    assert not other._steady.made


def test_a_step_takes_blocks_for_those_rows_alone_whose_turn_it_is() -> None:
    allocator = Allocator(24, 4, NUM_SLOTS, 16)
    allocator.serve(plan(0, {0: 1, 1: 2, 2: 4}))
    slots, taken = np.array([0, 1, 2]), []
    for step in range(1, 9):
        grant, _ = allocator.serve(decoding(step, slots, completed=step - 2))
        assert grant is not None
        taken.append(grant.table_slots.tolist())
    assert taken == [[2], [], [1], [0], [2], [], [1], [0]]


def test_rows_with_blocks_for_more_than_comes_next_are_looked_at_step_by_step() -> None:
    allocator = Allocator(24, 4, NUM_SLOTS, 16)
    allocator.serve(plan(0, {0: 1, 1: 1}, reserved={0: 12}))
    slots = np.array([0, 1])
    for step in range(1, 13):
        grant, _ = allocator.serve(decoding(step, slots, completed=step - 2))
        assert grant is not None and grant.starts.tolist() == [step, step]
        allocator.check()
    assert allocator.tables.num_blocks[:2].tolist() == [4, 4]


def test_a_reset_forgets_what_was_known_ahead() -> None:
    allocator = Allocator(24, 4, NUM_SLOTS, 16)
    allocator.serve(plan(0, {0: 3}))
    slots = np.array([0])
    for step in (1, 2, 3):
        allocator.serve(decoding(step, slots, completed=step - 2))
    allocator.reset(decoding(4, slots, completed=2))
    grant, _ = allocator.serve(decoding(4, slots, completed=3))
    assert grant is not None and grant.starts.tolist() == [0]
    allocator.check()

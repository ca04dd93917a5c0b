"""The Triton kernels of a step's state against their twins, in Triton's interpreter on the CPU.

Run by `tests/kernels/triton/test_triton_interpreted.py`; by hand: `TRITON_INTERPRET=1 pytest
tests/kernels/interpreted_step.py`.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch

from millrace.kernels.layout import step_state
from millrace.kernels.layout.step_state import SlotState
from millrace.kernels.triton import launch as triton_launch
from millrace.kernels.triton import step_state as triton_step
from millrace.stages.backends.cuda.step_update import EndRules, diff_size
from millrace.stages.sample.draft_acceptance import DraftRuns
from tests.kernels.finish_cases import CASES, on_device
from tests.kernels.step_sides import Side, differences, parts_of
from tests.stages.step_walk import EOS, DraftedWalk, Walk, with_drafts


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


@pytest.mark.parametrize(
    ("num_slots", "block_size", "max_model_len", "room", "num_steps"),
    [(1, 1, 7, 9, 8), (1, 1, 7, 500, 8), (4, 4, 40, 9, 8), (4, 4, 40, 500, 8), (70, 2, 33, 500, 2)],
)
def test_all_that_a_step_writes_equals_the_twins(
    num_slots: int, block_size: int, max_model_len: int, room: int, num_steps: int
) -> None:
    sizes = {"num_slots": num_slots, "block_size": block_size, "max_model_len": max_model_len}
    short_length = 50 if room == 9 else 0  # rows of rotary tables before those of long sequences
    more = {"short_length": short_length, "num_kinds": 1 + room % 4, "has_states": room == 9}
    assert differences(triton_step, 7, room=room, num_steps=num_steps, **more, **sizes) == []


@pytest.mark.parametrize("num_slots", [1, 17])
def test_each_draft_has_a_row_of_logits_as_with_the_twins(num_slots: int) -> None:
    walk = Walk(Random(0), num_slots, 60, 4)
    twin, ours = (Side(kernels, walk, 100, 1100) for kernels in (step_state, triton_step))
    for grant in with_drafts(num_slots):
        parts = parts_of(grant, EndRules((EOS,), 60), diff_size(num_slots, 300, 1100))
        for side in (twin, ours):
            side.step(parts, 100, 1100, [7] * num_slots if grant.drafts is None else [])
        for (name, want), got in zip(twin.everything().items(), ours.everything().values(), strict=True):
            assert torch.equal(got, want), name
        if grant.drafts is not None:
            break
    assert ours.buffers.sampled_slots[: len(grant.logits_slots)].tolist() == grant.logits_slots.tolist()


@pytest.mark.parametrize(("num_slots", "most"), [(1, 9), (9, 3)])
def test_drafts_are_accepted_as_by_the_twins(num_slots: int, most: int) -> None:
    """Runs of up to 10 rows; of 9 sequences some begin in one program and end in the next."""
    walk = DraftedWalk(Random(num_slots), num_slots, most)
    num_rows, num_tokens = num_slots * (1 + most) + 3, num_slots * (5 + most)
    twin, ours = (Side(kernels, walk, num_rows, num_tokens) for kernels in (step_state, triton_step))
    num_accepted = 0
    for _ in range(3):
        grant = walk.step()
        parts = parts_of(grant, EndRules((EOS,), walk.max_model_len), diff_size(num_slots, 400, 1100))
        runs = DraftRuns.of(grant)
        chosen = walk.choose(grant, [-1] * len(grant.logits_slots) if runs is None else runs.drafts.tolist())
        for side in (twin, ours):
            side.step(parts, num_rows, num_tokens, chosen)
        for (name, want), got in zip(twin.everything().items(), ours.everything().values(), strict=True):
            assert torch.equal(got, want), name
        counted = twin.told[0, : len(chosen)].numpy() >= 0
        num_accepted += int(counted.sum()) - len(set(grant.logits_slots[counted].tolist()))
        for slot, told, reason in zip(grant.logits_slots.tolist(), *twin.told[:, : len(chosen)].tolist(), strict=True):
            if told >= 0:
                walk.chose(slot, told, is_end=reason > 0)
    assert num_accepted > 0


def test_a_step_without_rows_is_all_padding() -> None:
    walk = Walk(Random(0))
    twin, ours = (Side(kernels, walk, 5, 70) for kernels in (step_state, triton_step))
    for side in (twin, ours):
        side.step([np.zeros(step_state.HEADER + 1, np.int32)], 5, 70, [])
    for (name, want), got in zip(twin.everything().items(), ours.everything().values(), strict=True):
        assert torch.equal(got, want), name
    assert not ours.buffers.lengths.any() and (ours.buffers.slot_mapping == -1).all()


def test_tokens_beyond_2_to_the_31_elements_are_reached() -> None:
    """By stride: 8 GiB, of which only the touched pages ever exist."""
    far = 1 << 31
    memory = torch.empty(far + 64, dtype=torch.int32)
    dice = Random(1)
    walk = Walk(dice, 2, 32, 4)
    twin, ours = (Side(kernels, walk, 2, 64) for kernels in (step_state, triton_step))
    ours.slots = SlotState(ours.slots.state, memory.as_strided((2, 32), (far, 1)), ours.slots.tables)
    ours.slots.tokens.copy_(twin.slots.tokens)
    for grant in walk.steps(6, only_decode=0.2):
        parts = parts_of(grant, EndRules((EOS,), 32), diff_size(2, 20, 100))
        for side in (twin, ours):
            side.step(parts, 2, 64, [5] * grant.num_sampled)
        assert torch.equal(ours.slots.tokens, twin.slots.tokens)
        assert torch.equal(ours.buffers.input_ids, twin.buffers.input_ids)
        walk.chose(grant, [5] * grant.num_sampled)


def test_answers_end_by_the_finish_rule() -> None:
    assert on_device(triton_step) == [case.right for case in CASES]

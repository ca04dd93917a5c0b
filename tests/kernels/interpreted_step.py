"""The Triton kernels of a step's state against their twins, in Triton's interpreter on the CPU.

`test_step_state.py` runs this file in a process that has TRITON_INTERPRET set from its start.
"""

from __future__ import annotations

from itertools import repeat
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from millrace.kernels import step_state, triton_launch, triton_step
from millrace.kernels.step_state import SlotState, StepBuffers
from millrace.stages.messages import Ints, StepGrant
from millrace.stages.stepping.diff import Ends, diff_size, write
from tests.stages.step_walk import EOS, VOCAB_SIZE, Walk


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    assert triton_launch.IS_INTERPRETED, "run with TRITON_INTERPRET=1"


class Side:
    """A device's tables, kept by `kernels`: the twins, or Triton's."""

    def __init__(self, kernels: Any, walk: Walk, num_rows: int, num_tokens: int) -> None:
        self.kernels, self.block_size = kernels, walk.block_size
        self.slots = step_state.make_slots(_full, walk.num_slots, walk.max_model_len, walk.block_size)
        self.buffers = step_state.make_buffers(_full, num_rows, num_tokens, self.slots.tables.shape[1])
        self.told = _full((2, num_rows), "int32")

    def step(self, parts: list[Ints], num_rows: int, num_tokens: int, chosen: list[int]) -> None:
        """All that a step does, padded to `num_rows` and `num_tokens`."""
        for part in parts:
            diff = torch.from_numpy(part)
            self.kernels.take_news(diff, self.slots)
        inputs = self.buffers.of(num_rows, num_tokens)
        self.kernels.make_inputs(diff, self.slots, inputs, self.block_size)
        ids = torch.full((num_rows,), 44, dtype=torch.int64)
        ids[: len(chosen)] = torch.tensor(chosen, dtype=torch.int64)
        self.kernels.settle(self.told[:, :num_rows], ids, inputs.sampled_slots, self.slots)

    def everything(self) -> dict[str, torch.Tensor]:
        """All that was written, by name."""
        found = {name: getattr(self.slots, name) for name in SlotState.__slots__}
        return found | {name: getattr(self.buffers, name) for name in StepBuffers.__slots__} | {"told": self.told}


def _full(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.full(shape, 77, dtype=getattr(torch, dtype))


def parts_of(grant: StepGrant, ends: Ends, capacity: int) -> list[Ints]:
    """The diff, in copies of what was sent."""
    buffer = np.full(capacity, 77, np.int32)
    return [buffer.copy() for _ in write(grant, ends, repeat(buffer))]


@pytest.mark.parametrize(
    ("num_slots", "block_size", "max_model_len", "room", "num_steps"),
    [(1, 1, 7, 9, 8), (1, 1, 7, 500, 8), (4, 4, 40, 9, 8), (4, 4, 40, 500, 8), (70, 2, 33, 500, 2)],
)
def test_all_that_a_step_writes_equals_the_twins(
    num_slots: int, block_size: int, max_model_len: int, room: int, num_steps: int
) -> None:
    """`room` for known tokens: with little, a diff goes in parts."""
    dice = Random(7)
    walk = Walk(dice, num_slots, max_model_len, block_size)
    ends = Ends((EOS,), max_model_len)
    num_rows, num_tokens = num_slots + 3, num_slots * max_model_len
    twin, ours = (Side(kernels, walk, num_rows, num_tokens) for kernels in (step_state, triton_step))
    for grant in walk.steps(num_steps):
        parts = parts_of(grant, ends, diff_size(num_slots, 3, room))
        rows = dice.randint(len(grant.slots), num_rows)
        tokens = min(num_tokens, grant.num_computed + dice.choice([0, 1, 40]))
        chosen = [dice.choice([EOS, -1, *range(2, VOCAB_SIZE)]) for _ in range(grant.num_sampled)]
        for side in (twin, ours):
            side.step(parts, rows, tokens, chosen)
        for (name, want), got in zip(twin.everything().items(), ours.everything().values(), strict=True):
            assert torch.equal(got, want), name
        told = twin.told[:, : grant.num_sampled].tolist()
        walk.chose(grant, [EOS if finish else token for token, finish in zip(*told, strict=True)])


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
        parts = parts_of(grant, Ends((EOS,), 32), diff_size(2, 20, 100))
        for side in (twin, ours):
            side.step(parts, 2, 64, [5] * grant.num_sampled)
        assert torch.equal(ours.slots.tokens, twin.slots.tokens)
        assert torch.equal(ours.buffers.input_ids, twin.buffers.input_ids)
        walk.chose(grant, [5] * grant.num_sampled)

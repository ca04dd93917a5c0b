"""Trials of the kernels of a step's state, for times; `checks.py` checks them over random walks."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from millrace.kernels.checks import roofline_step
from millrace.kernels.layout import step_state
from millrace.stages.backends.cuda.step_update import EndRules, diff_size
from tests.bench.gpu.parts.grants import decode_grants
from tests.bench.gpu.trials.trial import Tensors, Trial, unchecked
from tests.kernels.step_sides import parts_of


class Sizes:
    """What `decode_grants` needs to know of a subject."""

    def __init__(self, num_rows: int, context: int, block_size: int) -> None:
        self.max_num_seqs, self.max_model_len, self.block_size = num_rows, context + 8, block_size


def step_trials(
    kernels: ModuleType, num_rows: int, context: int, device: torch.device, block_size: int = 16
) -> list[Trial]:
    """Sequences that all begin with a context, and the decode step after that."""
    sizes = Sizes(num_rows, context, block_size)
    first, second = decode_grants(sizes, num_rows, context, 2)
    ends, num_entries = EndRules((), sizes.max_model_len), len(first.table_blocks)
    capacity = diff_size(num_rows, num_entries, num_rows * context)
    (begins,), (goes_on,) = (parts_of(grant, ends, capacity) for grant in (first, second))
    news, steady = (torch.from_numpy(part).to(device) for part in (begins, goes_on))

    def zeros(shape: tuple[int, ...], dtype: str) -> Any:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    slots = step_state.make_slots(zeros, num_rows, sizes.max_model_len, block_size)
    inputs = step_state.make_buffers(zeros, num_rows, num_rows, slots.tables.shape[1]).of(num_rows, num_rows)
    chosen = torch.ones(num_rows, dtype=torch.int64, device=device)
    told = zeros((2, num_rows), "int32")
    inputs.sampled_slots.copy_(torch.arange(num_rows, dtype=torch.int32, device=device))
    inputs.next_positions.fill_(context + 1)
    inputs.runs.fill_(1)

    def take() -> Tensors:
        kernels.apply_updates(news, slots)
        return {}

    def make() -> Tensors:
        kernels.make_inputs(steady, slots, inputs, block_size)
        return {}

    def note_tokens() -> Tensors:
        kernels.note_tokens(told, chosen, inputs, slots)
        return {}

    at, num_blocks = f"of {num_rows} x {context}", num_rows * -(-(context + 1) // block_size)
    return [
        Trial(
            f"take_news {at}",
            take,
            unchecked,
            roofline_step.apply_updates(num_entries, num_rows, num_rows, num_rows * context),
        ),
        Trial(f"make_inputs {at}", make, unchecked, roofline_step.make_inputs(num_rows, num_rows, num_blocks)),
        Trial(f"settle {at}", note_tokens, unchecked, roofline_step.note_tokens(num_rows)),
    ]

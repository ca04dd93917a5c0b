"""Cases of the finish rule, for all that implement it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from millrace.kernels.layout import step_state
from millrace.kernels.layout.finish_rule import finish_of
from millrace.stages.backends.cuda.step_update import EndRules, state_row
from millrace.stages.messages import Started
from millrace.stages.testing.scripted.byte_tokenizer import EOS
from tests.stages.grants import started

MAX_MODEL_LEN, NUM_PROMPT = 40, 3
STOPS = (7, 9)


@dataclass(frozen=True, slots=True)
class Case:
    token_id: int
    place: int  # of the token in its answer
    min_tokens: int
    max_tokens: int
    ignore_eos: bool
    is_broken: bool

    def start(self, slot: int) -> Started:
        params: dict[str, Any] = {"min_tokens": self.min_tokens, "max_tokens": self.max_tokens}
        answer = [11] * self.place
        return started(slot, [1] * NUM_PROMPT, answer, ignore_eos=self.ignore_eos, stop_token_ids=STOPS, **params)

    @property
    def right(self) -> int:
        """By the rule."""
        limits = {"min_tokens": self.min_tokens, "max_tokens": min(self.max_tokens, MAX_MODEL_LEN - NUM_PROMPT)}
        end_ids = STOPS if self.ignore_eos else (*STOPS, EOS)
        return finish_of(self.token_id, self.place, end_ids=end_ids, is_broken=self.is_broken, **limits)


def cases() -> Iterator[Case]:
    """Every mixture of tokens, places, limits and flags: all that the rule tells apart, and one less and more."""
    places = ((0, 0, 1), (0, 0, 5), (2, 2, 3), (2, 3, 3), (2, 3, 9), (3, 3, 9), (4, 0, 5), (36, 0, 99), (35, 0, 99))
    for (place, least, most), token_id, ignores, broken in product(
        places, (5, EOS, *STOPS), (False, True), (False, True)
    ):
        yield Case(token_id, place, least, most, ignores, broken)


CASES = list(cases())


def on_device(kernels: Any) -> list[int]:
    """What `note_tokens` of the twin or of Triton says of each case, all in one step."""
    count, ends = len(CASES), EndRules((EOS,), MAX_MODEL_LEN)

    def zeros(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    slots = step_state.make_slots(zeros, count, MAX_MODEL_LEN, 4)
    buffers = step_state.make_buffers(zeros, count, count, 10)
    for row, case in enumerate(CASES):
        slots.state[row] = torch.from_numpy(state_row(case.start(row), ends))
        buffers.sampled_slots[row], buffers.runs[row], buffers.logits_rows[row] = row, 1, row
        buffers.next_positions[row] = NUM_PROMPT + case.place
    chosen = torch.tensor([-1 if case.is_broken else case.token_id for case in CASES])
    out = zeros((2, count), "int32")
    kernels.note_tokens(out, chosen, buffers, slots)
    finishes: list[int] = out[1].tolist()
    return finishes

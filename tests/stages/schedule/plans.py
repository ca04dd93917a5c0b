"""Plans and outcomes in few words, for tests of schedule and allocate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.stages.messages import Started, StepDone, StepGrant, StepPlan, TokenRequest
from millrace.stages.params import SamplingParams


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def request(sequence_id: int, num_prompt: int, *, max_tokens: int = 4, **fields: Any) -> TokenRequest:
    params = SamplingParams(max_tokens=max_tokens, n=fields.pop("n", 1))
    token_ids = np.arange(1, num_prompt + 1, dtype=np.int32)
    return TokenRequest(f"r{sequence_id}", 0, token_ids, params, sequence_id, **fields)


def plan(
    step: int,
    wishes: dict[int, int],
    *,
    completed: int = -1,
    budget: int = 1000,
    victims: Sequence[int] = (),
    may_take: dict[int, int] | None = None,
    ended: Sequence[int] = (),
    reserved: dict[int, int] | None = None,
    allows_partial: bool = True,
) -> StepPlan:
    """A plan with `wishes`, slot -> tokens, in order; `may_take`, slot -> how many of `victims` it may preempt."""
    slots = list(wishes)
    return StepPlan(
        step=step,
        generation=0,
        completed_step=completed,
        slots=np.array(slots, np.intp),
        num_wanted=ints(*wishes.values()),
        reaches_end=np.ones(len(slots), np.bool_),
        token_budget=budget,
        victims=np.array(victims, np.intp),
        num_victims=ints(*((may_take or {}).get(slot, 0) for slot in slots)),
        num_reserved=None if reserved is None else ints(*(reserved.get(slot, 0) for slot in slots)),
        allows_partial=allows_partial,
        started=tuple(Started(slot, slot, f"r{slot}", ints(1), 1, SamplingParams(), 0) for slot in slots),
        ended=ended,
    )


def done(grant: StepGrant, tokens: dict[int, int], finished: Sequence[int] = (), place: int = 0) -> StepDone:
    """The outcome of `grant`: sampled slots get `tokens`; sequence ids equal slots."""
    slots = grant.slots[grant.is_sampled]
    return StepDone(
        step=grant.step,
        slots=slots,
        sequence_ids=slots.astype(np.int64),
        places=np.full(len(slots), place),
        token_ids=np.array([tokens[slot] for slot in slots.tolist()], np.intp),
        is_finished=np.isin(slots, list(finished)),
    )

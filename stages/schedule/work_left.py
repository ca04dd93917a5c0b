"""How much a scheduler has left to compute, as a router asks of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..array_checks import num_true, total
from .scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class WorkLeft:
    """The sequences that run and wait, and their tokens."""

    num_rows: int  # sequences that run
    num_waiting: int
    context_tokens: int  # of the sequences that run
    waiting_tokens: int
    num_prompt: int  # tokens of prompts that are not computed, less those expected in the cache
    num_pairs: float  # pairs of such a token and one at or before its position

    @classmethod
    def of(cls, scheduler: Scheduler) -> WorkLeft:
        """What the scheduler has now. Takes as long as it has sequences."""
        slots, num_waiting = scheduler.slots, scheduler.num_waiting
        running = slots.running()
        known, computed = slots.num_known[running], slots.num_computed[running]
        num_left = known - computed
        is_prompt = num_left > 1  # others have the one token of a row that decodes
        waiting_tokens, num_prompt, num_pairs = 0, 0.0, 0.0
        if num_true(is_prompt):
            left = num_left[is_prompt].astype(np.float64)
            num_prompt += left.sum()
            num_pairs += (left * (computed[is_prompt] + (left + 1) / 2)).sum()
        for sequence in scheduler.waiting:
            num_tokens = len(sequence.token_ids)
            to_come = max(num_tokens - sequence.num_expected_cached, 1)
            waiting_tokens += num_tokens
            num_prompt += to_come
            num_pairs += to_come * (num_tokens - to_come + (to_come + 1) / 2)
        return cls(len(running), num_waiting, total(known), waiting_tokens, int(num_prompt), float(num_pairs))

"""How much a scheduler has left to compute, as a router asks of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

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
        slots, waiting = scheduler.slots, list(scheduler.waiting)
        running = slots.running()
        known, computed = slots.num_known[running], slots.num_computed[running]
        left = (known - computed).astype(np.float64)
        left[left <= 1] = 0.0  # the one token of a row that decodes
        num_tokens = np.array([len(sequence.token_ids) for sequence in waiting], np.float64)
        cached = np.array([sequence.num_expected_cached for sequence in waiting], np.float64)
        to_come = np.maximum(num_tokens - cached, 1.0)
        pairs = left * (computed + (left + 1) / 2)
        pairs_to_come = to_come * (num_tokens - to_come + (to_come + 1) / 2)
        return cls(
            len(running),
            scheduler.num_waiting,
            int(known.sum()),
            int(num_tokens.sum()),
            int(left.sum() + to_come.sum()),
            float(pairs.sum() + pairs_to_come.sum()),
        )

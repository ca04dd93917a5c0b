"""Short ways to write what reaches the device in tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.stages.messages import Ints, Started, StepGrant
from millrace.stages.params import SamplingParams


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def started(slot: int, prompt: Sequence[int] = (1, 2, 3), answer: Sequence[int] = (), seed: int = 0, **params: Any):
    """A sequence with id 100 + slot, that has generated `answer`. Greedy unless `temperature` says otherwise."""
    params = {"temperature": 0.0, "max_tokens": None, **params}
    token_ids = ints(*prompt, *answer)
    return Started(slot, 100 + slot, f"r{slot}", token_ids, len(prompt), SamplingParams(**params), seed)


def grant(
    rows: Sequence[tuple[int, int, int, bool]],
    *,
    step: int = 0,
    generation: int = 0,
    started: Sequence[Started] = (),
    tables: Sequence[tuple[int, int, int]] = (),
) -> StepGrant:
    """`rows` are (slot, start, tokens, is sampled), `tables` are (slot, place, block)."""
    slots, starts, counts, sampled = zip(*rows, strict=True) if rows else ((), (), (), ())
    news = np.array(tables, np.intp).reshape(-1, 3)
    return StepGrant(
        step=step,
        generation=generation,
        slots=np.array(slots, np.intp),
        starts=ints(*starts),
        num_tokens=ints(*counts),
        is_sampled=np.array(sampled, np.bool_),
        table_slots=news[:, 0],
        table_places=news[:, 1],
        table_blocks=news[:, 2].astype(np.int32),
        started=tuple(started),
    )


def decode(*slots: int, **news: Any) -> StepGrant:
    """A step of one token for each slot, at a position that the sampler ignores."""
    return grant([(slot, 0, 1, True) for slot in slots], **news)

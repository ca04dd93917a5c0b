"""Plans of steps, as the scheduler would make them: decode steps, prompts whole and in chunks, and both in one step.

Each takes a subject's `max_num_seqs`, `max_model_len` and `block_size`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from millrace.stages.messages import NO_INDICES, NO_INTS, Drafts, Started, StepGrant
from millrace.stages.params import SamplingParams

GREEDY: dict[str, Any] = {"temperature": 0.0}
TOP_P: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}  # as Qwen3's own configuration asks
DRAFT = 7  # a token; random weights choose it about once in a vocabulary
LOGPROBS: dict[str, Any] = {"temperature": 0.0, "logprobs": 5}


class Sizes(Protocol):
    """What a plan needs to know of a subject."""

    max_num_seqs: int
    max_model_len: int
    block_size: int


def decode_grants(
    subject: Sizes, num_rows: int, context: int, num_steps: int, asked: dict[str, Any] = GREEDY
) -> list[StepGrant]:
    """Sequences that have `context` tokens, one more in each step."""
    assert context + num_steps <= subject.max_model_len and num_rows <= subject.max_num_seqs
    slots, per_slot = np.arange(num_rows), -(-(context + num_steps) // subject.block_size)
    params = SamplingParams(max_tokens=num_steps + 1, ignore_eos=True, **asked)
    known = np.zeros(context, np.int32)
    started = tuple(Started(slot, slot, f"r{slot}", known, context, params, seed=slot) for slot in range(num_rows))
    ones, all_sampled = np.ones(num_rows, np.int32), np.ones(num_rows, np.bool_)
    first = StepGrant(
        step=0,
        generation=0,
        slots=slots,
        starts=np.full(num_rows, context - 1, np.int32),
        num_tokens=ones,
        is_sampled=all_sampled,
        table_slots=np.repeat(slots, per_slot),
        table_places=np.tile(np.arange(per_slot), num_rows),
        table_blocks=np.arange(1, num_rows * per_slot + 1, dtype=np.int32),
        is_decode=True,
        started=started,
    )
    later = [
        StepGrant(
            step=step,
            generation=0,
            slots=slots,
            starts=np.full(num_rows, context - 1 + step, np.int32),
            num_tokens=ones,
            is_sampled=all_sampled,
            table_slots=NO_INDICES,
            table_places=NO_INDICES,
            table_blocks=NO_INTS,
            is_decode=True,
        )
        for step in range(1, num_steps)
    ]
    return [first, *later]


def draft_grants(subject: Sizes, num_rows: int, context: int, num_drafts: int, num_steps: int) -> list[StepGrant]:
    """As decode steps, each with so many drafts a row. None of them is accepted: what a step takes depends on how many
    it verifies alone."""
    counts = np.full(num_rows, num_drafts, np.int32)
    drafts = Drafts(counts, np.full(num_rows * num_drafts, DRAFT, np.intp))
    return [
        replace(grant, num_tokens=1 + counts, is_decode=False, drafts=drafts)
        for grant in decode_grants(subject, num_rows, context, num_steps + num_drafts)[:num_steps]
    ]


def prompt_grants(subject: Sizes, num_tokens: int, num_prompts: int, chunk: int = 0) -> list[StepGrant]:
    """Prompts one behind the other, each in steps of `chunk` tokens, or whole, all in the same blocks: each in a slot
    of its own, as its first token ends it."""
    num_blocks, chunk = -(-(num_tokens + 1) // subject.block_size), chunk or num_tokens
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    known = np.zeros(num_tokens, np.int32)
    grants: list[StepGrant] = []
    for prompt in range(num_prompts):
        slot = prompt % subject.max_num_seqs
        for begin in range(0, num_tokens, chunk):
            end, is_first = min(begin + chunk, num_tokens), begin == 0
            grants.append(
                StepGrant(
                    step=len(grants),
                    generation=0,
                    slots=np.array([slot]),
                    starts=np.array([begin], np.int32),
                    num_tokens=np.array([end - begin], np.int32),
                    is_sampled=np.array([end == num_tokens]),
                    table_slots=np.full(num_blocks if is_first else 0, slot),
                    table_places=np.arange(num_blocks if is_first else 0),
                    table_blocks=np.arange(1, num_blocks + 1, dtype=np.int32) if is_first else NO_INTS,
                    is_decode=False,
                    started=(Started(slot, prompt, f"p{prompt}", known, num_tokens, params, seed=0),) * is_first,
                )
            )
    return grants


def mixed_grants(subject: Sizes, num_rows: int, context: int, num_prompt: int, num_steps: int) -> list[StepGrant]:
    """Decode steps that have a whole prompt beside them, in a slot of its own behind those of the rows."""
    assert num_rows + 1 <= subject.max_num_seqs
    rows = decode_grants(subject, num_rows, context, num_steps)
    first_block = len(rows[0].table_blocks)
    grants = []
    for step, (row, prompt) in enumerate(zip(rows, prompt_grants(subject, num_prompt, num_steps), strict=True)):
        slot = num_rows + step % (subject.max_num_seqs - num_rows)
        (begun,) = prompt.started
        own = Started(slot, 1_000_000 + step, f"p{step}", begun.token_ids, num_prompt, begun.params, seed=0)
        grants.append(
            StepGrant(
                step=step,
                generation=0,
                slots=np.append(row.slots, slot),
                starts=np.append(row.starts, prompt.starts),
                num_tokens=np.append(row.num_tokens, prompt.num_tokens),
                is_sampled=np.append(row.is_sampled, prompt.is_sampled),
                table_slots=np.append(row.table_slots, np.full_like(prompt.table_slots, slot)),
                table_places=np.append(row.table_places, prompt.table_places),
                table_blocks=np.append(row.table_blocks, prompt.table_blocks + first_block).astype(np.int32),
                is_decode=False,
                started=(*row.started, own),
            )
        )
    return grants

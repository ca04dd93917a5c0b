"""The Triton kernel of a linear recurrence with a matrix as its state. `launches.py` launches it.

A program has BLOCK_V columns of the state of one head of a sequence, in registers, from its slot and back, and takes
one token after another. So no two programs meet, and the order of sums is the same however a prompt is cut into steps
and whatever else is in a step.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import start_early


@triton.jit(do_not_specialize=["num_tokens"])
def token_kernel(
    out, states, q, k, v, log_decay, beta, slots, starts, lengths, num_tokens,
    groups, heads, slot_stride, head_stride, key_stride,
    MOST: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Token by token, for sequences of less than MOST new tokens, if it is above 0."""
    start_early(IS_EARLY)
    sequence, head = tl.program_id(0), tl.program_id(1)
    group = head // (heads // groups)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    if MOST > 0:
        begin = tl.where(end - begin < MOST, begin, end)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_value = key < KEYS, value < VALUES
    slot = tl.load(slots + sequence).to(tl.int64)
    place = states + slot * slot_stride + head * head_stride + key[:, None] * key_stride + value[None, :]
    num_kept = tl.where(tl.load(lengths + sequence) > end - begin, KEYS, 0)  # of one with earlier tokens
    state = tl.load(place, mask=(key < num_kept)[:, None] & is_value[None, :], other=0.0)
    for token in range(begin, end):
        at_key = (token * groups + group) * KEYS + key
        at_head = token * heads + head
        keys = tl.load(k + at_key, mask=is_key, other=0.0)
        update = tl.load(v + at_head * VALUES + value, mask=is_value, other=0.0)
        state *= tl.exp(tl.load(log_decay + at_head))
        if beta is not None:
            update = (update - tl.sum(state * keys[:, None], axis=0)) * tl.load(beta + at_head)
        state += keys[:, None] * update[None, :]
        queries = tl.load(q + at_key, mask=is_key, other=0.0)
        tl.store(out + at_head * VALUES + value, tl.sum(state * queries[:, None], axis=0), mask=is_value)
    num_stored = tl.where(end > begin, KEYS, 0)
    tl.store(place, state, mask=(key < num_stored)[:, None] & is_value[None, :])
    first = tl.load(starts + tl.num_programs(0))  # of the padding behind the last sequence
    for token in range(first + sequence, num_tokens, tl.num_programs(0)):
        tl.store(out + (token * heads + head) * VALUES + value, tl.zeros([BLOCK_V], tl.float32), mask=is_value)

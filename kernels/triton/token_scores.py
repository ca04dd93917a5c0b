"""Triton kernels for log-probabilities and ranks of tokens. Their twin is `score` in `kernels/reference/sampling.py`.

Shapes: logits [L, V], sampling parameters [S, 16] i32, slots [L]; L rows of logits, V tokens in the vocabulary, S
slots, n rows that are scored, G groups of 128 tokens.

A first launch reduces the rows to groups (`vocab_groups.py`), a second has one program a row. The k likeliest tokens
are in the k groups with the largest maxima, so only these are read again.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from .launch import check_dtype, early_launch, next_power_of_2, start_early
from .vocab_groups import (
    GROUP,
    LN_2,
    NO_ID,
    TEMPERATURE,
    as_float,
    as_number,
    coldness_of,
    exp2,
    group_tables,
    num_groups_of,
    ordered,
)

NO_KEY = tl.constexpr(-(1 << 63))


def score(
    logits: Tensor,
    row_ids: Tensor,
    token_ids: Tensor,
    num_top: int,
    rows: Tensor | None = None,
    slots: Tensor | None = None,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `SamplingKernels.score`. Sums are in f32."""
    check_dtype(logits)
    assert bounds is None or bounds.is_contiguous()
    num_rows, num_groups, device = len(row_ids), num_groups_of(logits), logits.device
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(num_rows, num_top, dtype=torch.float32, device=device)
    if not num_rows:
        return logprobs, ranks, top_ids, top_logprobs
    tables = group_tables(logits, rows, slots, row_ids, token_ids, bounds)
    block_top = next_power_of_2(max(num_top, 1))
    lists = torch.empty(num_rows, block_top, dtype=torch.int32, device=device)
    _score_kernel[(num_rows,)](
        logprobs, ranks, top_ids, top_logprobs, lists, tables, logits, row_ids, token_ids, rows, slots, bounds,
        logits.shape[1], logits.stride(0), 0 if rows is None else rows.stride(0), num_groups, num_top,
        BLOCK=next_power_of_2(num_groups), BLOCK_TOP=block_top, num_warps=8, enable_fp_fusion=True,
        **early_launch(device),
    )  # fmt: skip
    return logprobs, ranks, top_ids, top_logprobs


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["row_ids", "token_ids", "slots", "bounds"])
def _score_kernel(
    logprobs, ranks, top_ids, top_logprobs, lists, tables, logits, row_ids, token_ids, rows, slots, bounds,
    vocab_size, logits_row, rows_row, num_groups, num_top, BLOCK: tl.constexpr, BLOCK_TOP: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    start_early(IS_EARLY)
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + index)
    whole = logits + row * logits_row
    temperature = 0.0
    if rows is not None:
        temperature = as_float(tl.load(rows + tl.load(slots + row).to(tl.int64) * rows_row + TEMPERATURE))
    bound, most = float("-inf"), float("inf")
    if bounds is not None:
        bound = tl.where(temperature > 0, tl.load(bounds + 2 * row), float("-inf"))
        most = tl.where(temperature > 0, tl.load(bounds + 2 * row + 1), float("inf"))
    coldness = coldness_of(temperature)
    group = tl.arange(0, BLOCK)
    is_group = group < num_groups
    place = tables + index * 3 * num_groups + group
    largest = tl.load(place, mask=is_group, other=float("-inf"))
    amount = tl.load(place + num_groups, mask=is_group, other=0.0)
    num_above = tl.load(place + 2 * num_groups, mask=is_group, other=0.0)
    best = tl.max(largest, axis=0)
    total = tl.log(tl.sum(amount * exp2((largest - best) * coldness), axis=0))
    chosen = tl.load(whole + tl.load(token_ids + row)).to(tl.float32)
    chosen = tl.where((chosen < bound) | (chosen > most), float("-inf"), chosen)
    tl.store(logprobs + index, (chosen - best) * (coldness * LN_2) - total)
    tl.store(ranks + index, tl.sum(num_above.to(tl.int32), axis=0).to(tl.int64) + 1)
    if num_top > 0:
        mine = lists + index * BLOCK_TOP
        key = tl.where(is_group, _key(largest, group), NO_KEY)
        num_listed = tl.minimum(num_top, num_groups)
        for i in range(num_listed):
            first = tl.max(key, axis=0)
            tl.store(mine + i, _number_of(first).to(tl.int32))
            key = tl.where(key == first, NO_KEY, key)
        tl.debug_barrier()  # the loads below read numbers that another thread stored
        at = tl.arange(0, BLOCK_TOP)
        is_listed = at < num_listed
        token = tl.load(mine + at, mask=is_listed, other=0)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        is_token = is_listed[:, None] & (token < vocab_size)
        x = tl.load(whole + token, mask=is_token, other=float("-inf")).to(tl.float32)
        x = tl.where((x < bound) | (x > most), float("-inf"), x)
        key = tl.reshape(tl.where(is_token, _key(x, token), NO_KEY), [BLOCK_TOP * GROUP])
        for i in range(num_top):
            first = tl.max(key, axis=0)
            tl.store(top_ids + index * num_top + i, _number_of(first))
            number = as_number((first >> 32).to(tl.int32))
            tl.store(top_logprobs + index * num_top + i, (number - best) * (coldness * LN_2) - total)
            key = tl.where(key == first, NO_KEY, key)


@triton.jit
def _key(x, number):
    """A larger key is a larger logit, or an equal one of a lower token or group: a maximum gives both at once."""
    return (ordered(x).to(tl.int64) << 32) | (-number + NO_ID).to(tl.int64)


@triton.jit
def _number_of(key):
    return -(key & 0xFFFFFFFF) + NO_ID

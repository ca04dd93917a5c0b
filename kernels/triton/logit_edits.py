"""Triton kernels that edit logits by request, force tokens, and count tokens for penalties.

Their twins are `edit`, `force` and `count_tokens` in `kernels/reference/sampling.py`. Shapes: logits [L, V], counts
[S, V] i16, sampling parameters [S, 16] i32; L rows of logits, V tokens in the vocabulary, S slots.

All edits are one pass over the rows. The caller launches it only if a row of the step needs an edit.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..layout import sampling_rows
from .launch import check_dtype, early_launch, next_power_of_2, start_early
from .vocab_groups import as_float

REPETITION, FREQUENCY = tl.constexpr(sampling_rows.REPETITION), tl.constexpr(sampling_rows.FREQUENCY)
PRESENCE = tl.constexpr(sampling_rows.PRESENCE)
NUM_BIASED, NUM_ENDS = tl.constexpr(sampling_rows.NUM_BIASED), tl.constexpr(sampling_rows.NUM_ENDS)
END_POSITION = tl.constexpr(sampling_rows.END_POSITION)
MAX_COUNT = tl.constexpr(sampling_rows.MAX_COUNT)
BLOCK = 4096  # tokens a program
LISTED = 256  # ids of a list processed at a time


def edit(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    positions: Tensor,
    counts: Tensor,
    biased_ids: Tensor,
    bias: Tensor,
    end_ids: Tensor,
    masks: Tensor | None = None,
    mask_rows: Tensor | None = None,
) -> Tensor:
    """See `SamplingKernels.edit`. One program for 4,096 tokens of a row. `biased_ids` and `bias` have equal strides."""
    check_dtype(logits)
    assert (masks is None) == (mask_rows is None)
    assert biased_ids.stride() == bias.stride()
    num_rows, vocab_size = logits.shape
    edited = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return edited
    _edit_kernel[(num_rows, triton.cdiv(vocab_size, BLOCK))](
        edited, logits, rows, slots, positions, counts, biased_ids, bias, end_ids, masks, mask_rows,
        vocab_size, logits.stride(0), rows.stride(0), counts.stride(0), biased_ids.stride(0), end_ids.stride(0),
        0 if masks is None else masks.stride(0), BLOCK=BLOCK, LISTED=LISTED, num_warps=8, enable_fp_fusion=True,
        **early_launch(logits.device),
    )  # fmt: skip
    return edited


def count_tokens(counts: Tensor, rows: Tensor, slots: Tensor, token_ids: Tensor) -> None:
    """See `SamplingKernels.count_tokens`. One program for up to 128 slots."""
    if len(slots):
        block = min(next_power_of_2(len(slots)), 128)
        _count_tokens_kernel[(triton.cdiv(len(slots), block),)](
            counts,
            rows,
            slots,
            token_ids,
            len(slots),
            rows.stride(0),
            counts.stride(0),
            BLOCK=block,
            enable_fp_fusion=True,
            **early_launch(counts.device),
        )


def force(chosen: Tensor, forced: Tensor) -> None:
    """See `SamplingKernels.force`. One program for up to 128 rows."""
    if len(chosen):
        block = min(next_power_of_2(len(chosen)), 128)
        _force_kernel[(triton.cdiv(len(chosen), block),)](
            chosen, forced, len(chosen), BLOCK=block, enable_fp_fusion=True, **early_launch(chosen.device)
        )


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "mask_rows"])
def _edit_kernel(
    edited, logits, rows, slots, positions, counts, biased_ids, bias, end_ids, masks, mask_rows,
    vocab_size, logits_row, rows_row, counts_row, biased_row, ends_row, masks_row,
    BLOCK: tl.constexpr, LISTED: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    start_early(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    token = start + tl.arange(0, BLOCK)
    is_token = token < vocab_size
    place = edited + row * vocab_size
    x = tl.load(logits + row * logits_row + token, mask=is_token, other=0.0).to(tl.float32)
    if slot < 0:
        tl.store(place + token, x, mask=is_token)
        return
    mine = rows + slot * rows_row
    repetition = as_float(tl.load(mine + REPETITION))
    frequency = as_float(tl.load(mine + FREQUENCY))
    presence = as_float(tl.load(mine + PRESENCE))
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        seen = tl.load(counts + slot * counts_row + token, mask=is_token, other=0).to(tl.int32)
        times = (seen & MAX_COUNT).to(tl.float32)
        x = tl.where(seen != 0, tl.where(x < 0, x * repetition, x / repetition), x)
        x = x - frequency * times - tl.where(times > 0, presence, 0.0)
    if masks is not None:
        mask_row = tl.load(mask_rows + row)
        if mask_row >= 0:
            word = tl.load(masks + mask_row * masks_row + token // 32, mask=is_token, other=0)
            x = tl.where(((word >> (token % 32)) & 1) != 0, x, float("-inf"))
    tl.store(place + token, x, mask=is_token)
    num_biased = tl.load(mine + NUM_BIASED)
    num_ends = tl.where(tl.load(positions + row) < tl.load(mine + END_POSITION), tl.load(mine + NUM_ENDS), 0)
    if num_biased > 0:
        tl.debug_barrier()  # the loads below read numbers that other threads stored
        for first in range(0, num_biased, LISTED):
            at = first + tl.arange(0, LISTED)
            listed = tl.load(biased_ids + slot * biased_row + at, mask=at < num_biased, other=-1)
            is_here = (listed >= start) & (listed < start + BLOCK)
            more = tl.load(bias + slot * biased_row + at, mask=is_here, other=0.0)
            tl.store(place + listed, tl.load(place + listed, mask=is_here, other=0.0) + more, mask=is_here)
    if num_ends > 0:
        tl.debug_barrier()
        for first in range(0, num_ends, LISTED):
            at = first + tl.arange(0, LISTED)
            listed = tl.load(end_ids + slot * ends_row + at, mask=at < num_ends, other=-1)
            tl.store(place + listed, float("-inf"), mask=(listed >= start) & (listed < start + BLOCK))


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slots", "token_ids"])
def _count_tokens_kernel(
    counts, rows, slots, token_ids, num_rows, rows_row, counts_row, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    start_early(IS_EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    slot = tl.load(slots + row, mask=is_row, other=-1).to(tl.int64)
    is_row = is_row & (slot >= 0)
    mine = rows + slot * rows_row
    repetition = as_float(tl.load(mine + REPETITION, mask=is_row, other=0))
    frequency = as_float(tl.load(mine + FREQUENCY, mask=is_row, other=0))
    presence = as_float(tl.load(mine + PRESENCE, mask=is_row, other=0))
    is_penalised = is_row & ((repetition != 1) | (frequency != 0) | (presence != 0))
    place = counts + slot * counts_row + tl.load(token_ids + row, mask=is_row, other=0)
    seen = tl.load(place, mask=is_penalised, other=0)
    more = tl.where((seen & MAX_COUNT) == MAX_COUNT, seen, seen + 1)
    tl.store(place, more.to(tl.int16), mask=is_penalised)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["forced"])
def _force_kernel(chosen, forced, num_rows, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr):
    start_early(IS_EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    token = tl.load(chosen + row, mask=is_row, other=-1)
    wanted = tl.load(forced + row, mask=is_row, other=-1).to(tl.int64)
    token = tl.where((wanted >= 0) & (token >= 0), wanted, token)
    token = tl.where(wanted < -1, -2 - wanted, token)
    tl.store(chosen + row, token, mask=is_row)

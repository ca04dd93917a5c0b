"""Triton kernels that choose tokens and score them. Their twins are in `kernels/reference/sampling.py`.

Shapes: logits [L, V], sampling parameters [S, 16] i32, slots and positions [L]; L rows of logits, V tokens in the
vocabulary, S slots.

Nothing is sorted. A row is cut into groups of 4,096 tokens, one program each, which write their best; a second, small
launch takes the best of those. The work of a group depends on its row alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..layout import sampling_rows
from ..reference.sampling import QUARTER as _QUARTER
from .launch import IS_INTERPRETED, check_dtype, next_power_of_2

TEMPERATURE = tl.constexpr(sampling_rows.TEMPERATURE)
SEED_LOW, SEED_HIGH = tl.constexpr(sampling_rows.SEED_LOW), tl.constexpr(sampling_rows.SEED_HIGH)
QUARTER = tl.constexpr(_QUARTER)
GROUP = 4 * _QUARTER  # tokens of a program
SERIES_END = tl.constexpr(1 / 32)  # as in the twin
NO_ID = tl.constexpr(0x7FFFFFFF)
NO_KEY = tl.constexpr(-(1 << 63))
HAS_PTX = tl.constexpr(not IS_INTERPRETED)


def choose(logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor, least: Tensor | None = None) -> Tensor:
    """See `SamplingKernels.choose`."""
    check_dtype(logits)
    assert least is None or least.is_contiguous()
    num_rows, vocab_size = logits.shape
    num_groups = triton.cdiv(vocab_size, GROUP)
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return token_ids
    scores = torch.empty(num_rows, num_groups, dtype=torch.float32, device=device)
    ids = torch.empty(num_rows, num_groups, dtype=torch.int32, device=device)
    _draw_kernel[(num_rows, num_groups)](
        scores, ids, logits, rows, slots, positions, least, vocab_size, logits.stride(0), rows.stride(0), num_groups,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    _pick_kernel[(num_rows,)](
        token_ids, scores, ids, slots, num_groups, BLOCK=next_power_of_2(num_groups),
        num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return token_ids


def score(
    logits: Tensor,
    row_ids: Tensor,
    token_ids: Tensor,
    num_top: int,
    rows: Tensor | None = None,
    slots: Tensor | None = None,
    least: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `SamplingKernels.score`. Sums are in f32."""
    check_dtype(logits)
    assert least is None or least.is_contiguous()
    num_rows, vocab_size = len(row_ids), logits.shape[1]
    num_groups = triton.cdiv(vocab_size, GROUP)
    rows_row = 0 if rows is None else rows.stride(0)
    device = logits.device
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=device)
    ranks = torch.empty(num_rows, dtype=torch.int64, device=device)
    top_ids = torch.empty(num_rows, num_top, dtype=torch.int64, device=device)
    top_logprobs = torch.empty(num_rows, num_top, dtype=torch.float32, device=device)
    if not num_rows:
        return logprobs, ranks, top_ids, top_logprobs
    sums = torch.empty(num_rows, 3, num_groups, dtype=torch.float32, device=device)  # largest, sum, number above
    keys = torch.empty(num_rows, num_groups, num_top, dtype=torch.int64, device=device)
    _score_kernel[(num_rows, num_groups)](
        sums, keys, logits, row_ids, token_ids, rows, slots, least, vocab_size, logits.stride(0), rows_row, num_groups,
        num_top, GROUP=GROUP, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    _finish_score_kernel[(num_rows,)](
        logprobs, ranks, top_ids, top_logprobs, sums, keys, logits, row_ids, token_ids, rows, slots, least,
        logits.stride(0), rows_row, num_groups, num_top, BLOCK=next_power_of_2(num_groups),
        BLOCK_TOP=next_power_of_2(max(num_groups * num_top, 1)), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return logprobs, ranks, top_ids, top_logprobs


# ---- choosing -------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=["slots", "positions", "least"])
def _draw_kernel(scores, ids, logits, rows, slots, positions, least, vocab_size, logits_row, rows_row, num_groups):
    """The best score of a group and its lowest token; the score is NaN if the group holds NaN or +inf."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    mine = rows + slot * rows_row
    temperature = as_float(tl.load(mine + TEMPERATURE))
    lane = tl.arange(0, QUARTER)
    token = group * 4 * QUARTER + lane
    place = logits + row * logits_row + token
    # Four loads of adjacent tokens; together they use all four numbers of each Philox call.
    x0 = tl.load(place, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    x1 = tl.load(place + QUARTER, mask=token + QUARTER < vocab_size, other=float("-inf")).to(tl.float32)
    x2 = tl.load(place + 2 * QUARTER, mask=token + 2 * QUARTER < vocab_size, other=float("-inf")).to(tl.float32)
    x3 = tl.load(place + 3 * QUARTER, mask=token + 3 * QUARTER < vocab_size, other=float("-inf")).to(tl.float32)
    is_broken = _is_no_number(x0) | _is_no_number(x1) | _is_no_number(x2) | _is_no_number(x3)
    if temperature > 0:
        if least is not None:
            bound = tl.load(least + row)
            x0 = tl.where(x0 >= bound, x0, float("-inf"))
            x1 = tl.where(x1 >= bound, x1, float("-inf"))
            x2 = tl.where(x2 >= bound, x2, float("-inf"))
            x3 = tl.where(x3 >= bound, x3, float("-inf"))
        low = tl.load(mine + SEED_LOW).to(tl.int64) & 0xFFFFFFFF
        seed = (tl.load(mine + SEED_HIGH).to(tl.int64) << 32) | low
        call = group * QUARTER + lane
        nothing = call * 0
        position = nothing + tl.load(positions + row).to(tl.int32)
        r0, r1, r2, r3 = tl.philox(seed, call, position, nothing, nothing)
        coldness = 1.0 / temperature
        x0 = x0 * coldness + _gumbel(r0)
        x1 = x1 * coldness + _gumbel(r1)
        x2 = x2 * coldness + _gumbel(r2)
        x3 = x3 * coldness + _gumbel(r3)
    best = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    lowest = tl.where(x2 == best, token + 2 * QUARTER, token + 3 * QUARTER)
    lowest = tl.where(x1 == best, token + QUARTER, lowest)
    lowest = tl.where(x0 == best, token, lowest)
    largest = tl.max(best, axis=0)
    token_id = tl.min(tl.where(best == largest, lowest, NO_ID), axis=0)
    has_broken = tl.max(is_broken.to(tl.int32), axis=0)
    tl.store(scores + row * num_groups + group, tl.where(has_broken > 0, float("nan"), largest))
    tl.store(ids + row * num_groups + group, token_id)


@triton.jit
def _is_no_number(x):
    return (x != x) | (x == float("inf"))


@triton.jit
def _gumbel(bits):
    """-log(-log(1 - w)), w in (0, 1) from 32 random bits. Exact for small w, from which the largest noise comes."""
    w = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5)))))
    return -_log(tl.where(w < SERIES_END, series, -_log(1 - w)))


@triton.jit
def _log(x):
    """log(x) in one instruction, with an error of about 2^-22. `tl.log` takes thirty and a branch, twice a token."""
    if HAS_PTX:
        return 0.6931471805599453 * tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log(x)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _pick_kernel(token_ids, scores, ids, slots, num_groups, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK)
    slot = tl.load(slots + row)  # -1: padding
    is_group = group < tl.where(slot >= 0, num_groups, 0)
    best = tl.load(scores + row * num_groups + group, mask=is_group, other=float("-inf"))
    token_id = tl.load(ids + row * num_groups + group, mask=is_group, other=NO_ID)
    has_nan = tl.max((best != best).to(tl.int32), axis=0)
    largest = tl.max(tl.where(best != best, float("-inf"), best), axis=0)
    lowest = tl.min(tl.where(best == largest, token_id, NO_ID), axis=0)
    is_whole = (has_nan == 0) & (largest > float("-inf"))
    tl.store(token_ids + row, tl.where(slot < 0, 0, tl.where(is_whole, lowest, -1)).to(tl.int64))


# ---- how likely -----------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["row_ids", "token_ids", "slots", "least"])
def _score_kernel(
    sums, keys, logits, row_ids, token_ids, rows, slots, least, vocab_size, logits_row, rows_row, num_groups, num_top,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Writes a group's maximum, sum of exponentials, number of logits above the chosen one, and largest keys."""
    index = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    row = tl.load(row_ids + index)
    token = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(logits + row * logits_row + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    chosen = tl.load(logits + row * logits_row + tl.load(token_ids + row)).to(tl.float32)
    if rows is not None:
        x = _as_drawn(x, row, rows, rows_row, slots, least)
        chosen = _as_drawn(chosen, row, rows, rows_row, slots, least)
    largest = tl.max(x, axis=0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    place = sums + index * 3 * num_groups + group
    tl.store(place, largest)
    tl.store(place + num_groups, tl.sum(tl.exp(x - base), axis=0))
    tl.store(place + 2 * num_groups, tl.sum((x > chosen).to(tl.float32), axis=0))
    # A larger key is a larger number, or an equal one of a lower token: a maximum gives number and token at once.
    key = (ordered(x).to(tl.int64) << 32) | (-token + NO_ID).to(tl.int64)
    key = tl.where(token < vocab_size, key, NO_KEY)
    for i in range(num_top):
        first = tl.max(key, axis=0)
        tl.store(keys + (index * num_groups + group) * num_top + i, first)
        key = tl.where(key == first, NO_KEY, key)


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=["row_ids", "token_ids", "slots", "least"])
def _finish_score_kernel(
    logprobs, ranks, top_ids, top_logprobs, sums, keys, logits, row_ids, token_ids, rows, slots, least,
    logits_row, rows_row, num_groups, num_top, BLOCK: tl.constexpr, BLOCK_TOP: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ids + index)
    chosen = tl.load(logits + row * logits_row + tl.load(token_ids + row)).to(tl.float32)
    if rows is not None:
        chosen = _as_drawn(chosen, row, rows, rows_row, slots, least)
    group = tl.arange(0, BLOCK)
    place = sums + index * 3 * num_groups + group
    largest = tl.load(place, mask=group < num_groups, other=float("-inf"))
    part = tl.load(place + num_groups, mask=group < num_groups, other=0.0)
    num_above = tl.load(place + 2 * num_groups, mask=group < num_groups, other=0.0)
    best = tl.max(largest, axis=0)
    total = tl.log(tl.sum(part * tl.exp(largest - best), axis=0))
    tl.store(logprobs + index, chosen - best - total)
    tl.store(ranks + index, tl.sum(num_above, axis=0).to(tl.int64) + 1)
    if num_top > 0:
        at = tl.arange(0, BLOCK_TOP)
        num_keys = num_groups * num_top
        key = tl.load(keys + index * num_keys + at, mask=at < num_keys, other=NO_KEY)
        for i in range(num_top):
            first = tl.max(key, axis=0)
            tl.store(top_ids + index * num_top + i, -(first & 0xFFFFFFFF) + NO_ID)
            number = as_number((first >> 32).to(tl.int32))
            tl.store(top_logprobs + index * num_top + i, number - best - total)
            key = tl.where(key == first, NO_KEY, key)


@triton.jit
def _as_drawn(x, row, rows, rows_row, slots, least):
    """The logits that the slot's tokens are drawn by: over the temperature, -inf below `least`."""
    temperature = as_float(tl.load(rows + tl.load(slots + row).to(tl.int64) * rows_row + TEMPERATURE))
    if temperature > 0:
        if least is not None:
            x = tl.where(x >= tl.load(least + row), x, float("-inf"))
        x = x / temperature
    return x


# ---- numbers and their order ----------------------------------------------------------------------------------------


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def ordered(x):
    """f32 as i32 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def as_number(key):
    """The inverse of `ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)

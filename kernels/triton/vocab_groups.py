"""The Triton kernel that reduces rows of logits to a table of groups, on which choosing and scoring work.

Shapes: logits [L, V], sampling parameters [S, 16] i32, slots [L]; L rows of logits, V tokens in the vocabulary, S
slots, G = ceil(V / 128) groups.

A group is 128 adjacent tokens. Its entry is the largest logit and the sum of exponentials relative to it; a row's
sampling, its threshold and its log-probabilities need little else. All of a group's numbers come from one program, so
they depend on the row alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..layout import sampling_rows
from ..reference.sampling import GROUP as _GROUP
from .launch import IS_INTERPRETED, check_dtype, early_launch, start_early

TEMPERATURE = tl.constexpr(sampling_rows.TEMPERATURE)
GROUP = tl.constexpr(_GROUP)  # tokens of a group
QUARTER = tl.constexpr(_GROUP // 4)  # of a group: a thread has 16 bytes of each, so a reduction crosses few threads
GROUPS = 32  # of a program
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NO_ID = tl.constexpr(0x7FFFFFFF)
HAS_PTX = tl.constexpr(not IS_INTERPRETED)


def num_groups_of(logits: Tensor) -> int:
    """G of logits [L, V]."""
    return triton.cdiv(logits.shape[1], _GROUP)


def group_tables(
    logits: Tensor,
    rows: Tensor | None,
    slots: Tensor | None,
    row_ids: Tensor | None = None,
    token_ids: Tensor | None = None,
    bounds: Tensor | None = None,
) -> Tensor:
    """The groups of each row, [n, 2 or 3, G] f32: largest logit, sum, and number of logits above the row's token.

    The sum is of exp((x - largest) / temperature), with NaN if the group holds NaN; at temperature 0, and without
    `rows`, the temperature is 1. The entries of padding rows are undefined.

    row_ids    [n] i64   the rows of logits, without padding; None = all
    token_ids  [L] i64   if given, the third number counts the logits above this token's
    bounds     [L, 2] f32  if given, logits outside of them count as -inf, unless the temperature is 0
    """
    check_dtype(logits)
    num_rows, num_groups = len(logits) if row_ids is None else len(row_ids), num_groups_of(logits)
    tables = torch.empty(num_rows, 2 if token_ids is None else 3, num_groups, dtype=torch.float32, device=logits.device)
    _tables_kernel[(num_rows, triton.cdiv(num_groups, GROUPS))](
        tables, logits, row_ids, token_ids, rows, slots, bounds, logits.shape[1], logits.stride(0),
        0 if rows is None else rows.stride(0), num_groups, GROUPS=GROUPS, num_warps=4, enable_fp_fusion=True,
        **early_launch(logits.device),
    )  # fmt: skip
    return tables


@triton.jit(do_not_specialize_on_alignment=["row_ids", "token_ids", "slots", "bounds"])
def _tables_kernel(
    tables, logits, row_ids, token_ids, rows, slots, bounds, vocab_size, logits_row, rows_row, num_groups,
    GROUPS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    start_early(IS_EARLY)
    index = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    row = index if row_ids is None else tl.load(row_ids + index)
    temperature = 0.0
    if rows is not None:
        slot = tl.load(slots + row).to(tl.int64)
        if slot < 0:
            return
        temperature = as_float(tl.load(rows + slot * rows_row + TEMPERATURE))
    whole = logits + row * logits_row
    bound, most = float("-inf"), float("inf")
    if bounds is not None:
        bound = tl.where(temperature > 0, tl.load(bounds + 2 * row), float("-inf"))
        most = tl.where(temperature > 0, tl.load(bounds + 2 * row + 1), float("inf"))
    token = group[:, None] * GROUP + tl.arange(0, QUARTER)[None, :]
    x0 = _numbers(whole, token, vocab_size, bound, most, bounds is not None)  # [GROUPS, QUARTER]
    x1 = _numbers(whole, token + QUARTER, vocab_size, bound, most, bounds is not None)
    x2 = _numbers(whole, token + 2 * QUARTER, vocab_size, bound, most, bounds is not None)
    x3 = _numbers(whole, token + 3 * QUARTER, vocab_size, bound, most, bounds is not None)
    largest = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), axis=1)
    base = tl.where(tl.abs(largest) < float("inf"), largest, 0.0)[:, None]
    coldness = coldness_of(temperature)
    near = exp2((x0 - base) * coldness) + exp2((x1 - base) * coldness)
    far = exp2((x2 - base) * coldness) + exp2((x3 - base) * coldness)
    is_group = group < num_groups
    num_kinds = 2 if token_ids is None else 3
    place = tables + index * num_kinds * num_groups + group
    tl.store(place, largest, mask=is_group)
    tl.store(place + num_groups, tl.sum(near + far, axis=1), mask=is_group)
    if token_ids is not None:
        chosen = tl.load(whole + tl.load(token_ids + row)).to(tl.float32)
        if bounds is not None:
            chosen = tl.where((chosen >= bound) & (chosen <= most), chosen, float("-inf"))
        num_above = (x0 > chosen).to(tl.int32) + (x1 > chosen).to(tl.int32)
        num_above += (x2 > chosen).to(tl.int32) + (x3 > chosen).to(tl.int32)
        tl.store(place + 2 * num_groups, tl.sum(num_above, axis=1).to(tl.float32), mask=is_group)


@triton.jit
def _numbers(whole, token, vocab_size, bound, most, HAS_BOUNDS: tl.constexpr):
    x = tl.load(whole + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    if HAS_BOUNDS:
        x = tl.where((x < bound) | (x > most), float("-inf"), x)
    return x


# ---- numbers and their order ----------------------------------------------------------------------------------------


@triton.jit
def coldness_of(temperature):
    """1 / temperature in units of log2; that of temperature 1 at temperature 0. Finite."""
    return tl.minimum(LOG2_E / tl.where(temperature > 0, temperature, 1.0), 1e30)


@triton.jit
def exp2(x):
    """2 ** x in one instruction, with a relative error of about 2^-22; 0 where it is subnormal."""
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def log2(x):
    """log2(x) in one instruction, with an error of about 2^-22. `tl.log2` takes thirty and a branch."""
    if HAS_PTX:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.where(x > 0, tl.log2(tl.where(x > 0, x, 1.0)), float("-inf"))


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

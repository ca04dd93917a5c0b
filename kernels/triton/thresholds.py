"""The Triton kernel that turns top_k, top_p and min_p into one threshold a row.

Its twin is `thresholds` in `kernels/reference/sampling.py`. Shapes: logits [L, V], sampling parameters [S, 16] i32,
slots [L]; L rows of logits, V tokens in the vocabulary, S slots.

One program a row, without a sort. The first pass keeps the maximum of each of 2,048 columns, that is, of every 2,048th
token. At least k tokens are at or above the k-th largest of these maxima. The tokens at or above it are the candidates,
few more than k; the second pass gathers them. The threshold is then found among the candidates by bisection over the
order of floats. Each step ends on a number that occurs, so about ten steps suffice, and 33 always do. If the candidates
do not hold the probability of top_p, or are too many, bisection runs over the whole row; that is rare.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..layout import sampling_rows
from .launch import check_dtype
from .sampling import as_float, as_number, ordered

TEMPERATURE = tl.constexpr(sampling_rows.TEMPERATURE)
TOP_K, TOP_P, MIN_P = (
    tl.constexpr(sampling_rows.TOP_K),
    tl.constexpr(sampling_rows.TOP_P),
    tl.constexpr(sampling_rows.MIN_P),
)
TILE = 2048  # tokens processed at a time, 8 a thread: more would spill registers
CAPACITY = 4096  # most candidates of a row
NUM_LIKELY = 512  # candidates for top_p alone, about; if they do not suffice, the whole row is searched


def thresholds(logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """See `SamplingKernels.thresholds`.

    Sums are in f32, so near top_p rounding may keep one token more or less than the twin does.
    """
    check_dtype(logits)
    num_rows, vocab_size = logits.shape
    least = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    if not num_rows:
        return least
    candidates = torch.empty(num_rows, CAPACITY, dtype=logits.dtype, device=logits.device)
    _thresholds_kernel[(num_rows,)](
        least, candidates, logits, rows, slots, vocab_size, logits.stride(0), rows.stride(0), TILE=TILE,
        CAPACITY=CAPACITY, NUM_LIKELY=NUM_LIKELY, num_warps=8, maxnreg=128, enable_fp_fusion=True,
    )  # fmt: skip
    return least


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _thresholds_kernel(
    least, candidates, logits, rows, slots, vocab_size, logits_row, rows_row,
    TILE: tl.constexpr, CAPACITY: tl.constexpr, NUM_LIKELY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    tl.store(least + row, float("-inf"))
    if slot < 0:
        return
    mine = rows + slot * rows_row
    temperature = as_float(tl.load(mine + TEMPERATURE))
    top_k = tl.minimum(tl.load(mine + TOP_K), vocab_size)
    top_p = as_float(tl.load(mine + TOP_P))
    min_p = as_float(tl.load(mine + MIN_P))
    if temperature == 0:
        return
    if (top_k == 0) & (top_p >= 1) & (min_p == 0):
        return
    whole = logits + row * logits_row
    columns = tl.full([TILE], float("-inf"), tl.float32)
    for start in tl.range(0, vocab_size, TILE, num_stages=3):
        columns = tl.maximum(columns, _numbers(whole, start, vocab_size, TILE))
    best = tl.max(columns, axis=0)
    if (best == float("-inf")) | (best == float("inf")):
        return
    lowest = best * 0 + float("-inf")
    if (top_k > 0) | (top_p < 1):
        lowest = _search(
            whole, candidates + row * CAPACITY, columns, best, 1.0 / temperature, top_k, top_p, vocab_size,
            TILE, CAPACITY, NUM_LIKELY,
        )  # fmt: skip
    if min_p > 0:
        lowest = tl.maximum(lowest, tl.minimum(best + temperature * tl.log(min_p), best))
    tl.store(least + row, lowest)


@triton.jit
def _search(
    whole, few, columns, best, coldness, top_k, top_p, vocab_size,
    TILE: tl.constexpr, CAPACITY: tl.constexpr, NUM_LIKELY: tl.constexpr,
):  # fmt: skip
    """The threshold of top_k and then top_p."""
    bound = _bound(columns, tl.where(top_k > 0, top_k, NUM_LIKELY), best)
    num_near = 0
    mass, mass_near = 0.0, 0.0
    for start in tl.range(0, vocab_size, TILE, num_stages=3):
        x = _numbers(whole, start, vocab_size, TILE)
        weights = tl.exp((x - best) * coldness)
        is_near = x >= bound
        mass += tl.sum(weights, axis=0)
        mass_near += tl.sum(tl.where(is_near, weights, 0.0), axis=0)
        place = num_near + tl.cumsum(is_near.to(tl.int32), axis=0) - 1
        tl.store(few + place, x.to(few.dtype.element_ty), mask=is_near & (place < CAPACITY))
        num_near += tl.sum(is_near.to(tl.int32), axis=0)
    tl.debug_barrier()  # the loads below read numbers that other threads stored
    is_short = (top_k == 0) & (mass_near < top_p * mass)
    if (num_near > CAPACITY) | is_short | (bound == float("-inf")):
        nothing = best * 0 + float("-inf")
        lowest = _among(whole, vocab_size, best, coldness, nothing, top_k, top_p, mass, TILE)
    else:
        lowest = _among(few, num_near, best, coldness, bound, top_k, top_p, mass, TILE)
    return lowest


@triton.jit
def _among(source, size, best, coldness, lowest, top_k, top_p, mass, TILE: tl.constexpr):
    if top_k > 0:
        lowest = _largest_with(source, size, best, coldness, lowest, top_k.to(tl.float32), False, TILE)
        mass = _mass(source, size, lowest, best, coldness, TILE)
    if top_p < 1:
        lowest = _largest_with(source, size, best, coldness, lowest, top_p * mass, True, TILE)
    return lowest


@triton.jit
def _bound(columns, num_wanted, best):
    """A number with between one and two times `num_wanted` columns at or above it, if ties allow.

    -inf if fewer columns hold a number.
    """
    low, high = ordered(best * 0 + float("-inf")).to(tl.int64), ordered(best).to(tl.int64) + 1
    num_low = columns.shape[0] + 0 * num_wanted
    while (num_low > 2 * num_wanted) & (low + 1 < high):
        middle = low + (high - low) // 2
        pivot = as_number(middle.to(tl.int32))
        num_above = tl.sum((columns >= pivot).to(tl.int32), axis=0)
        if num_above >= num_wanted:
            low, num_low = middle, num_above
        else:
            high = middle
    return as_number(low.to(tl.int32))


@triton.jit
def _largest_with(source, size, best, coldness, lowest, wanted, BY_MASS: tl.constexpr, TILE: tl.constexpr):
    """The largest number such that the tokens at or above it, by count or by mass, reach `wanted`.

    The caller guarantees that those at or above `lowest` do.
    """
    low, high = ordered(lowest).to(tl.int64), ordered(best).to(tl.int64) + 1  # those at or above `high` do not reach it
    while low + 1 < high:
        middle = low + (high - low) // 2
        pivot = as_number(middle.to(tl.int32))
        amount = 0.0
        above, below = best, lowest  # the nearest numbers on both sides of the pivot; the pivot itself counts as above
        for start in range(0, size, TILE):
            x = _numbers(source, start, size, TILE)
            is_above = x >= pivot
            if BY_MASS:
                amount += tl.sum(tl.where(is_above, tl.exp((x - best) * coldness), 0.0), axis=0)
            else:
                amount += tl.sum(is_above.to(tl.float32), axis=0)
            above = tl.minimum(above, tl.min(tl.where(is_above, x, float("inf")), axis=0))
            below = tl.maximum(below, tl.max(tl.where(is_above, float("-inf"), x), axis=0))
        if amount >= wanted:
            low = tl.maximum(middle, ordered(above).to(tl.int64))
        else:
            high = tl.minimum(middle, ordered(below).to(tl.int64) + 1)
    return as_number(low.to(tl.int32))


@triton.jit
def _mass(source, size, lowest, best, coldness, TILE: tl.constexpr):
    """The mass of the numbers at or above `lowest`, where the likeliest token has mass 1."""
    amount = 0.0
    for start in range(0, size, TILE):
        x = _numbers(source, start, size, TILE)
        amount += tl.sum(tl.where(x >= lowest, tl.exp((x - best) * coldness), 0.0), axis=0)
    return amount


@triton.jit
def _numbers(source, start, size, TILE: tl.constexpr):
    """A tile of a row, in f32; -inf past the end, and for NaN, whose row is broken and its threshold unused."""
    at = start + tl.arange(0, TILE)
    x = tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))

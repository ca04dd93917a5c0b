"""The Triton kernel that turns top_k, top_p and min_p into one threshold a row. Twin: `reference_sampling.thresholds`.

One program a row and no sort. A first pass over the row keeps the largest number of each of 2,048 columns, that is of
every 2,048th token; k columns have a maximum at or above the k-th largest of them, so k tokens are, and the tokens at
or above it, the candidates, are few more. A second pass gathers them. The threshold is then found among the candidates
by bisection: of the order of floats, in steps that end on numbers that are there, so about ten looks suffice and 33
always do. Where the candidates do not hold the probability that top_p asks for, or are too many, all looks go over the
whole row, which a row rarely needs.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..layout import sampling_rows as asked
from .launch import check_dtype
from .sampling import as_float, as_number, ordered

TEMPERATURE = tl.constexpr(asked.TEMPERATURE)
TOP_K, TOP_P, MIN_P = tl.constexpr(asked.TOP_K), tl.constexpr(asked.TOP_P), tl.constexpr(asked.MIN_P)
TILE = 2048  # tokens that are looked at together, 8 a thread: more would spill registers
CAPACITY = 4096  # candidates a row, at most
NUM_LIKELY = 512  # candidates for top_p alone, about: where they do not suffice, the whole row is searched


def thresholds(logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    """See `reference_sampling.thresholds`. Sums are in f32, so a token whose probability, together with those before
    it, is within rounding of top_p may be kept here and not there."""
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
    """The threshold that top_k and then top_p give."""
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
    tl.debug_barrier()  # what one thread has stored, others read
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
    """A number that between one and two times `num_wanted` of the columns are at or above, if ties allow it; -inf if
    there are not so many columns that hold a number."""
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
    """The largest number such that what is at or above it, in number or in mass, comes to `wanted`. What is at or above
    `lowest` is known to."""
    low, high = ordered(lowest).to(tl.int64), ordered(best).to(tl.int64) + 1  # the latter does not
    while low + 1 < high:
        middle = low + (high - low) // 2
        pivot = as_number(middle.to(tl.int32))
        amount = 0.0
        above, below = best, lowest  # the numbers next to the pivot on both sides, itself above
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
    """Of what is at or above `lowest`; the likeliest token has 1."""
    amount = 0.0
    for start in range(0, size, TILE):
        x = _numbers(source, start, size, TILE)
        amount += tl.sum(tl.where(x >= lowest, tl.exp((x - best) * coldness), 0.0), axis=0)
    return amount


@triton.jit
def _numbers(source, start, size, TILE: tl.constexpr):
    """A tile of a row, in f32; -inf past the end, and for NaN: such a row is broken, and its threshold is not used."""
    at = start + tl.arange(0, TILE)
    x = tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))

"""Triton kernels that choose tokens. Their twins are in `kernels/reference/sampling.py`.

Shapes: logits [L, V], sampling parameters [S, 16] i32, slots and positions [L]; L rows of logits, V tokens in the
vocabulary, S slots, G groups of 128 tokens.

A first launch reduces the logits to groups (`vocab_groups.py`), over the whole device. In a second, one program a row
chooses a group from the table and then a token in the group. So noise is needed for V / 128 + 128 numbers, not V. With
cuts (top_k, top_p, min_p and so on), the second reads the few groups that hold the kept tokens, and takes the masses of
the draw from these. The choice for a row depends on its row alone.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..layout import sampling_rows
from ..reference.sampling import GROUP_NOISE as _GROUP_NOISE
from .launch import early_launch, next_power_of_2, start_early
from .thresholds import LISTED, NUM_CANDIDATES, has_cuts, kept, listed
from .vocab_groups import GROUP, LN_2, NO_ID, as_float, coldness_of, exp2, group_tables, log2, num_groups_of

TEMPERATURE = tl.constexpr(sampling_rows.TEMPERATURE)
SEED_LOW, SEED_HIGH = tl.constexpr(sampling_rows.SEED_LOW), tl.constexpr(sampling_rows.SEED_HIGH)
GROUP_NOISE = tl.constexpr(_GROUP_NOISE)
SERIES_END = tl.constexpr(1 / 32)  # as in the twin


def choose(logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """See `SamplingKernels.choose`."""
    return _chosen(logits, rows, slots, positions, None)


def choose_truncated(logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """See `SamplingKernels.choose_truncated`.

    Sums are in f32, so near top_p rounding may keep one token more or less than the twin does.
    """
    bounds = torch.empty(len(logits), 2, dtype=torch.float32, device=logits.device)
    return _chosen(logits, rows, slots, positions, bounds), bounds


def _chosen(logits: Tensor, rows: Tensor, slots: Tensor, positions: Tensor, bounds: Tensor | None) -> Tensor:
    num_rows, vocab_size = logits.shape
    num_groups = num_groups_of(logits)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return token_ids
    tables = group_tables(logits, rows, slots)
    if bounds is None:
        _choose_kernel[(num_rows,)](
            token_ids, None, None, None, tables, logits, rows, slots, positions, vocab_size, logits.stride(0),
            rows.stride(0), num_groups, 0, 0, 0, num_warps=4, enable_fp_fusion=True, **early_launch(logits.device),
        )  # fmt: skip
        return token_ids
    lists = torch.empty(num_rows, num_groups, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(num_rows, NUM_CANDIDATES, dtype=torch.float32, device=logits.device)
    _choose_kernel[(num_rows,)](
        token_ids, bounds, lists, candidates, tables, logits, rows, slots, positions, vocab_size, logits.stride(0),
        rows.stride(0), num_groups, BLOCK=next_power_of_2(num_groups), LISTED=LISTED, NUM_CANDIDATES=NUM_CANDIDATES,
        num_warps=8, maxnreg=128, enable_fp_fusion=True, **early_launch(logits.device),
    )  # fmt: skip
    return token_ids


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def _choose_kernel(
    token_ids, bounds, lists, candidates, tables, logits, rows, slots, positions,
    vocab_size, logits_row, rows_row, num_groups,
    BLOCK: tl.constexpr, LISTED: tl.constexpr, NUM_CANDIDATES: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """The token of a row, and with `bounds` the least and the largest logit that its cuts keep."""
    start_early(IS_EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if bounds is not None:
        tl.store(bounds + 2 * row, float("-inf"))
        tl.store(bounds + 2 * row + 1, float("inf"))
    if slot < 0:
        tl.store(token_ids + row, 0)
        return
    maxima = tables + row * 2 * num_groups
    best, group, is_whole = _likeliest(maxima, num_groups)
    if is_whole == 0:
        tl.store(token_ids + row, -1)
        return
    mine = rows + slot * rows_row
    whole = logits + row * logits_row
    temperature = as_float(tl.load(mine + TEMPERATURE))
    coldness = coldness_of(temperature)
    low = tl.load(mine + SEED_LOW).to(tl.int64) & 0xFFFFFFFF
    seed = (tl.load(mine + SEED_HIGH).to(tl.int64) << 32) | low
    position = tl.load(positions + row).to(tl.int32)
    bound, most = best * 0 + float("-inf"), best * 0 + float("inf")
    if temperature > 0:
        is_cut = False
        if bounds is not None:
            is_cut = has_cuts(mine)
            if is_cut:
                mine_listed = lists + row * num_groups
                bound, most, num_listed = kept(
                    whole, maxima, mine_listed, candidates + row * NUM_CANDIDATES, mine, best, temperature, coldness,
                    vocab_size, num_groups, BLOCK, LISTED, NUM_CANDIDATES,
                )  # fmt: skip
                tl.store(bounds + 2 * row, bound)
                tl.store(bounds + 2 * row + 1, most)
                group = _drawn_of_listed(
                    whole, mine_listed, num_listed, bound, most, best, coldness, group, seed, position, vocab_size,
                    LISTED,
                )  # fmt: skip
        if is_cut == 0:
            group = _drawn_group(maxima, num_groups, best, coldness, group, seed, position)
    token = group * GROUP + tl.arange(0, GROUP)
    x = tl.load(whole + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    if temperature > 0:
        x = tl.where((x < bound) | (x > most), float("-inf"), (x - best) * coldness + _noise(seed, position, token, 0))
    largest = tl.max(x, axis=0)
    tl.store(token_ids + row, tl.min(tl.where(x == largest, token, NO_ID), axis=0).to(tl.int64))


@triton.jit
def _likeliest(maxima, num_groups):
    """A row's largest logit, the first group that holds it, and whether the row has a finite maximum and no NaN."""
    best = tl.full([4 * GROUP], float("-inf"), tl.float32)
    best_group = tl.zeros([4 * GROUP], tl.int32)
    is_broken = tl.zeros([4 * GROUP], tl.int32)
    for start in range(0, num_groups, 4 * GROUP):
        group = start + tl.arange(0, 4 * GROUP)
        largest = tl.load(maxima + group, mask=group < num_groups, other=float("-inf"))
        amount = tl.load(maxima + num_groups + group, mask=group < num_groups, other=0.0)
        is_broken |= ((amount != amount) | (largest == float("inf"))).to(tl.int32)
        is_better = largest > best
        best = tl.where(is_better, largest, best)
        best_group = tl.where(is_better, group, best_group)
    largest = tl.max(best, axis=0)
    first = tl.min(tl.where(best == largest, best_group, NO_ID), axis=0)
    is_whole = (tl.max(is_broken, axis=0) == 0) & (largest > float("-inf"))
    return largest, first, is_whole


# ---- drawing a group ------------------------------------------------------------------------------------------------


@triton.jit
def _drawn_group(maxima, num_groups, best, coldness, likeliest, seed, position):
    """A group, drawn by the probability of its tokens together."""
    lane = tl.arange(0, GROUP)
    score = tl.full([GROUP], float("-inf"), tl.float32)
    drawn = tl.zeros([GROUP], tl.int32) + likeliest
    for start in range(0, num_groups, 4 * GROUP):
        r0, r1, r2, r3 = _random(seed, position, start // 4 + lane, GROUP_NOISE)
        group = start + lane
        score, drawn = _better(score, drawn, maxima, group, num_groups, best, coldness, r0)
        score, drawn = _better(score, drawn, maxima, group + GROUP, num_groups, best, coldness, r1)
        score, drawn = _better(score, drawn, maxima, group + 2 * GROUP, num_groups, best, coldness, r2)
        score, drawn = _better(score, drawn, maxima, group + 3 * GROUP, num_groups, best, coldness, r3)
    return tl.min(tl.where(score == tl.max(score, axis=0), drawn, NO_ID), axis=0)


@triton.jit
def _better(score, drawn, maxima, group, num_groups, best, coldness, bits):
    largest = tl.load(maxima + group, mask=group < num_groups, other=float("-inf"))
    amount = tl.load(maxima + num_groups + group, mask=group < num_groups, other=0.0)
    new = (largest - best) * coldness + log2(amount) + _gumbel(bits)
    is_better = new > score
    return tl.where(is_better, new, score), tl.where(is_better, group, drawn)


@triton.jit
def _drawn_of_listed(
    whole, lists, num_listed, bound, most, best, coldness, likeliest, seed, position, vocab_size, LISTED: tl.constexpr
):
    """As `_drawn_group`, of the tokens from `bound` to `most`; their groups are listed, in ascending order."""
    score, drawn = best * 0 + float("-inf"), likeliest
    for start in range(0, num_listed, LISTED):
        x, group, is_listed = listed(whole, lists, start, num_listed, vocab_size, LISTED)
        amount = tl.sum(tl.where((x < bound) | (x > most), 0.0, exp2((x - best) * coldness)), axis=1)
        new = log2(amount) + _noise(seed, position, group, GROUP_NOISE)
        new = tl.where(is_listed, new, float("-inf"))
        largest = tl.max(new, axis=0)
        first = tl.min(tl.where(new == largest, group, NO_ID), axis=0)
        drawn = tl.where(largest > score, first, drawn)
        score = tl.maximum(largest, score)
    return drawn


# ---- noise ----------------------------------------------------------------------------------------------------------


@triton.jit
def _noise(seed, position, index, LEVEL: tl.constexpr):
    """Gumbel noise in units of log2, of the tokens or groups `index`; see `gumbel` in the twin."""
    r0, r1, r2, r3 = _random(seed, position, index // (4 * GROUP) * GROUP + index % GROUP, LEVEL)
    which = index // GROUP % 4
    return _gumbel(tl.where(which == 0, r0, tl.where(which == 1, r1, tl.where(which == 2, r2, r3))))


@triton.jit
def _random(seed, position, call, LEVEL: tl.constexpr):
    nothing = call * 0
    return tl.philox(seed, call, nothing + position, nothing + LEVEL, nothing)


@triton.jit
def _gumbel(bits):
    """-log2(-log(1 - w)), w in (0, 1) from 32 random bits. Exact for small w, from which the largest noise comes."""
    w = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5)))))
    return -log2(tl.where(w < SERIES_END, series, -LN_2 * log2(1 - w)))

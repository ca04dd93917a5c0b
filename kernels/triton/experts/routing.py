"""The Triton kernel of routing: the experts of each token, and their weights. `launches.py` launches it.

Its twin is `kernels/reference/experts.py`. Experts are lanes of a row: run g of experts, padded to a power of two,
begins at lane g * SIZE_LANES. The largest are found one after another, each by one maximum of 64-bit keys: the number
in an order of whole numbers, and below it the lanes backwards, so of equals the lower expert is found first.

Of few tokens one program routes all, and lists their pairs by expert in the same launch.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import start_early
from .lists import list_few

NEVER = tl.constexpr(-(1 << 63))  # a key below all others


@triton.jit(do_not_specialize=["num_tokens"])
def route_kernel(
    ids, shares, logits, choice_bias, scales, order, tiles, num_tiles, num_tokens, logits_row, eps, least, scale,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, TOP_K: tl.constexpr, KEPT: tl.constexpr, GROUP_SCORE: tl.constexpr,
    SCORE: tl.constexpr, IS_AFTER: tl.constexpr, IS_NORMED: tl.constexpr, BY_LOGITS: tl.constexpr,
    GROUP_LANES: tl.constexpr, SIZE_LANES: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr,
    LISTED: tl.constexpr, TILE_ROWS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS tokens a program. LISTED: 0, or a power of two with room for all pairs, which are then listed, too."""
    start_early(IS_EARLY)
    LANES: tl.constexpr = GROUP_LANES * SIZE_LANES
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_token = token < num_tokens
    lane = tl.arange(0, LANES)
    expert = lane // SIZE_LANES * SIZE + lane % SIZE_LANES
    is_expert = (lane % SIZE_LANES < SIZE) & (lane // SIZE_LANES < GROUPS)
    place = logits + token.to(tl.int64)[:, None] * logits_row + expert[None, :]
    numbers = tl.load(place, mask=is_token[:, None] & is_expert[None, :], other=0.0)
    if IS_AFTER:
        scores = numbers
    elif SCORE == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-numbers))
    else:
        largest = tl.max(tl.where(is_expert[None, :], numbers, float("-inf")), axis=1)
        powers = tl.where(is_expert[None, :], tl.exp(numbers - largest[:, None]), 0.0)
        scores = powers / tl.sum(powers, axis=1)[:, None]
    choice = numbers if BY_LOGITS else scores
    if choice_bias is not None:
        choice += tl.load(choice_bias + expert, mask=is_expert, other=0.0)[None, :]
    if GROUPS > 1:
        is_kept = _kept_groups(
            choice, is_expert, GROUPS, SIZE, KEPT, GROUP_SCORE, GROUP_LANES, SIZE_LANES, ROWS
        )  # fmt: skip
        choice = tl.where(is_kept, choice, float("-inf"))
    keys = tl.where(is_expert[None, :], _keys(choice, lane[None, :], LANES), NEVER)
    rank = tl.arange(0, RANKS)[None, :]
    chosen = tl.zeros([ROWS, RANKS], tl.int32)
    weights = tl.zeros([ROWS, RANKS], tl.float32)
    for turn in range(TOP_K):
        best = tl.max(keys, axis=1)
        best_lane = LANES - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        is_best = lane[None, :] == best_lane[:, None]
        keys = tl.where(is_best, NEVER, keys)
        best_expert = best_lane // SIZE_LANES * SIZE + best_lane % SIZE_LANES
        chosen = tl.where(rank == turn, best_expert[:, None], chosen)
        weights = tl.where(rank == turn, tl.sum(tl.where(is_best, scores, 0.0), axis=1)[:, None], weights)
    is_rank = rank < TOP_K
    if IS_AFTER:
        weights = tl.where(is_rank, weights, float("-inf"))
        weights = tl.exp(weights - tl.max(weights, axis=1)[:, None])
        weights = weights / tl.sum(weights, axis=1)[:, None]
    elif IS_NORMED:
        total = tl.sum(weights, axis=1) + eps
        weights = weights / tl.where(total < least, least, total)[:, None]  # NaN stays
    weights *= scale
    is_pair = is_token[:, None] & is_rank
    if scales is not None:
        weights *= tl.load(scales + chosen, mask=is_pair, other=0.0)
    pair = token[:, None] * TOP_K + rank
    tl.store(ids + pair, chosen, mask=is_pair)
    tl.store(shares + pair, weights, mask=is_pair)
    if LISTED > 0:
        tl.debug_barrier()  # all threads have stored what others read
        list_few(ids, order, tiles, num_tiles, num_tokens * TOP_K, LISTED, TILE_ROWS)


@triton.jit
def _keys(numbers, lane, LANES: tl.constexpr):
    """Numbers in f32 as whole numbers in the same order, NaN the largest, above the lanes backwards."""
    bits = tl.where(numbers == 0.0, 0.0, numbers).to(tl.int32, bitcast=True)  # without a negative zero
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(numbers == numbers, ordered, 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (LANES - 1 - lane).to(tl.int64)


@triton.jit
def _kept_groups(
    choice, is_expert, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEPT: tl.constexpr, GROUP_SCORE: tl.constexpr,
    GROUP_LANES: tl.constexpr, SIZE_LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Which lanes [ROWS, LANES] are of the KEPT best groups: by the largest number, or the sum of the two largest."""
    inside = tl.arange(0, SIZE_LANES)[None, None, :]
    group = tl.arange(0, GROUP_LANES)[None, :]
    numbers = tl.reshape(tl.where(is_expert[None, :], choice, float("-inf")), [ROWS, GROUP_LANES, SIZE_LANES])
    keys = tl.where(inside < SIZE, _keys(numbers, inside, SIZE_LANES), NEVER)
    best = tl.max(keys, axis=2)
    is_best = inside == (SIZE_LANES - 1 - (best & 0x7FFFFFFF).to(tl.int32))[:, :, None]
    score = tl.sum(tl.where(is_best, numbers, 0.0), axis=2)
    if GROUP_SCORE == "top2" and SIZE > 1:
        second = tl.max(tl.where(is_best, NEVER, keys), axis=2)
        is_second = inside == (SIZE_LANES - 1 - (second & 0x7FFFFFFF).to(tl.int32))[:, :, None]
        score += tl.sum(tl.where(is_second, numbers, 0.0), axis=2)
    group_keys = tl.where(group < GROUPS, _keys(score, group, GROUP_LANES), NEVER)
    is_kept = tl.zeros([ROWS, GROUP_LANES], tl.int32)
    for _ in range(KEPT):
        most = tl.max(group_keys, axis=1)
        is_most = group == (GROUP_LANES - 1 - (most & 0x7FFFFFFF).to(tl.int32))[:, None]
        is_kept = tl.where(is_most, 1, is_kept)
        group_keys = tl.where(is_most, NEVER, group_keys)
    spread = is_kept[:, :, None] + tl.zeros([ROWS, GROUP_LANES, SIZE_LANES], tl.int32)
    return tl.reshape(spread, [ROWS, GROUP_LANES * SIZE_LANES]) > 0

"""One tile of attention: its block ids, keys and values, scores, and a step of the online softmax.

Softmax is in base 2 with log2(e) folded into the scale, since exp2 is one instruction. The scale multiplies within it,
and so must be positive. The scales of an 8-bit cache are folded in too: those of keys into the scale, those of values
into the result. Its numbers are computed with in f16, which holds e4m3 exactly: one instruction widens two of them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
BASE_2 = tl.constexpr(LOG2_E)
LARGEST_F16 = tl.constexpr(65504.0)


@triton.jit
def block_ids(table, token, oldest, end, B: tl.constexpr):
    """The blocks [N] of tokens; 0, with no table entry read, for those not in [oldest, end)."""
    return tl.load(table + token // B, mask=(token < end) & (token >= oldest), other=0)


@triton.jit
def load_tile(
    block, k_head, v_head, token, is_token, d, kc_n, kc_b, kc_d, vc_n, vc_b, vc_d, like,
    B: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, IS_LATENT: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Keys and values [N, D] of tokens in those blocks, in the type of `like`; zero where not `is_token`.

    With `IS_LATENT` keys are values, and loaded once.
    """
    block = block.to(tl.int64)  # an offset may exceed 2^31 elements
    offset = token % B
    k_place = k_head + (block * kc_n + offset * kc_b)[:, None] + (d * kc_d)[None, :]
    v_place = v_head + (block * vc_n + offset * vc_b)[:, None] + (d * vc_d)[None, :]
    if IS_MASKED:
        is_element = is_token[:, None] & (d < D)[None, :]
        keys = tl.load(k_place, mask=is_element, other=0.0)
        values = keys if IS_LATENT else tl.load(v_place, mask=is_element, other=0.0)
    elif D < BLOCK_D:
        keys = tl.load(k_place, mask=(d < D)[None, :], other=0.0)
        values = keys if IS_LATENT else tl.load(v_place, mask=(d < D)[None, :], other=0.0)
    else:
        keys = tl.load(k_place)
        values = keys if IS_LATENT else tl.load(v_place)
    return keys.to(like.dtype), values.to(like.dtype)


@triton.jit
def load_extra(
    block, k_head, token, is_token, kc_n, kc_b, kc_d, like,
    B: tl.constexpr, D: tl.constexpr, EXTRA: tl.constexpr, BLOCK_E: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """The numbers [N, E] of keys behind the first D, as `load_tile`."""
    e = tl.arange(0, BLOCK_E)
    place = k_head + (block.to(tl.int64) * kc_n + token % B * kc_b)[:, None] + ((D + e) * kc_d)[None, :]
    if IS_MASKED:
        return tl.load(place, mask=is_token[:, None] & (e < EXTRA)[None, :], other=0.0).to(like.dtype)
    return tl.load(place, mask=(e < EXTRA)[None, :], other=0.0).to(like.dtype)


@triton.jit
def to_f16(queries):
    """Queries in f16, those beyond its range at its ends; NaN stays."""
    if queries.dtype == tl.bfloat16:
        queries = tl.minimum(queries.to(tl.float32), LARGEST_F16, propagate_nan=tl.PropagateNan.ALL)
        queries = tl.maximum(queries, -LARGEST_F16, propagate_nan=tl.PropagateNan.ALL)
    return queries.to(tl.float16)


@triton.jit
def scores_of(
    queries, keys, extra, extra_keys, factor, cap,
    HAS_EXTRA: tl.constexpr, HAS_CAP: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[M, D] @ [D, N] -> [M, N]; scores in base 2 if `IS_SCALED`, with a cap, cap * tanh(score / cap).

    With `HAS_EXTRA`, [M, E] @ [E, N] is added: the part of queries and keys behind that which are values, too.
    """
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    if HAS_EXTRA:
        scores = tl.dot(extra, tl.trans(extra_keys), scores, input_precision=PRECISION)
    if IS_SCALED:
        scores *= factor
    if HAS_CAP:
        scores = cap - 2 * cap / (tl.exp2(scores) + 1)
    return scores


@triton.jit
def with_alibi(scores, slopes, token, position):
    """Scores [M, N], less what slopes [M] in base 2 take off for the distance of a token."""
    return scores + slopes[:, None] * (token[None, :] - position[:, None]).to(tl.float32)


@triton.jit
def add_tile(acc, best, total, scores, values, unit, CAN_BE_EMPTY: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax: adds a tile's scores [M, N] x unit, and values [N, D], to (acc, best, total)."""
    new_best = tl.maximum(best, tl.max(scores, axis=1) * unit)
    base = new_best
    if CAN_BE_EMPTY:  # for a row without any token so far, -inf - -inf would be NaN
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores * unit - base[:, None])  # one FMA
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, axis=1)
    # [M, N] @ [N, D] -> [M, D]
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_best, total

"""Triton kernels of attention over a paged cache. Their twins are in `kernels/reference/attention.py`.

Shapes: q [T or S, H, D], a layer's cache [N, G, B, D], block tables [S, M]; T new tokens, S sequences, H query heads,
G key/value heads, D head size, N blocks of B tokens. In the kernels [M, N] is a tile of query rows x cached tokens.

One persistent kernel walks a work list (`kernels/layout/work_lists.py`). Each program does its own items, one after
another, so the grid is the same for any lengths and launches can be captured in a CUDA graph. An item's rows are, in
*decode*, the query heads of one key/value head; in *extend*, several new tokens x those heads. The program that ends
the last item of a task that was cut joins its partial sums, always in the order of tiles: the same bits each time.

Block ids are read one tile ahead and carried through the loop. Loads of keys and values through an id that the same
iteration reads would not be pipelined: each tile would wait a whole memory latency.

Softmax is in base 2 with log2(e) folded into the scale, since exp2 is one instruction. The scale multiplies within it,
and so must be positive. The scales of an 8-bit cache are folded in too: those of keys into the scale, those of values
into the result. Its numbers are computed with in f16, which holds e4m3 exactly: one instruction widens two of them.

With a folded prologue (`folded_prologue.py`) `q` is the projection: each item of decode norms and rotates its own
queries. The item with the last tile does so with the new key, writes it and the new value into the cache, and begins
its softmax with them; its loop reads only what earlier steps wrote.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..layout.work_lists import AttentionPlan, AttentionShape, WorkItem, WorkList, next_power_of_2, weights_size
from .attention_plan import plan_attention
from .folded_prologue import FoldedPrologue, kernel_arguments, new_token, rotation, turned_tile
from .launch import capability, check_dtype, early_launch, start_early

LOG2_E = 1.4426950408889634
BASE_2 = tl.constexpr(LOG2_E)
LARGEST_F16 = tl.constexpr(65504.0)
INDEX_TENSORS = ["items", "starts", "block_tables", "positions", "slot_mapping"]
MERGED_ELEMENTS = {"decode": 512, "extend": 256}  # partial sums that a warp joins at a time: more spill registers


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    *,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    chunk: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """See `KernelSet.paged_decode`."""
    check_types(q, k_cache, k_scale)
    plan = (plan or plan_attention(shape_of(q, k_cache, window), lengths, None, len(q))).ready()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attend(
        out, plan.decode[window], plan.partials, q, k_cache, v_cache, block_tables, scale, window,
        soft_cap, k_scale, v_scale, sinks, alibi, chunk,
    )  # fmt: skip
    return out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
    *,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    chunk: int | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """See `KernelSet.paged_attention`. Many sequences of one new token have a list and a tile size of their own."""
    check_types(q, k_cache, k_scale)
    plan = (plan or plan_attention(shape_of(q, k_cache, window), lengths, query_starts, len(q))).ready()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for lists in filter(None, (plan.decode, plan.extend)):
        attend(
            out, lists[window], plan.partials, q, k_cache, v_cache, block_tables, scale, window,
            soft_cap, k_scale, v_scale, sinks, alibi, chunk,
        )  # fmt: skip
    return out


def shape_of(q: Tensor, k_cache: Tensor, window: int | None) -> AttentionShape:
    """The attention shape of a call without a plan: of a model whose layers all have this window."""
    return AttentionShape(q.shape[1], k_cache.shape[1], q.shape[2], q.dtype, k_cache.dtype, (window,))


def check_types(q: Tensor, k_cache: Tensor, k_scale: Tensor | None) -> None:
    """Raises TypeError for types that the kernels do not support on this device."""
    check_dtype(q)
    if k_cache.dtype != q.dtype and k_cache.dtype != torch.float8_e4m3fn:
        raise TypeError(f"a cache of {k_cache.dtype} and queries of {q.dtype}: keep the cache in that or float8_e4m3fn")
    if k_cache.dtype == torch.float8_e4m3fn and capability(q.device) < 89:
        raise TypeError("a cache in float8_e4m3fn needs compute capability 8.9 or later; use kv_cache_dtype = auto")


def attend(
    out: Tensor,
    work: WorkList,
    partials: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    chunk: int | None = None,
    folded: FoldedPrologue | None = None,
) -> None:
    """Does the items of one work list: writes their rows of `out` [T, H, D]. Overwrites `partials` (f32).

    With a `folded` prologue, of decode alone, q is the projection [T, H + 2G, D].
    """
    division, tiling = work.division, work.tiling
    if not scale > 0:  # the largest product has to be the largest score
        raise ValueError(f"scale = {scale:g}: the Triton kernels take a scale of scores above 0; use the torch kernels")
    if not division.max_tasks:
        return
    _, num_heads, head_dim = out.shape
    num_groups, block_size = k_cache.shape[1:3]
    group = num_heads // num_groups
    block_d = max(16, next_power_of_2(head_dim))
    rows = division.tokens_per_tile * group
    weights = partials  # [partials, rows, 2]: the maximum and the sum of weights
    sums = partials[weights_size(division, rows) :]  # [partials, rows, D]
    merged = MERGED_ELEMENTS[division.kind] * tiling.num_warps
    block_r = min(next_power_of_2(rows), max(1, merged // (4 * block_d)))
    # tanh(x) = 1 - 2 / (exp(2 x) + 1), so a soft cap needs exp2 of the score times this.
    factor = scale * LOG2_E if soft_cap is None else scale * 2 * LOG2_E / soft_cap
    _attention_kernel[(division.num_programs,)](
        out, sums, weights, work.arrivals, work.items, work.starts, q, k_cache, v_cache, block_tables,
        q if k_scale is None else k_scale, q if v_scale is None else v_scale, sinks, alibi,
        factor, window or 0, chunk or 0, (soft_cap or 0.0) * LOG2_E, num_heads, q.stride(0), q.stride(1),
        *k_cache.stride(), *v_cache.stride(), block_tables.stride(0),
        GROUP=group, TOKENS=division.tokens_per_tile, IS_DECODE=division.kind == "decode", ITEM=len(WorkItem),
        B=block_size, D=head_dim, BLOCK_D=block_d, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
        HAS_WINDOW=window is not None, HAS_CHUNK=chunk is not None, HAS_CAP=soft_cap is not None,
        HAS_K_SCALE=k_scale is not None, HAS_V_SCALE=v_scale is not None,
        IS_NARROW=k_cache.dtype == torch.float8_e4m3fn and q.dtype != torch.float32,
        **kernel_arguments(folded, q.dtype),
        BLOCK_R=block_r, BLOCK_P=max(1, merged // (block_r * block_d)),
        PRECISION=_precision(q.dtype), STAGES=tiling.num_stages, num_warps=tiling.num_warps,
        maxnreg=tiling.max_registers, enable_fp_fusion=True, **early_launch(q.device),
    )  # fmt: skip


def _precision(dtype: torch.dtype) -> str:
    """The precision of dots: full f32 for f32 inputs, as tf32 would round them to 10 bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


# Index tensors may be slices of one buffer, and the table may have any width: neither may cause a recompilation.
@triton.jit(do_not_specialize=["window", "chunk", "table_row"], do_not_specialize_on_alignment=INDEX_TENSORS)
def _attention_kernel(
    out, sums, weights, arrivals, items, starts, q, k_cache, v_cache, block_tables, k_scale, v_scale, sinks, alibi,
    scale, window, chunk, cap, num_heads, q_row, q_head, kc_n, kc_g, kc_b, kc_d, vc_n, vc_g, vc_b, vc_d, table_row,
    q_norm, k_norm, cos, sin, positions, slot_mapping, eps, cos_row, sin_row,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, IS_DECODE: tl.constexpr, ITEM: tl.constexpr,
    B: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CHUNK: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_K_SCALE: tl.constexpr, HAS_V_SCALE: tl.constexpr, IS_NARROW: tl.constexpr,
    IS_FOLDED: tl.constexpr, IS_NORMED: tl.constexpr, IS_ROUNDED: tl.constexpr, HAS_HEAD_WEIGHTS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """Does the items of one program: up to TOKENS new tokens of a sequence, all heads of a group, a range of tiles."""
    start_early(IS_EARLY)
    row = tl.arange(0, BLOCK_M)
    new = row // GROUP  # [M] which new token
    d = tl.arange(0, BLOCK_D)
    first_item = tl.load(starts + tl.program_id(0))
    end_item = tl.load(starts + tl.program_id(0) + 1)
    for index in range(first_item, end_item):
        item = items + index * ITEM
        sequence = tl.load(item).to(tl.int64)
        first_row = tl.load(item + 1)
        g = tl.load(item + 2).to(tl.int64)
        first_tile = tl.load(item + 3)
        end_tile = tl.load(item + 4)
        partial = tl.load(item + 5)
        first_position = tl.load(item + 6)
        num_tokens = tl.load(item + 7)

        head = g * GROUP + row % GROUP  # [M]
        is_row = (new < num_tokens)[:, None] & (d < D)[None, :]
        query = (first_row + new).to(tl.int64)
        if IS_FOLDED:
            token_place = q + first_row.to(tl.int64) * q_row
            angle = tl.load(positions + first_row)
            # NOTE: 0, as is not known to the compiler, which else keeps what is computed of `d` alone in registers that
            # the loop over tokens needs.
            zero = tl.multiple_of(tl.minimum(end_tile, 0), 16)
            number = d[None, :] + zero
            cosines, sines = rotation(cos, sin, angle, number, cos_row, sin_row, HALF, BLOCK_D)
            queries = turned_tile(
                token_place + head[:, None] * q_head, head[:, None], number, is_row, q_norm, cosines, sines, eps,
                D, HALF, BLOCK_D, IS_NORMED, IS_ROUNDED, HAS_HEAD_WEIGHTS,
            )  # fmt: skip
        else:
            queries = tl.load(q + query[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=is_row, other=0.0)
        if IS_NARROW:
            queries = _to_f16(queries)
        factor = scale
        if HAS_K_SCALE:
            factor = scale * tl.load(k_scale + g)

        # [M] position of each row's token; rows without a token repeat the last one and are not stored.
        position = first_position + tl.minimum(new, num_tokens - 1)
        end = first_position + num_tokens  # tokens that the last row sees; no row sees more
        if IS_FOLDED:
            end = first_position  # the new one is none of the loop's
        oldest = tl.maximum(first_position + 1 - window, 0) if HAS_WINDOW else 0
        if HAS_CHUNK:  # lists have the tiles before it as well
            oldest = tl.maximum(first_position // chunk * chunk, oldest)
            first_tile = tl.maximum(oldest // BLOCK_N, first_tile)
        slopes = tl.load(alibi + head) * BASE_2 if alibi is not None else None
        best = tl.full([BLOCK_M], float("-inf"), tl.float32)  # largest score so far
        total = tl.zeros([BLOCK_M], tl.float32)  # sum of weights so far
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        table = block_tables + sequence * table_row
        k_head = k_cache + g * kc_g
        v_head = v_cache + g * vc_g
        column = tl.arange(0, BLOCK_N)
        IS_SCALED: tl.constexpr = HAS_CAP or alibi is not None  # before the exponent, as a cap or a bias comes after
        unit = 1.0 if IS_SCALED else factor
        if IS_FOLDED:  # noqa: SIM102  the inner one is of the device
            if (first_position >= 0) & (end_tile * BLOCK_N > first_position):
                is_d = number < D
                slot = tl.load(slot_mapping + first_row)
                cosines, sines = rotation(cos, sin, angle, number, cos_row, sin_row, HALF, BLOCK_D)
                key = turned_tile(
                    token_place + (num_heads + g) * q_head, g, number, is_d, k_norm, cosines, sines, eps,
                    D, HALF, BLOCK_D, IS_NORMED, IS_ROUNDED, HAS_HEAD_WEIGHTS,
                )  # fmt: skip
                value = token_place + (num_heads + num_heads // GROUP + g) * q_head + number
                key, value = new_token(
                    key, tl.load(value, mask=is_d, other=0.0),
                    k_head + slot // B * kc_n + slot % B * kc_b, v_head + slot // B * vc_n + slot % B * vc_b,
                    tl.load(k_scale + g) if HAS_K_SCALE else 1.0, tl.load(v_scale + g) if HAS_V_SCALE else 1.0,
                    slot >= 0, number, is_d, kc_d, vc_d, BLOCK_D, HAS_K_SCALE,
                )  # fmt: skip
                score = tl.sum(queries.to(tl.float32) * key.to(queries.dtype).to(tl.float32), axis=1)
                if IS_SCALED:
                    score *= factor
                if HAS_CAP:
                    score = cap - 2 * cap / (tl.exp2(score) + 1)
                best = score * unit
                total += 1.0
                acc += value.to(tl.float32)
        first_masked = first_tile
        if not (IS_DECODE or HAS_WINDOW or HAS_CHUNK):  # tiles that every row sees in full
            first_masked = tl.minimum(tl.maximum((first_position + 1) // BLOCK_N, first_tile), end_tile)
            block = _block_ids(table, first_tile * BLOCK_N + column, 0, end, B)
            for tile in tl.range(first_tile, first_masked, num_stages=STAGES):
                token = tile * BLOCK_N + column
                keys, values = _load_tile(
                    block, k_head, v_head, token, token < end, d, kc_n, kc_b, kc_d, vc_n, vc_b, vc_d,
                    queries, B, D, BLOCK_D, False,
                )  # fmt: skip
                block = _block_ids(table, token + BLOCK_N, 0, end, B)
                scores = _scores(queries, keys, factor, cap, HAS_CAP, IS_SCALED, PRECISION)
                if alibi is not None:
                    scores = _with_alibi(scores, slopes, token, position)
                acc, best, total = _add_tile(acc, best, total, scores, values, unit, False, PRECISION)
        block = _block_ids(table, first_masked * BLOCK_N + column, oldest, end, B)
        for tile in tl.range(first_masked, end_tile, num_stages=STAGES):
            token = tile * BLOCK_N + column
            keys, values = _load_tile(
                block, k_head, v_head, token, (token < end) & (token >= oldest), d, kc_n, kc_b, kc_d, vc_n, vc_b, vc_d,
                queries, B, D, BLOCK_D, True,
            )  # fmt: skip
            block = _block_ids(table, token + BLOCK_N, oldest, end, B)
            scores = _scores(queries, keys, factor, cap, HAS_CAP, IS_SCALED, PRECISION)
            if alibi is not None:
                scores = _with_alibi(scores, slopes, token, position)
            is_seen = token[None, :] < end if IS_FOLDED else token[None, :] <= position[:, None]
            if HAS_WINDOW:
                is_seen &= token[None, :] > position[:, None] - window
            if HAS_CHUNK:
                is_seen &= token[None, :] >= (position // chunk * chunk)[:, None]
            scores = tl.where(is_seen, scores, float("-inf"))
            # A decode row sees a token of each of its tiles; an early row of an extend tile may see none.
            acc, best, total = _add_tile(acc, best, total, scores, values, unit, not IS_DECODE, PRECISION)

        if HAS_V_SCALE:
            acc *= tl.load(v_scale + g)
        if partial < 0:
            if sinks is not None:  # in the sum once: pieces get it in the merge
                total += tl.exp2(tl.load(sinks + head) * BASE_2 - best)  # infinite if nothing else is in it
            result = acc / tl.where(total > 0, total, 1.0)[:, None]  # a padding row has no weights: zeros
            place = out + (query[:, None] * num_heads + head[:, None]) * D + d[None, :]
            tl.store(place, result.to(out.dtype.element_ty), mask=is_row)
        else:
            piece = partial.to(tl.int64) * (TOKENS * GROUP) + row
            tl.store(sums + piece[:, None] * D + d[None, :], acc, mask=is_row)
            tl.store(weights + piece * 2, best, mask=new < num_tokens)
            tl.store(weights + piece * 2 + 1, total, mask=new < num_tokens)
            tl.debug_barrier()  # all threads have stored before one of them says so
            first_partial = tl.load(item + 8)
            num_pieces = tl.load(item + 9)
            num_ended = tl.atomic_add(arrivals + first_partial, 1, sem="acq_rel", scope="gpu") + 1
            if num_ended % num_pieces == 0:  # of this layer: each layer adds as many
                for first in range(0, num_tokens * GROUP, BLOCK_R):
                    _merge(
                        out, sums, weights, sinks, first_partial, num_pieces, first_row, num_tokens, g, first,
                        num_heads, GROUP, TOKENS * GROUP, D, BLOCK_D, BLOCK_R, BLOCK_P,
                    )  # fmt: skip


@triton.jit
def _merge(
    out, sums, weights, sinks, first_partial, num_pieces, first_row, num_tokens, g, first, num_heads,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Joins the partial sums of the rows [first, first + BLOCK_R) of a task, and writes their result.

    Reads past the L1 cache, which does not see what other multiprocessors wrote.
    """
    row = first + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    is_row = row < num_tokens * GROUP
    head = g * GROUP + row % GROUP
    best = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    if sinks is not None:  # as if a piece had seen them
        best = tl.load(sinks + head, mask=is_row, other=0.0) * BASE_2
        total += 1.0
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for first_piece in range(0, num_pieces, BLOCK_P):
        index = first_piece + tl.arange(0, BLOCK_P)
        place = (first_partial + index).to(tl.int64)[:, None] * ROWS + row[None, :]
        is_piece = (index < num_pieces)[:, None] & is_row[None, :]
        bests = tl.load(weights + place * 2, mask=is_piece, other=float("-inf"), cache_modifier=".cg")  # [P, R]
        totals = tl.load(weights + place * 2 + 1, mask=is_piece, other=0.0, cache_modifier=".cg")
        is_element = is_piece[:, :, None] & (d < D)[None, None, :]
        element = sums + place[:, :, None] * D + d[None, None, :]
        parts = tl.load(element, mask=is_element, other=0.0, cache_modifier=".cg")  # [P, R, D]
        new_best = tl.maximum(best, tl.max(bests, axis=0))
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(bests - base[None, :])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(totals * weight, axis=0)
        acc = acc * shrink[:, None] + tl.sum(parts * weight[:, :, None], axis=0)
        best = new_best
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    query = (first_row + row // GROUP).to(tl.int64)
    place = out + (query[:, None] * num_heads + head[:, None]) * D + d[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_row[:, None] & (d < D)[None, :])


@triton.jit
def _block_ids(table, token, oldest, end, B: tl.constexpr):
    """The blocks [N] of tokens; 0, with no table entry read, for those not in [oldest, end)."""
    return tl.load(table + token // B, mask=(token < end) & (token >= oldest), other=0)


@triton.jit
def _load_tile(
    block, k_head, v_head, token, is_token, d, kc_n, kc_b, kc_d, vc_n, vc_b, vc_d, like,
    B: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Keys and values [N, D] of tokens in those blocks, in the type of `like`; zero where not `is_token`."""
    block = block.to(tl.int64)  # an offset may exceed 2^31 elements
    offset = token % B
    k_place = k_head + (block * kc_n + offset * kc_b)[:, None] + (d * kc_d)[None, :]
    v_place = v_head + (block * vc_n + offset * vc_b)[:, None] + (d * vc_d)[None, :]
    if IS_MASKED:
        is_element = is_token[:, None] & (d < D)[None, :]
        keys = tl.load(k_place, mask=is_element, other=0.0)
        values = tl.load(v_place, mask=is_element, other=0.0)
    elif D < BLOCK_D:
        keys = tl.load(k_place, mask=(d < D)[None, :], other=0.0)
        values = tl.load(v_place, mask=(d < D)[None, :], other=0.0)
    else:
        keys = tl.load(k_place)
        values = tl.load(v_place)
    return keys.to(like.dtype), values.to(like.dtype)


@triton.jit
def _to_f16(queries):
    """Queries in f16, those beyond its range at its ends; NaN stays."""
    if queries.dtype == tl.bfloat16:
        queries = tl.minimum(queries.to(tl.float32), LARGEST_F16, propagate_nan=tl.PropagateNan.ALL)
        queries = tl.maximum(queries, -LARGEST_F16, propagate_nan=tl.PropagateNan.ALL)
    return queries.to(tl.float16)


@triton.jit
def _scores(
    queries, keys, factor, cap, HAS_CAP: tl.constexpr, IS_SCALED: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """[M, D] @ [D, N] -> [M, N]; scores in base 2 if `IS_SCALED`, with a cap, cap * tanh(score / cap)."""
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    if IS_SCALED:
        scores *= factor
    if HAS_CAP:
        scores = cap - 2 * cap / (tl.exp2(scores) + 1)
    return scores


@triton.jit
def _with_alibi(scores, slopes, token, position):
    """Scores [M, N], less what slopes [M] in base 2 take off for the distance of a token."""
    return scores + slopes[:, None] * (token[None, :] - position[:, None]).to(tl.float32)


@triton.jit
def _add_tile(acc, best, total, scores, values, unit, CAN_BE_EMPTY: tl.constexpr, PRECISION: tl.constexpr):
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

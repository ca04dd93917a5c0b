"""Triton kernels of attention over a paged cache. Twins in `reference.py`, same signatures.

Two kernels share one inner step: *decode*, one token a sequence, where the 16 rows of a dot are the heads that share a
key/value head; *extend*, several tokens a sequence, where they are tokens x heads. Grids depend on shapes alone and no
length is read on the host, so launches can be captured in a CUDA graph. Work per program is fixed by the grid; a
persistent variant that walks a list of equal pieces would replace `_decode_kernel` and keep the rest.

Softmax is in base 2 with log2(e) folded into the scale, since exp2 is one instruction.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_launch import capability, check_dtype, next_power_of_2, num_multiprocessors

LOG2_E = 1.4426950408889634
DECODE_ROWS = 16  # the smallest M of a tensor-core dot; a group of fewer heads is padded: that costs FLOPs, not bytes
MIN_TILES_PER_SPLIT = 4  # shorter pieces cost more to merge than they gain
MAX_SPLITS = 32
INDEX_TENSORS = ["block_tables", "starts", "lengths"]


class Tiling(NamedTuple):
    """Launch shape of an attention kernel."""

    block_m: int  # query rows
    block_n: int  # cached tokens a step
    num_warps: int
    num_stages: int  # depth of the software pipeline of loads


def decode_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """Held, like `extend_tiling`, to no spilled register on sm_80 and sm_90 by `compile_check`."""
    if dtype == torch.float32:
        return Tiling(DECODE_ROWS, 32, 4, 2) if head_dim <= 64 else Tiling(DECODE_ROWS, 16, 8, 2)
    return Tiling(DECODE_ROWS, 64 if head_dim <= 128 else 32, 4, 3)


def extend_tiling(head_dim: int, dtype: torch.dtype, group: int, capability: int) -> Tiling:
    """Rows of a tile hold whole tokens, `group` rows each, so `block_m >= group`. `capability` is 80, 90, ..."""
    if dtype == torch.float32:
        tiling = Tiling(16, 32, 4, 2) if head_dim <= 64 else Tiling(16, 16, 8, 2)
    elif head_dim > 128:
        tiling = Tiling(64, 32, 8, 2)
    elif head_dim > 64 and capability < 90:
        tiling = Tiling(64, 64, 8, 3)
    else:
        tiling = Tiling(128, 64, 8, 3)
    return tiling._replace(block_m=max(tiling.block_m, next_power_of_2(group)))


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """See `reference.paged_decode`. One program per (sequence, key/value head), or several where programs are few."""
    check_dtype(q)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    splits = num_splits(q, k_cache, block_tables)
    launch_decode(out, q, k_cache, v_cache, block_tables, None, lengths, scale, window, splits)
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
) -> Tensor:
    """See `reference.paged_attention`. Sequences of one new token are left to the decode kernel."""
    check_dtype(q)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    splits = num_splits(q, k_cache, block_tables)
    launch_decode(out, q, k_cache, v_cache, block_tables, query_starts, lengths, scale, window, splits)
    launch_extend(out, q, k_cache, v_cache, block_tables, query_starts, lengths, scale, window)
    return out


def num_splits(q: Tensor, k_cache: Tensor, block_tables: Tensor) -> int:
    """Pieces, a power of 2, to cut each sequence's cached tokens into, so that few long ones still fill the device."""
    _, num_heads, head_dim = q.shape
    num_groups, block_size = k_cache.shape[1:3]
    programs = block_tables.shape[0] * num_groups * triton.cdiv(num_heads // num_groups, DECODE_ROWS)
    tiles = triton.cdiv(block_tables.shape[1] * block_size, decode_tiling(head_dim, q.dtype).block_n)
    wanted = 2 * num_multiprocessors(q.device) // max(1, programs)
    allowed = min(wanted, tiles // MIN_TILES_PER_SPLIT, MAX_SPLITS)
    return 1 << (max(1, allowed).bit_length() - 1)


def launch_decode(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor | None,
    lengths: Tensor,
    scale: float,
    window: int | None,
    splits: int,
) -> None:
    """Decode into `out`. Sequence s is row s of q; with `query_starts` row query_starts[s], if it has one new token."""
    num_sequences = len(lengths)
    _, num_heads, head_dim = q.shape
    num_groups, block_size = k_cache.shape[1:3]
    group = num_heads // num_groups
    row_tiles = triton.cdiv(group, DECODE_ROWS)
    tiling = decode_tiling(head_dim, q.dtype)
    block_d = max(16, next_power_of_2(head_dim))
    # Unnormalised sums, then maxima and sums of weights: [S, H, splits, D], [S, H, splits, 2], f32.
    partial = out if splits == 1 else out.new_empty((num_sequences, num_heads, splits, head_dim), dtype=torch.float32)
    weights = out if splits == 1 else out.new_empty((num_sequences, num_heads, splits, 2), dtype=torch.float32)
    starts = lengths if query_starts is None else query_starts
    _decode_kernel[(num_sequences, num_groups * row_tiles, splits)](
        out, partial, weights, q, k_cache, v_cache, block_tables, starts, lengths, scale * LOG2_E, window or 0,
        num_heads, q.stride(0), q.stride(1), *k_cache.stride(), *v_cache.stride(), block_tables.stride(0),
        GROUP=group, B=block_size, D=head_dim, BLOCK_D=block_d, BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
        SPLITS=splits, IS_MIXED=query_starts is not None, HAS_WINDOW=window is not None,
        PRECISION=_precision(q.dtype), STAGES=tiling.num_stages, num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(num_sequences, num_heads)](
            out, partial, weights, starts, num_heads,
            D=head_dim, BLOCK_D=block_d, SPLITS=splits, IS_MIXED=query_starts is not None, num_warps=1,
            enable_fp_fusion=True,
        )  # fmt: skip


def launch_extend(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
) -> None:
    """Attention of all sequences with more than one new token, into their rows of `out`."""
    num_tokens, num_heads, head_dim = q.shape
    num_groups, block_size = k_cache.shape[1:3]
    group = num_heads // num_groups
    tiling = extend_tiling(head_dim, q.dtype, group, capability(q.device))
    # The query tiles of sequence s start at tile query_starts[s] // tokens + s: room for all, whatever the lengths.
    num_tiles = num_tokens // (tiling.block_m // group) + len(lengths)
    _extend_kernel[(num_tiles, num_groups)](
        out, q, k_cache, v_cache, block_tables, query_starts, lengths, scale * LOG2_E, window or 0, len(lengths),
        num_heads, q.stride(0), q.stride(1), *k_cache.stride(), *v_cache.stride(), block_tables.stride(0),
        GROUP=group, B=block_size, D=head_dim, BLOCK_D=max(16, next_power_of_2(head_dim)),
        BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n, HAS_WINDOW=window is not None,
        PRECISION=_precision(q.dtype), STAGES=tiling.num_stages, num_warps=tiling.num_warps,
        enable_fp_fusion=True,
    )  # fmt: skip


def _precision(dtype: torch.dtype) -> str:
    """f32 means f32: tf32 would round the inputs of a dot to 10 bits."""
    return "ieee" if dtype == torch.float32 else "tf32"


# The index tensors may be slices of one buffer and the table of any width: neither may cause another compilation.
@triton.jit(do_not_specialize=["window", "table_row"], do_not_specialize_on_alignment=INDEX_TENSORS)
def _decode_kernel(
    out, partial, weights, q, k_cache, v_cache, block_tables, starts, lengths, scale, window,
    num_heads, q_row, q_head, kc_n, kc_g, kc_b, kc_d, vc_n, vc_g, vc_b, vc_d, table_row,
    GROUP: tl.constexpr, B: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, IS_MIXED: tl.constexpr, HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One token of one sequence, up to BLOCK_M heads of one group, one of SPLITS ranges of its cached tokens."""
    sequence = tl.program_id(0).to(tl.int64)
    row_tiles: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    g = (tl.program_id(1) // row_tiles).to(tl.int64)
    split = tl.program_id(2)
    query = sequence
    if IS_MIXED:
        query = tl.load(starts + sequence).to(tl.int64)
        if tl.load(starts + sequence + 1) != query + 1:
            return
    length = tl.load(lengths + sequence)

    member = tl.program_id(1) % row_tiles * BLOCK_M + tl.arange(0, BLOCK_M)  # [M] heads of the group
    head = g * GROUP + member
    d = tl.arange(0, BLOCK_D)
    is_head = (member < GROUP)[:, None] & (d < D)[None, :]
    queries = tl.load(q + query * q_row + head[:, None] * q_head + d[None, :], mask=is_head, other=0.0)  # [M, D]

    oldest = tl.maximum(length - window, 0) if HAS_WINDOW else 0
    first_tile = oldest // BLOCK_N
    end_tile = tl.cdiv(length, BLOCK_N)
    if SPLITS > 1:
        share = tl.cdiv(end_tile - first_tile, SPLITS)
        first_tile += split * share
        end_tile = tl.minimum(end_tile, first_tile + share)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)  # of the scores so far
    total = tl.zeros([BLOCK_M], tl.float32)  # of the weights so far
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = block_tables + sequence * table_row
    k_head = k_cache + g * kc_g
    v_head = v_cache + g * vc_g
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        token = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_seen = (token < length) & (token >= oldest)  # some token of every tile is: no row is all -inf
        keys, values = _load_tile(
            table, k_head, v_head, token, is_seen, d, kc_n, kc_b, kc_d, vc_n, vc_b, vc_d, B, D, BLOCK_D, True
        )
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale  # [M, D] @ [D, N] -> [M, N]
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        acc, best, total = _add_tile(acc, best, total, scores, values, False, PRECISION)

    if SPLITS == 1:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]  # a padding row has no weights: zeros
        place = out + (query * num_heads + head[:, None]) * D + d[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=is_head)
    else:
        piece = (sequence * num_heads + head) * SPLITS + split
        tl.store(partial + piece[:, None] * D + d[None, :], acc, mask=is_head)
        tl.store(weights + piece * 2, best, mask=member < GROUP)
        tl.store(weights + piece * 2 + 1, total, mask=member < GROUP)


@triton.jit(do_not_specialize_on_alignment=["starts"])
def _merge_kernel(
    out, partial, weights, starts, num_heads,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr, IS_MIXED: tl.constexpr,
):  # fmt: skip
    """Joins the SPLITS pieces of one head of one sequence."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    query = sequence
    if IS_MIXED:
        query = tl.load(starts + sequence).to(tl.int64)
        if tl.load(starts + sequence + 1) != query + 1:
            return
    d = tl.arange(0, BLOCK_D)
    piece = (sequence * num_heads + head) * SPLITS + tl.arange(0, SPLITS)
    best = tl.load(weights + piece * 2)  # -inf where a piece had no tokens
    total = tl.load(weights + piece * 2 + 1)
    top = tl.maximum(tl.max(best, axis=0), -1e38)  # finite even for a padding row, as -inf - -inf is NaN
    factor = tl.exp2(best - top)
    sums = tl.load(partial + piece[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)  # [SPLITS, D]
    weight = tl.sum(total * factor, axis=0)
    result = tl.sum(sums * factor[:, None], axis=0) / tl.where(weight > 0, weight, 1.0)
    tl.store(out + (query * num_heads + head) * D + d, result.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["window", "num_sequences", "table_row"], do_not_specialize_on_alignment=INDEX_TENSORS)
def _extend_kernel(
    out, q, k_cache, v_cache, block_tables, starts, lengths, scale, window, num_sequences,
    num_heads, q_row, q_head, kc_n, kc_g, kc_b, kc_d, vc_n, vc_g, vc_b, vc_d, table_row,
    GROUP: tl.constexpr, B: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """BLOCK_M // GROUP new tokens of one sequence, all heads of one group, over all the cached tokens they see."""
    tokens: tl.constexpr = BLOCK_M // GROUP
    tile_id = tl.num_programs(0) - 1 - tl.program_id(0)  # late tiles see most: started first, they end with the others
    g = tl.program_id(1).to(tl.int64)
    sequence = _sequence_of_tile(starts, num_sequences, tile_id, tokens)
    start = tl.load(starts + sequence)
    num_new = tl.load(starts + sequence + 1) - start
    first_new = (tile_id - start // tokens - sequence) * tokens
    if (first_new >= num_new) | (num_new == 1):  # past the sequence's last tile, or a row for the decode kernel
        return
    length = tl.load(lengths + sequence)

    row = tl.arange(0, BLOCK_M)
    new = first_new + row // GROUP  # [M] which new token
    head = g * GROUP + row % GROUP
    d = tl.arange(0, BLOCK_D)
    is_row = ((new < num_new) & (row < tokens * GROUP))[:, None] & (d < D)[None, :]
    query = (start + new).to(tl.int64)
    queries = tl.load(q + query[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=is_row, other=0.0)

    position = length - num_new + new  # [M] of each row's token in its sequence
    first_position = length - num_new + first_new
    end = tl.minimum(length, first_position + tokens)  # tokens seen by the last row, and so by any
    first_tile = 0
    end_unmasked = tl.maximum(first_position + 1, 0) // BLOCK_N  # tiles before it are seen whole by all rows
    if HAS_WINDOW:
        first_tile = tl.maximum(first_position + 1 - window, 0) // BLOCK_N
        end_unmasked = first_tile
    end_tile = tl.cdiv(end, BLOCK_N)

    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_row
    k_head = k_cache + g * kc_g
    v_head = v_cache + g * vc_g
    for tile in tl.range(first_tile, end_unmasked, num_stages=STAGES):
        token = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        keys, values = _load_tile(
            table, k_head, v_head, token, token < end, d, kc_n, kc_b, kc_d, vc_n, vc_b, vc_d, B, D, BLOCK_D, False
        )
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale  # [M, D] @ [D, N] -> [M, N]
        acc, best, total = _add_tile(acc, best, total, scores, values, False, PRECISION)
    for tile in tl.range(end_unmasked, end_tile, num_stages=STAGES):
        token = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        keys, values = _load_tile(
            table, k_head, v_head, token, token < end, d, kc_n, kc_b, kc_d, vc_n, vc_b, vc_d, B, D, BLOCK_D, True
        )
        is_seen = token[None, :] <= position[:, None]
        if HAS_WINDOW:
            is_seen &= token[None, :] > position[:, None] - window
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(is_seen, scores, float("-inf"))
        acc, best, total = _add_tile(acc, best, total, scores, values, HAS_WINDOW, PRECISION)

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    place = out + (query[:, None] * num_heads + head[:, None]) * D + d[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def _sequence_of_tile(starts, num_sequences, tile_id, tokens: tl.constexpr):
    """The last sequence whose tiles start at or before `tile_id`, by bisection."""
    low = 0
    high = num_sequences
    while low < high:
        middle = (low + high) // 2
        is_before = tl.load(starts + middle) // tokens + middle <= tile_id
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
    return low - 1


@triton.jit
def _load_tile(
    table, k_head, v_head, token, is_token, d, kc_n, kc_b, kc_d, vc_n, vc_b, vc_d,
    B: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Keys and values [N, D] of the tokens' slots; zeros, and no table entry followed, where not `is_token`."""
    block = tl.load(table + token // B, mask=is_token, other=0).to(tl.int64)  # an offset may exceed 2^31 elements
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
    return keys, values


@triton.jit
def _add_tile(acc, best, total, scores, values, CAN_BE_EMPTY: tl.constexpr, PRECISION: tl.constexpr):
    """One step of the online softmax: (acc, best, total) with the tile's scores [M, N] and values [N, D] added."""
    new_best = tl.maximum(best, tl.max(scores, axis=1))
    base = new_best
    if CAN_BE_EMPTY:  # a row that has seen nothing yet: -inf - -inf would be NaN
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, axis=1)
    # [M, N] @ [N, D] -> [M, D]
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    return acc, new_best, total

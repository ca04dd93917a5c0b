"""Triton kernels of the products of experts, and of the sum over the experts of a token. `launches.py` launches them.

A program has a tile, rows of one expert, and BLOCK_N numbers of their result. Grids depend on the number of pairs
alone, and have a program for each tile that any routing may make; those beyond the tiles there are end at once, so one
CUDA graph serves any routing, and only the weights of experts that have rows are read.

A row is one chain over K, and the experts of a token are added in the order of rank: no row's bits depend on the
others. Sums are in f32; a product is rounded where the separate kernels round it.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import start_early
from ..layers import activate, gate_product
from .coded import coded_tile
from .lists import TILE


@triton.jit
def product_kernel(
    out, x, weight, bias, scales, zeros, offsets, table, order, tiles, num_tiles, alpha, limit, zero,
    num_outputs, num_inner, x_row, weight_expert, weight_row, groups_expert, groups_row, bias_expert, out_row,
    TOP_K: tl.constexpr, KIND: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, GROUP: tl.constexpr, IS_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """KIND gated or activated: of tokens' rows x [T, K], to rows in the order of pairs; down: of those, to pairs."""
    start_early(IS_EARLY)
    if tl.program_id(1) < tl.load(num_tiles):
        tile = tiles + tl.program_id(1) * TILE
        expert = tl.load(tile).to(tl.int64)
        m = tl.arange(0, BLOCK_M)
        place = tl.load(tile + 1) + m
        is_row = m < tl.load(tile + 2)
        pair = tl.load(order + place, mask=is_row, other=0)
        row, out_place = place, pair
        if KIND != "down":
            row, out_place = pair // TOP_K, place
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        is_output = n < num_outputs
        x_place = x + row.to(tl.int64)[:, None] * x_row + k[None, :]
        weight_place = weight + expert * weight_expert
        if GROUP > 0:  # the weight is codes
            scales += expert * groups_expert
            if zeros is not None:
                zeros += expert * groups_expert
            if offsets is not None:
                offsets += expert * groups_expert
        else:
            weight_place += n.to(tl.int64)[:, None] * weight_row + k[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up_acc = acc
        for first in tl.range(0, num_inner, BLOCK_K, num_stages=STAGES):
            is_inner = first + k < num_inner
            rows = _tile(x_place + first, is_row, is_inner, False, EVEN_K, "evict_last")
            if GROUP > 0:
                some = coded_tile(
                    weight_place, scales, zeros, offsets, table, zero, n.to(tl.int64), first, num_inner, weight_row,
                    groups_row, is_output, rows, GROUP, IS_PAIRS, BLOCK_N, BLOCK_K,
                )  # fmt: skip
            else:
                some = _tile(weight_place + first, is_output, is_inner, EVEN_N, EVEN_K, "evict_first")
            # [M, K] @ [K, N] -> [M, N]
            acc = tl.dot(rows, tl.trans(some), acc, input_precision=PRECISION)
            if KIND == "gated":
                if GROUP > 0:
                    some = coded_tile(
                        weight_place, scales, zeros, offsets, table, zero, n.to(tl.int64) + num_outputs, first,
                        num_inner, weight_row, groups_row, is_output, rows, GROUP, IS_PAIRS, BLOCK_N, BLOCK_K,
                    )  # fmt: skip
                else:
                    up_place = weight_place + num_outputs.to(tl.int64) * weight_row + first
                    some = _tile(up_place, is_output, is_inner, EVEN_N, EVEN_K, "evict_first")
                up_acc = tl.dot(rows, tl.trans(some), up_acc, input_precision=PRECISION)
        narrow: tl.constexpr = out.dtype.element_ty
        if bias is not None:
            bias_place = bias + expert * bias_expert + n
            acc += tl.load(bias_place, mask=is_output, other=0.0).to(tl.float32)[None, :]
            if KIND == "gated":
                up_acc += tl.load(bias_place + num_outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
        result = acc.to(narrow)
        if KIND == "gated":
            result = gate_product(result, up_acc.to(narrow), alpha, limit, ACTIVATION).to(narrow)
        elif KIND == "activated":
            result = activate(result.to(tl.float32), 0.0, 0.0, ACTIVATION).to(narrow)
        out_row_place = out + out_place.to(tl.int64)[:, None] * out_row + n[None, :]
        tl.store(out_row_place, result, mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _tile(place, is_row, is_column, EVEN_ROWS: tl.constexpr, EVEN_COLUMNS: tl.constexpr, POLICY: tl.constexpr):
    """A tile of a matrix whose rows and columns may end within it."""
    if EVEN_ROWS and EVEN_COLUMNS:
        tile = tl.load(place, eviction_policy=POLICY)
    elif EVEN_COLUMNS:
        tile = tl.load(place, mask=is_row[:, None], other=0.0, eviction_policy=POLICY)
    elif EVEN_ROWS:
        tile = tl.load(place, mask=is_column[None, :], other=0.0, eviction_policy=POLICY)
    else:
        tile = tl.load(place, mask=is_row[:, None] & is_column[None, :], other=0.0, eviction_policy=POLICY)
    return tile


@triton.jit
def sum_kernel(
    out, pairs, shares, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr, IS_EARLY: tl.constexpr
):  # fmt: skip
    """BLOCK numbers of a token: out [T, width] f32, of pairs [T * TOP_K, width]."""
    start_early(IS_EARLY)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_number = n < width
    total = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(TOP_K):
        pair = token * TOP_K + rank
        part = tl.load(pairs + pair * width + n, mask=is_number, other=0.0).to(tl.float32)
        total += part * tl.load(shares + pair)
    tl.store(out + token * width + n, total, mask=is_number)

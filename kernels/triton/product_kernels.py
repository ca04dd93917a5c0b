"""Triton kernels of matrix products of few rows, with the norm before and what follows inside.

`products.py` launches them. Shapes: x [M, K], weight [N, K], both contiguous in K; a gated weight is [2N, K], gate
first. Sums are in f32; a product is rounded where the separate kernels round it.

A product of few rows is bound by reading its weight, once. Two forms (`kernels/tilings/products.py`). A few rows are
multiplied without matrix instructions: weights go from memory straight to registers, a program has whole rows of the
weight, and nothing is left to be joined. More rows take matrix instructions and loads that run ahead through shared
memory; where there are too few tiles for the device, K is cut into splits. The program of a tile that ends last joins
them in the order of K: the same bits each time, and no second launch. It is the last by a counter of its tile, which is
zero at the begin of a step and used once in it, so that a step that failed leaves nothing behind.

Both forms begin before the launch ahead has ended (`launch.py`), and fetch weights meanwhile.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from .launch import let_next_begin, wait_for_earlier
from .layers import activate, gate_product

# ---- without matrix instructions ------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"])
def vector_kernel(
    out, x, weight, bias, norm_weight, norm_bias, of_activation, eps, alpha, limit,
    num_rows, num_outputs, num_inner, x_row, weight_row, out_row,
    VECTOR: tl.constexpr, IS_WHOLE: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, KIND: tl.constexpr, ACTIVATION: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_N numbers of BLOCK_M rows. A thread sums up VECTOR numbers, one access, at a time; threads at the end."""
    let_next_begin(IS_EARLY)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, None, :]
    is_row = (row < num_rows)[:, None, None]
    is_output = (n < num_outputs)[None, :, None]
    x_place = x + row.to(tl.int64)[:, None, None] * x_row + k
    place = weight + n.to(tl.int64)[None, :, None] * weight_row + k
    up_place = place + num_outputs.to(tl.int64) * weight_row
    tile = _weights(place, is_output, k < num_inner, EVEN_N, EVEN_K)  # in registers when the wait ends
    up_tile = tile
    if KIND == "gated":
        up_tile = _weights(up_place, is_output, k < num_inner, EVEN_N, EVEN_K)
    wait_for_earlier(IS_EARLY)
    mean, scale = _statistics(x_place, is_row, k, num_inner, eps, 2, BLOCK_K, EVEN_K, NORM)
    rows = _rows(x_place, is_row, k < num_inner, EVEN_K)
    if IS_WHOLE:
        rows = _normed(rows, mean, scale, norm_weight, norm_bias, k, k < num_inner, NORM)
        acc = _sums(rows, tile, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR)
        up_acc = acc
        if KIND == "gated":
            up_acc = _sums(rows, up_tile, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K // VECTOR], tl.float32)
        up_acc = acc
        for first in tl.range(0, num_inner, BLOCK_K, num_stages=1):
            is_inner = first + k < num_inner
            normed = _normed(rows, mean, scale, norm_weight, norm_bias, first + k, is_inner, NORM)
            acc += _sums(normed, tile, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR)
            if KIND == "gated":
                up_acc += _sums(normed, up_tile, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR)
            # The next iteration's; none after the last.
            following = first + BLOCK_K
            is_next = following + k < num_inner
            rows = _rows(x_place + following, is_row, is_next, False)
            tile = _weights(place + following, is_output, is_next, EVEN_N, False)
            if KIND == "gated":
                up_tile = _weights(up_place + following, is_output, is_next, EVEN_N, False)
    total = tl.sum(acc, axis=2)
    up_total = total
    if KIND == "gated":
        up_total = tl.sum(up_acc, axis=2)
    is_element = (row < num_rows)[:, None] & (n < num_outputs)[None, :]
    result = out + row.to(tl.int64)[:, None] * out_row + n[None, :]
    _finish(result, total, up_total, bias, of_activation, alpha, limit, n, num_outputs, is_element, KIND, ACTIVATION)


@triton.jit
def _sums(
    rows, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """[M, 1, K] * [1, N, K], each VECTOR of them summed up -> [M, N, K / VECTOR]"""
    products = rows.to(tl.float32) * tile.to(tl.float32)
    return tl.sum(tl.reshape(products, [BLOCK_M, BLOCK_N, BLOCK_K // VECTOR, VECTOR]), axis=3)


# ---- with matrix instructions ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["counters"])
def split_kernel(
    out, x, weight, partials, counters, bias, norm_weight, norm_bias, of_activation, eps, alpha, limit,
    num_rows, num_outputs, num_inner, x_row, weight_row, out_row, split_size,
    SPLITS: tl.constexpr, IS_SWAPPED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    LINE: tl.constexpr, LINES: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NORM: tl.constexpr, KIND: tl.constexpr, ACTIVATION: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of the result, or one of its splits."""
    let_next_begin(IS_EARLY)
    split = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    is_row = (row < num_rows)[:, None]
    is_output = (n < num_outputs)[:, None]
    x_place = x + row.to(tl.int64)[:, None] * x_row + k
    place = weight + n.to(tl.int64)[:, None] * weight_row + k
    up_place = place + num_outputs.to(tl.int64) * weight_row
    acc = tl.zeros([BLOCK_N, BLOCK_M] if IS_SWAPPED else [BLOCK_M, BLOCK_N], tl.float32)
    up_acc = acc
    begin = split * split_size
    end = tl.minimum(begin + split_size, num_inner)
    if IS_EARLY:
        _fetch(weight, n, num_outputs, weight_row, begin, end, KIND == "gated", LINE, LINES)
    wait_for_earlier(IS_EARLY)
    mean, scale = _statistics(x_place, is_row, k, num_inner, eps, 1, BLOCK_K, EVEN_K, NORM)
    for first in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        is_inner = first + k < num_inner
        rows = _rows(x_place + first, is_row, is_inner, EVEN_K)
        rows = _normed(rows, mean, scale, norm_weight, norm_bias, first + k, is_inner, NORM)
        tile = _weights(place + first, is_output, is_inner, EVEN_N, EVEN_K)
        acc = _dot(rows, tile, acc, IS_SWAPPED, PRECISION)
        if KIND == "gated":
            tile = _weights(up_place + first, is_output, is_inner, EVEN_N, EVEN_K)
            up_acc = _dot(rows, tile, up_acc, IS_SWAPPED, PRECISION)
    if IS_SWAPPED:
        acc, up_acc = tl.trans(acc), tl.trans(up_acc)
    is_last = True
    if SPLITS > 1:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        NUM_SUMS: tl.constexpr = 2 if KIND == "gated" else 1
        tile_id = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        element = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        pieces = partials + tile_id.to(tl.int64) * (SPLITS * NUM_SUMS * TILE) + element
        piece = pieces + split * (NUM_SUMS * TILE)
        tl.store(piece, acc, mask=is_row)
        if KIND == "gated":
            tl.store(piece + TILE, up_acc, mask=is_row)
        tl.debug_barrier()  # all threads have stored before one of them says so
        is_last = tl.atomic_add(counters + tile_id, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if is_last:
            acc = _joined(pieces, is_row, SPLITS, NUM_SUMS * TILE)
            if KIND == "gated":
                up_acc = _joined(pieces + TILE, is_row, SPLITS, NUM_SUMS * TILE)
    if is_last:
        is_element = is_row & (n < num_outputs)[None, :]
        result = out + row.to(tl.int64)[:, None] * out_row + n[None, :]
        _finish(result, acc, up_acc, bias, of_activation, alpha, limit, n, num_outputs, is_element, KIND, ACTIVATION)


@triton.jit
def _fetch(
    weight, n, num_outputs, weight_row, begin, end, IS_GATED: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr
):  # fmt: skip
    """Fetches the program's first weights into L2."""
    k = tl.minimum(begin + tl.arange(0, LINES) * LINE, end - 1)
    n = tl.minimum(n, num_outputs - 1).to(tl.int64)
    _fetch_lines(weight + n[:, None] * weight_row + k[None, :])
    if IS_GATED:
        _fetch_lines(weight + (num_outputs + n)[:, None] * weight_row + k[None, :])


@triton.jit
def _fetch_lines(places):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _dot(rows, tile, acc, IS_SWAPPED: tl.constexpr, PRECISION: tl.constexpr):
    if IS_SWAPPED:
        acc = tl.dot(tile, tl.trans(rows), acc, input_precision=PRECISION)  # [N, K] @ [K, M] -> [N, M]
    else:
        acc = tl.dot(rows, tl.trans(tile), acc, input_precision=PRECISION)  # [M, K] @ [K, N] -> [M, N]
    return acc


@triton.jit
def _joined(pieces, is_row, SPLITS: tl.constexpr, STRIDE: tl.constexpr):
    """The sum over splits, in their order. From L2: an L1 does not see what other multiprocessors wrote."""
    total = tl.load(pieces, mask=is_row, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pieces + split * STRIDE, mask=is_row, other=0.0, cache_modifier=".cg")
    return total


# ---- of both --------------------------------------------------------------------------------------------------------


@triton.jit
def _weights(place, is_output, is_inner, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr):
    """A tile of the weight: no other program reads it, so it is the first that a cache may drop."""
    if EVEN_N and EVEN_K:
        tile = tl.load(place, eviction_policy="evict_first")
    elif EVEN_K:
        tile = tl.load(place, mask=is_output, other=0.0, eviction_policy="evict_first")
    elif EVEN_N:
        tile = tl.load(place, mask=is_inner, other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(place, mask=is_output & is_inner, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _rows(place, is_row, is_inner, EVEN_K: tl.constexpr):
    """A tile of x: every program reads it, so it is the last that a cache may drop."""
    if EVEN_K:
        rows = tl.load(place, mask=is_row, other=0.0, eviction_policy="evict_last")
    else:
        rows = tl.load(place, mask=is_row & is_inner, other=0.0, eviction_policy="evict_last")
    return rows


@triton.jit
def _statistics(
    place, is_row, k, num_inner, eps, AXIS: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """The mean of each row, 0 for an RMS norm, and the factor that makes its square mean 1; in the rank of `place`."""
    mean, scale = 0.0, 1.0
    if NORM != "none":
        if NORM == "layer":
            acc = _rows(place, is_row, k < num_inner, EVEN_K).to(tl.float32)
            for first in tl.range(BLOCK_K, num_inner, BLOCK_K, num_stages=1):
                acc += _rows(place + first, is_row, first + k < num_inner, EVEN_K).to(tl.float32)
            mean = tl.sum(acc, axis=AXIS, keep_dims=True) / num_inner
        first_rows = _rows(place, is_row, k < num_inner, EVEN_K).to(tl.float32)
        first_rows = tl.where(k < num_inner, first_rows - mean, 0.0)
        squares = first_rows * first_rows
        for first in tl.range(BLOCK_K, num_inner, BLOCK_K, num_stages=1):
            rows = _rows(place + first, is_row, first + k < num_inner, EVEN_K).to(tl.float32)
            rows = tl.where(first + k < num_inner, rows - mean, 0.0)
            squares += rows * rows
        scale = tl.rsqrt(tl.sum(squares, axis=AXIS, keep_dims=True) / num_inner + eps)
    return mean, scale


@triton.jit
def _normed(rows, mean, scale, norm_weight, norm_bias, k, is_inner, NORM: tl.constexpr):
    """A tile of x after the norm, rounded as `_norm_kernel` rounds it, in the type of x; 0 outside of the row."""
    if NORM != "none":
        narrow: tl.constexpr = rows.dtype
        normed = (rows.to(tl.float32) - mean) * scale
        if norm_weight is not None:
            factors = tl.load(norm_weight + k, mask=is_inner, other=0.0)
            if NORM == "rounded":
                normed = (normed.to(narrow) * factors).to(tl.float32)
            else:
                normed = normed * factors.to(tl.float32)
        if norm_bias is not None:
            normed += tl.load(norm_bias + k, mask=is_inner, other=0.0).to(tl.float32)
        rows = tl.where(is_inner, normed, 0.0).to(narrow)
    return rows


@triton.jit
def _finish(
    place, acc, up_acc, bias, of_activation, alpha, limit, n, num_outputs, is_element,
    KIND: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Rounds sums as the separate steps do, and stores them."""
    narrow: tl.constexpr = place.dtype.element_ty
    if bias is not None:
        acc += tl.load(bias + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
    if KIND == "add":
        acc += tl.load(place, mask=is_element, other=0.0).to(tl.float32)
    result = acc.to(narrow)
    if KIND == "gated":
        if bias is not None:
            up_acc += tl.load(bias + num_outputs + n, mask=n < num_outputs, other=0.0).to(tl.float32)[None, :]
        result = gate_product(result, up_acc.to(narrow), alpha, limit, ACTIVATION).to(narrow)
    elif KIND == "activated":
        positive, negative = 0.0, 0.0
        if ACTIVATION == "xielu":
            positive, negative = tl.load(of_activation), tl.load(of_activation + 1)
        result = activate(result.to(tl.float32), positive, negative, ACTIVATION).to(narrow)
    tl.store(place, result, mask=is_element)

"""Triton kernels of matrix products of few rows, which are bound by reading the weight once: a candidate beside cuBLAS.

No step runs them yet. `product_sweep` times them beside PyTorch's; where that shows that they pay, they belong in
kernels/, with a twin.

x [M, K] times weight [N, K], both contiguous in K; sums in f32, rounded once. Two forms. A few rows, MOST_VECTOR_ROWS
at the most, are multiplied without matrix instructions: weights go from memory straight to registers, a program has
whole rows of the weight, and nothing is left to be joined. More rows take matrix instructions and loads that run ahead
through shared memory; where there are too few tiles for the device, K is cut into splits, and the program of a tile
that ends last joins them, always in the order of K: the same bits each time, and no second launch.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from millrace.kernels.triton.launch import check_dtype, next_power_of_2, num_multiprocessors

MOST_VECTOR_ROWS = 8  # beyond, the multiplications would take longer than the weight
SMALLEST_BLOCK = 16  # rows, and numbers of one, of a tile that may be cut into splits
LINE_BYTES = 128
EARLY_LINES = 64  # of a row of the weight, fetched by a program that has to wait: 8 KiB


class Tiling(NamedTuple):
    """How a product is cut: a program has [block_m, block_n] of the result, or a split of their sums."""

    block_m: int  # below 16: without matrix instructions
    block_n: int
    block_k: int  # of an iteration
    num_splits: int
    num_warps: int
    num_stages: int  # of the software pipeline of loads
    is_swapped: bool = False  # weights are the left side of the matrix instruction: wgmma wants 64 rows there
    max_registers: int | None = None  # of a thread
    starts_early: bool = False  # before what was launched ahead of it has ended; needs compute capability 9.0


def product(x: Tensor, weight: Tensor, counters: Tensor | None = None, tiling: Tiling | None = None) -> Tensor:
    """x @ weight.T, [M, N] as x.

    x         [M, K]  contiguous in K
    weight    [N, K]  as x
    counters  i32     of `join_counters`, for one launch at a time; without, splits cost another launch
    """
    out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    _multiply(out, x, weight, counters, tiling)
    return out


def add_product(
    residual: Tensor, x: Tensor, weight: Tensor, counters: Tensor | None = None, tiling: Tiling | None = None
) -> Tensor:
    """`residual += x @ weight.T`, rounded once. residual is [M, N], contiguous in N; the rest as in `product`."""
    _multiply(residual, x, weight, counters, tiling, has_residual=True)
    return residual


def activated(x: Tensor, gate_up: Tensor, counters: Tensor | None = None, tiling: Tiling | None = None) -> Tensor:
    """`gated(product(x, gate_up), "silu")` with its roundings. gate_up is [2F, K], gate first; returns [M, F] as x."""
    out = torch.empty((len(x), len(gate_up) // 2), dtype=x.dtype, device=x.device)
    _multiply(out, x, gate_up, counters, tiling, is_gated=True)
    return out


def join_counters(num_outputs: int, device: torch.device, num_row_tiles: int = 1) -> Tensor:
    """How many splits of each tile have ended: zeros, which every launch leaves as zeros."""
    return torch.zeros(num_row_tiles * triton.cdiv(num_outputs, SMALLEST_BLOCK), dtype=torch.int32, device=device)


def product_tiling(num_rows: int, num_outputs: int, num_inner: int, num_processors: int) -> Tiling:
    """For `num_outputs` numbers a row, each a sum of `num_inner`. A guess, until the sweep has been run."""
    if num_rows <= 4:
        return vector_tiling(num_rows, 4, num_inner, 4)
    block_m = min(64, max(16, next_power_of_2(num_rows)))
    block_n, block_k = (32, 128) if num_outputs <= 8192 else (64, 128)
    num_tiles = triton.cdiv(num_outputs, block_n)
    num_splits = 1
    while num_tiles * num_splits < 2 * num_processors and num_inner >= 2 * num_splits * 2 * block_k:
        num_splits *= 2
    return Tiling(block_m, block_n, block_k, num_splits, 4, 4)


def vector_tiling(num_rows: int, block_n: int, num_inner: int, num_warps: int, block_k: int = 0) -> Tiling:
    """Without matrix instructions. A warp has 256 numbers of a row at the least: else x would change places."""
    block_k = block_k or min(256 * num_warps, max(256, next_power_of_2(num_inner)))
    return Tiling(next_power_of_2(num_rows), block_n, block_k, 1, min(num_warps, block_k // 256), 1)


def split_of(num_inner: int, tiling: Tiling) -> tuple[int, int]:
    """Numbers of K in a split, and how many splits that makes: fewer than asked for if some would have none."""
    num_steps = triton.cdiv(num_inner, tiling.block_k)
    split_size = triton.cdiv(num_steps, tiling.num_splits) * tiling.block_k
    return split_size, triton.cdiv(num_inner, split_size)


def _multiply(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    counters: Tensor | None,
    tiling: Tiling | None,
    *,
    has_residual: bool = False,
    is_gated: bool = False,
) -> None:
    check_dtype(x)
    (num_rows, num_inner), num_outputs = x.shape, out.shape[1]
    if not out.numel():
        return
    assert weight.shape == (num_outputs * (1 + is_gated), num_inner) and weight.dtype == x.dtype == out.dtype
    assert x.stride(1) == weight.stride(1) == out.stride(1) == 1, "the numbers of a row must follow each other"
    tiling = tiling or product_tiling(num_rows, num_outputs, num_inner, num_multiprocessors(x.device))
    block_m, block_n, block_k, _, num_warps, num_stages, is_swapped, max_registers, starts_early = tiling
    tiles = triton.cdiv(num_outputs, block_n), triton.cdiv(num_rows, block_m)
    strides = x.stride(0), weight.stride(0), out.stride(0)
    line = LINE_BYTES // x.itemsize
    split_size, num_splits = split_of(num_inner, tiling)
    early = dict(LINE=line, LINES=min(EARLY_LINES, next_power_of_2(triton.cdiv(split_size, line))), launch_pdl=True)
    shared = dict(
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, HAS_RESIDUAL=has_residual, IS_GATED=is_gated,
        STAGES=num_stages, num_warps=num_warps, maxnreg=max_registers, enable_fp_fusion=True,
        **(early if starts_early else {"LINE": 0, "LINES": 0}),
    )  # fmt: skip
    if block_m < 16:
        _vector_kernel[tiles](
            out, x, weight, num_rows, num_outputs, num_inner, *strides,
            VECTOR=16 // x.itemsize, EVEN_N=num_outputs % block_n == 0, EVEN_K=num_inner % block_k == 0, **shared,
        )  # fmt: skip
        return
    sums = partials = out
    if num_splits > 1:
        num_tiles = tiles[0] * tiles[1]
        partials = torch.empty(
            num_tiles * num_splits * (1 + is_gated) * block_m * block_n, dtype=torch.float32, device=x.device
        )
        sums = torch.zeros(num_tiles, dtype=torch.int32, device=x.device) if counters is None else counters
        assert len(sums) >= num_tiles, f"{len(sums)} counters for {num_tiles} tiles"
    _product_kernel[(*tiles, num_splits)](
        out, x, weight, partials, sums, num_rows, num_outputs, num_inner, split_size, *strides,
        SPLITS=num_splits, IS_SWAPPED=is_swapped, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        EVEN_N=num_outputs % block_n == 0, EVEN_K=num_inner % block_k == 0, **shared,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _product_kernel(
    out, x, weight, partials, counters, num_rows, num_outputs, num_inner, split_size, x_row, weight_row, out_row,
    SPLITS: tl.constexpr, IS_SWAPPED: tl.constexpr, PRECISION: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_GATED: tl.constexpr, STAGES: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """A tile of the result, or one of its splits."""
    split = tl.program_id(2)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_row = (row < num_rows)[:, None]
    is_output = (n < num_outputs)[:, None]
    x_place = x + row.to(tl.int64)[:, None] * x_row + k[None, :]
    place = weight + n.to(tl.int64)[:, None] * weight_row + k[None, :]
    up_place = place + num_outputs.to(tl.int64) * weight_row
    acc = tl.zeros([BLOCK_N, BLOCK_M] if IS_SWAPPED else [BLOCK_M, BLOCK_N], tl.float32)
    up_acc = acc
    begin = split * split_size
    end = tl.minimum(begin + split_size, num_inner)
    if LINES > 0:
        _wait(weight, n, num_outputs, weight_row, begin, end, BLOCK_N, IS_GATED, LINE, LINES)
    for first in tl.range(begin, end, BLOCK_K, num_stages=STAGES):
        is_inner = (first + k < num_inner)[None, :]
        if EVEN_K:
            rows = tl.load(x_place + first, mask=is_row, other=0.0, eviction_policy="evict_last")
        else:
            rows = tl.load(x_place + first, mask=is_row & is_inner, other=0.0, eviction_policy="evict_last")
        tile = _weights(place + first, is_output, is_inner, EVEN_N, EVEN_K)
        acc = _dot(rows, tile, acc, IS_SWAPPED, PRECISION)
        if IS_GATED:
            tile = _weights(up_place + first, is_output, is_inner, EVEN_N, EVEN_K)
            up_acc = _dot(rows, tile, up_acc, IS_SWAPPED, PRECISION)
    if IS_SWAPPED:
        acc, up_acc = tl.trans(acc), tl.trans(up_acc)
    is_last = True
    if SPLITS > 1:
        TILE: tl.constexpr = BLOCK_M * BLOCK_N
        NUM_SUMS: tl.constexpr = 2 if IS_GATED else 1
        tile_id = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        element = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        pieces = partials + tile_id.to(tl.int64) * (SPLITS * NUM_SUMS * TILE) + element
        piece = pieces + split * (NUM_SUMS * TILE)
        tl.store(piece, acc, mask=is_row)
        if IS_GATED:
            tl.store(piece + TILE, up_acc, mask=is_row)
        tl.debug_barrier()  # all threads have stored before one of them says so
        is_last = tl.atomic_add(counters + tile_id, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if is_last:
            tl.store(counters + tile_id, 0)  # for the next launch
            acc = _joined(pieces, is_row, SPLITS, NUM_SUMS * TILE)
            if IS_GATED:
                up_acc = _joined(pieces + TILE, is_row, SPLITS, NUM_SUMS * TILE)
    if is_last:
        is_element = is_row & (n < num_outputs)[None, :]
        _finish(out + row.to(tl.int64)[:, None] * out_row + n[None, :], acc, up_acc, is_element, HAS_RESIDUAL, IS_GATED)


@triton.jit
def _wait(
    weight, n, num_outputs, weight_row, begin, end,
    BLOCK_N: tl.constexpr, IS_GATED: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Lets the next launch begin, fetches weights, which no launch writes, into L2, and waits for those before."""
    gdc_launch_dependents()
    k = tl.minimum(begin + tl.arange(0, LINES) * LINE, end - 1)
    _fetch(weight + tl.minimum(n, num_outputs - 1).to(tl.int64)[:, None] * weight_row + k[None, :])
    if IS_GATED:
        _fetch(weight + (num_outputs + tl.minimum(n, num_outputs - 1)).to(tl.int64)[:, None] * weight_row + k[None, :])
    gdc_wait()


@triton.jit
def _fetch(places):
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
def _joined(pieces, is_row, SPLITS: tl.constexpr, STRIDE: tl.constexpr):
    """The sum over splits, in their order. From L2: an L1 knows nothing of what other multiprocessors wrote."""
    total = tl.load(pieces, mask=is_row, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, SPLITS):
        total += tl.load(pieces + split * STRIDE, mask=is_row, other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _finish(place, acc, up_acc, is_element, HAS_RESIDUAL: tl.constexpr, IS_GATED: tl.constexpr):
    """Rounds sums as the separate steps do, and stores them."""
    narrow: tl.constexpr = place.dtype.element_ty
    if HAS_RESIDUAL:
        acc += tl.load(place, mask=is_element, other=0.0).to(tl.float32)
    result = acc.to(narrow)
    if IS_GATED:
        gate = result.to(tl.float32)
        result = (gate / (1.0 + tl.exp(-gate))).to(narrow) * up_acc.to(narrow)
    tl.store(place, result, mask=is_element)


@triton.jit(do_not_specialize=["num_rows"])
def _vector_kernel(
    out, x, weight, num_rows, num_outputs, num_inner, x_row, weight_row, out_row,
    VECTOR: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_GATED: tl.constexpr, STAGES: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """BLOCK_N numbers of BLOCK_M rows. A thread sums up VECTOR numbers, one access, at a time; threads at the end."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, None, :]
    is_row = (row < num_rows)[:, None, None]
    is_output = (n < num_outputs)[None, :, None]
    x_place = x + row.to(tl.int64)[:, None, None] * x_row + k
    place = weight + n.to(tl.int64)[None, :, None] * weight_row + k
    up_place = place + num_outputs.to(tl.int64) * weight_row
    acc = tl.zeros([BLOCK_M, BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    up_acc = acc
    if LINES > 0:
        _wait(weight, n, num_outputs, weight_row, 0, num_inner, BLOCK_N, IS_GATED, LINE, LINES)
    for first in tl.range(0, num_inner, BLOCK_K, num_stages=STAGES):
        is_inner = first + k < num_inner
        tile = _weights(place + first, is_output, is_inner, EVEN_N, EVEN_K)
        if IS_GATED:
            up_tile = _weights(up_place + first, is_output, is_inner, EVEN_N, EVEN_K)
        if EVEN_K:
            rows = tl.load(x_place + first, mask=is_row, other=0.0, eviction_policy="evict_last").to(tl.float32)
        else:
            is_number = is_row & is_inner
            rows = tl.load(x_place + first, mask=is_number, other=0.0, eviction_policy="evict_last").to(tl.float32)
        acc += _sums(rows, tile, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR)
        if IS_GATED:
            up_acc += _sums(rows, up_tile, BLOCK_M, BLOCK_N, BLOCK_K, VECTOR)
    total = tl.sum(acc, axis=2)
    up_total = tl.sum(up_acc, axis=2)
    is_element = (row < num_rows)[:, None] & (n < num_outputs)[None, :]
    result = out + row.to(tl.int64)[:, None] * out_row + n[None, :]
    _finish(result, total, up_total, is_element, HAS_RESIDUAL, IS_GATED)


@triton.jit
def _sums(
    rows, tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr
):  # fmt: skip
    """[M, 1, K] * [1, N, K], each VECTOR of them summed up -> [M, N, K / VECTOR]"""
    products = rows * tile.to(tl.float32)
    return tl.sum(tl.reshape(products, [BLOCK_M, BLOCK_N, BLOCK_K // VECTOR, VECTOR]), axis=3)

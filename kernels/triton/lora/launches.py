"""Launches of LoRA for adapters in slots: the lists of a step, shrink, and the two forms of expand.

Their twins are in `kernels/reference/lora_slots.py`; the kernels, and how they work, are in `kernels.py`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import triton

from ...layout.layer_options import Activation
from ...layout.lora_lists import LoraLists, LoraWeights, chunk_size, num_chunks, num_sums
from ..launch import check_dtype, early_launch, next_power_of_2
from .kernels import add_kernel, gated_kernel, group_kernel, shrink_kernel

GROUPED_AT_ONCE = 64  # tokens of the sort: 4,096 comparisons, 32 a thread
TILES_AT_ONCE = 1024  # of all keys
MOST_RANKS = 64  # of a program
SHRINK_BYTES = 256  # of a row of x at a time; without matrix instructions, as in f32, a product takes more registers
ADD_N, GATED_N = 128, 64  # outputs of a program: with 16 or 32 tokens, 16 or 32 sums a thread
TILE_PROGRAMS = 16  # that share the tiles of a block of outputs


def group_tokens(adapters: Tensor, lists: LoraLists) -> None:
    """See `LoraKernels.group_tokens`."""
    assert len(adapters) == lists.num_tokens and adapters.dtype == torch.int32
    group_kernel[(1,)](
        adapters, lists.order, lists.tiles, lists.counts, lists.begins, lists.num_tokens,
        NUM_SLOTS=lists.num_slots, KEYS=len(lists.begins), TOKENS=lists.tile_tokens, BLOCK=GROUPED_AT_ONCE,
        LANES=max(1, min(8, TILES_AT_ONCE // len(lists.begins))),
        enable_fp_fusion=True, **early_launch(adapters.device),
    )  # fmt: skip


def lora_shrink(x: Tensor, weights: LoraWeights, lists: LoraLists) -> Tensor:
    """See `LoraKernels.lora_shrink`. A program for each tile, block of ranks, and chunk of K in a small step."""
    _check(x, weights, lists)
    num_parts, max_rank = weights.a.shape[1:3]
    width, count = num_parts * max_rank, num_sums(lists, weights.num_inner)
    sums = torch.empty((count, len(x), width), dtype=torch.float32, device=x.device)
    if not len(x):
        return sums
    block_r, size = _rank_block(max_rank), chunk_size(weights.num_inner)
    at_once = SHRINK_BYTES // x.itemsize // (2 if x.dtype == torch.float32 else 1)
    block_k = min(at_once, next_power_of_2(max(16, weights.num_inner)))
    programs = _tile_programs(lists)
    shrink_kernel[(programs, num_parts * triton.cdiv(max_rank, block_r), count)](
        sums, x, weights.a, weights.ranks, lists.order, lists.tiles, lists.counts, programs,
        weights.num_inner, x.stride(0), weights.a.stride(0), weights.ranks.stride(0), sums.stride(0), size,
        PARTS=num_parts, RANK=max_rank, CHUNKS=triton.cdiv(num_chunks(weights.num_inner), count),
        EVEN_K=weights.num_inner % block_k == 0, STAGES=3, BLOCK_M=lists.tile_tokens, BLOCK_R=block_r, BLOCK_K=block_k,
        PRECISION=_precision(x), enable_fp_fusion=True, **early_launch(x.device),
    )  # fmt: skip
    return sums


def lora_add(out: Tensor, sums: Tensor, weights: LoraWeights, lists: LoraLists) -> None:
    """See `LoraKernels.lora_add`. A program for each block of outputs, and some tiles."""
    _check(out, weights, lists)
    if not len(out):
        return
    sizes = weights.sizes
    programs = _tile_programs(lists)
    add_kernel[(sum(triton.cdiv(size, ADD_N) for size in sizes), programs)](
        out, sums, weights.b, weights.ranks, lists.order, lists.tiles, lists.counts, programs,
        out.shape[1], sizes[0], sizes[1] if len(sizes) > 1 else 0, out.stride(0), weights.b.stride(0),
        weights.ranks.stride(0), sums.stride(0), PARTS=len(sizes), BLOCK_N=ADD_N,
        **_of_expand(out, sums, weights, lists),
    )  # fmt: skip


def lora_gated(
    product: Tensor,
    sums: Tensor,
    weights: LoraWeights,
    lists: LoraLists,
    activation: Activation,
    alpha: float = 1.702,
    limit: float = 7.0,
) -> Tensor:
    """See `LoraKernels.lora_gated`. A program for each block of outputs, and some tiles."""
    _check(product, weights, lists)
    num_outputs = product.shape[1] // 2
    assert weights.sizes == (num_outputs, num_outputs), "a linear with a gate has two equal parts"
    out = torch.empty((len(product), num_outputs), dtype=product.dtype, device=product.device)
    if not len(product):
        return out
    programs = _tile_programs(lists)
    gated_kernel[(triton.cdiv(num_outputs, GATED_N), programs)](
        out, product, sums, weights.b, weights.ranks, lists.order, lists.tiles, lists.counts, programs, num_outputs,
        product.stride(0), weights.b.stride(0), weights.ranks.stride(0), sums.stride(0), alpha, limit,
        BLOCK_N=GATED_N, ACTIVATION=activation, **_of_expand(product, sums, weights, lists),
    )  # fmt: skip
    return out


def _check(x: Tensor, weights: LoraWeights, lists: LoraLists) -> None:
    check_dtype(x)
    assert weights.a.dtype == weights.b.dtype == x.dtype and x.stride(1) == 1 and len(x) == lists.num_tokens
    assert weights.a.stride(3) == weights.b.stride(2) == weights.ranks.stride(1) == 1


def _of_expand(x: Tensor, sums: Tensor, weights: LoraWeights, lists: LoraLists) -> dict[str, Any]:
    return dict(
        RANK=weights.max_rank, SUMS=len(sums), BLOCK_M=lists.tile_tokens,
        BLOCK_R=min(32, _rank_block(weights.max_rank)), PRECISION=_precision(x),
        enable_fp_fusion=True, **early_launch(x.device),
    )  # fmt: skip


def _rank_block(max_rank: int) -> int:
    """Ranks of a program: at least the 16 that matrix instructions take."""
    return max(16, min(MOST_RANKS, next_power_of_2(max_rank)))


def _tile_programs(lists: LoraLists) -> int:
    return min(TILE_PROGRAMS, lists.most_tiles)


def _precision(x: Tensor) -> str:
    """Of f32 factors; the numbers of other types are exact in TF32."""
    return "ieee" if x.dtype == torch.float32 else "tf32"

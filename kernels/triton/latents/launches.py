"""Launches of attention over latents: the prologue, and attention with one head of keys for all heads of queries.

Their twins are in `kernels/reference/latents.py`. The products that take latents in and out are the library's.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton

from ...layout.work_lists import AttentionPlan, AttentionShape
from ...reference.latents import latent_values
from ..attention import attend
from ..attention_plan import plan_attention
from ..launch import check_dtype, early_launch, next_power_of_2
from .prologue import latent_prologue_kernel

__all__ = ["latent_attention", "latent_prologue", "latent_values"]

HEADS_PER_PROGRAM = 16  # with 64 numbers each, 8 a thread


def latent_prologue(
    q: Tensor,
    latents: Tensor,
    rotated: Tensor,
    key_up: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """See `LatentKernels.latent_prologue`. A program for each token and 16 heads, and one that writes the cache."""
    check_dtype(q)
    num_tokens, num_heads, _ = q.shape
    plain, rank = key_up.shape[1:]
    extra = rotated.shape[1]
    assert q.stride(2) == latents.stride(1) == rotated.stride(1) == 1 and cache.dtype == q.dtype
    absorbed = torch.empty((num_tokens, num_heads, rank + extra), dtype=q.dtype, device=q.device)
    absorbed[..., :rank] = torch.bmm(q[..., :plain].transpose(0, 1), key_up).transpose(0, 1)
    heads = min(HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    latent_prologue_kernel[(num_tokens, triton.cdiv(num_heads, heads) + 1)](
        absorbed, q, latents, rotated, cos, sin, positions, cache, slot_mapping, num_heads, plain,
        q.stride(0), q.stride(1), absorbed.stride(0), absorbed.stride(1), latents.stride(0), rotated.stride(0),
        cos.stride(0), sin.stride(0), cache.stride(0), cache.stride(2), cache.stride(3),
        B=cache.shape[2], R=rank, BLOCK_R=next_power_of_2(rank), HALF=extra // 2,
        BLOCK_HALF=next_power_of_2(extra // 2), BLOCK_H=heads, enable_fp_fusion=True, **early_launch(q.device),
    )  # fmt: skip
    return absorbed


def latent_attention(
    q: Tensor,
    cache: Tensor,
    rank: int,
    block_tables: Tensor,
    query_starts: Tensor | None,
    lengths: Tensor,
    scale: float,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """See `LatentKernels.latent_attention`. Heads are in groups that fit a tile, all with the same keys."""
    check_dtype(q)
    num_tokens, num_heads, width = q.shape
    if plan is None:
        shape = AttentionShape(num_heads, 1, rank, q.dtype, cache.dtype, extra_dim=width - rank)
        plan = plan_attention(shape, lengths, query_starts, num_tokens)
    plan = plan.ready()
    out = torch.empty((num_tokens, num_heads, rank), dtype=q.dtype, device=q.device)
    for lists in filter(None, (plan.decode, plan.extend)):
        work = lists[None]
        keys = cache.expand(-1, work.division.num_groups, -1, -1)
        attend(
            out, work, plan.partials, q, keys, keys, block_tables, scale, None, None, None, None,
            extra_dim=width - rank,
        )  # fmt: skip
    return out

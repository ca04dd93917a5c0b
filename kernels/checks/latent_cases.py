"""The launches of attention over latents that the checks compile: DeepSeek V3, V2-Lite, GLM-4.7 Flash and MiniCPM3."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ..layout.work_lists import AttentionShape
from ..triton.attention_plan import plan_attention
from ..triton.latents import launches
from .compile_cases import NUM_PROCESSORS, TYPE_NAMES, CompileCase

SIZES = {  # heads, numbers of a latent, of the rotated key, and of a head that are not rotated
    "DeepSeek-V3": (128, 512, 64, 128),
    "V2-Lite": (16, 512, 64, 128),
    "GLM-4.7 Flash": (20, 512, 64, 192),
    "MiniCPM3": (40, 256, 32, 64),
}
Kind = Literal["decode", "extend"]


def latent_cases(dtype: torch.dtype) -> list[CompileCase]:
    """Decode, and prompts in a mixed batch, with their lists; and the prologue."""
    name = TYPE_NAMES[dtype]
    kinds: tuple[Kind, ...] = ("decode", "extend")
    stack: Literal["f32", "wide"] = "f32" if dtype == torch.float32 else "wide"
    return [
        *(
            CompileCase(
                f"latents {kind} {model} {name}", partial(_attend, kind, *sizes, dtype), copies_ahead=True, stack=stack
            )
            for model, sizes in SIZES.items()
            for kind in kinds
        ),
        *(
            CompileCase(f"latents prologue {model} {name}", partial(_prologue, *sizes, dtype))
            for model, sizes in SIZES.items()
        ),
    ]


def _attend(kind: Kind, heads: int, rank: int, extra: int, _: int, dtype: torch.dtype) -> Tensor:
    num_rows = num_tokens = 64
    lengths, starts = _meta(num_rows, dtype=torch.int32), _meta(num_rows + 1, dtype=torch.int32)
    q, blocks = _meta(num_tokens, heads, rank + extra, dtype=dtype), _meta(num_rows, 512, dtype=torch.int32)
    cache = _cache(rank + extra, dtype)
    shape = AttentionShape(heads, 1, rank, dtype, dtype, extra_dim=extra)
    query_starts = None if kind == "decode" else starts
    plan = plan_attention(shape, lengths, query_starts, num_tokens, NUM_PROCESSORS)
    return launches.latent_attention(q, cache, rank, blocks, query_starts, lengths, 0.1, plan)


def _prologue(heads: int, rank: int, extra: int, plain: int, dtype: torch.dtype) -> Tensor:
    num_tokens, longs = 64, _meta(64, dtype=torch.int64)
    table = _meta(4096, extra // 2, dtype=torch.float32)
    joined = _meta(num_tokens, rank + extra, dtype=dtype)
    return launches.latent_prologue(
        _meta(num_tokens, heads, plain + extra, dtype=dtype), joined[:, :rank].contiguous(), joined[:, rank:],
        _meta(heads, plain, rank, dtype=dtype), table, table, longs, _cache(rank + extra, dtype), longs,
    )  # fmt: skip


def _cache(width: int, dtype: torch.dtype) -> Tensor:
    return _meta(1024, 4, 1, 1, 16, width, dtype=dtype)[:, 0, 0]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

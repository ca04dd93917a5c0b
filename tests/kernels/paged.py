"""Paged caches to test attention on, and what attention is: float64, dense, one query at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LAYOUTS = ("layer-major", "block-major", "head-major", "token-major")


@dataclass(frozen=True, slots=True, eq=False)
class PagedCase:
    """A step over S sequences whose blocks lie scattered; every slot and table entry not in use is poisoned."""

    q: Tensor  # [T, H, D]
    k_cache: Tensor  # [N, G, B, D], a view; NaN where no token is
    v_cache: Tensor
    block_tables: Tensor  # [S, M] i32; past a sequence's blocks: ids far out of range
    query_starts: Tensor  # [S + 1] i32
    lengths: Tensor  # [S] i32
    keys: list[Tensor]  # per sequence [L, G, D]
    values: list[Tensor]


def make_case(
    num_new: list[int],
    lengths: list[int],
    *,
    num_groups: int = 2,
    group: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    layout: str = "layer-major",
    is_scattered: bool = True,
    seed: int = 0,
) -> PagedCase:
    """Sequence s holds `lengths[s]` tokens, the last `num_new[s]` of them new. Blocks lie anywhere, or follow each
    other from block 1 on."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // block_size) for length in lengths]
    spare = 3
    total = sum(num_blocks) + spare
    k_cache, v_cache = empty_caches(total, num_groups, block_size, head_dim, dtype, layout)
    block_tables = torch.full((len(lengths), max(num_blocks, default=0) + 1), -(1 << 30), dtype=torch.int32)
    block_tables[:, 1::2] = (1 << 31) - 1
    ids = torch.randperm(total, generator=generator) if is_scattered else torch.arange(1, total)
    keys, values = [], []
    for sequence, length in enumerate(lengths):
        own, ids = ids[: num_blocks[sequence]], ids[num_blocks[sequence] :]
        block_tables[sequence, : len(own)] = own
        for cache, kept in ((k_cache, keys), (v_cache, values)):
            tokens = torch.randn(length, num_groups, head_dim, generator=generator).to(dtype)
            kept.append(tokens)
            for position in range(length):
                cache[own[position // block_size], :, position % block_size] = tokens[position]
    q = torch.randn(sum(num_new), num_groups * group, head_dim, generator=generator).to(dtype)
    starts = torch.tensor([0, *num_new]).cumsum(0).int()
    return PagedCase(q, k_cache, v_cache, block_tables, starts, torch.tensor(lengths, dtype=torch.int32), keys, values)


def empty_caches(
    num_blocks: int, num_groups: int, block_size: int, head_dim: int, dtype: torch.dtype, layout: str
) -> tuple[Tensor, Tensor]:
    """One layer's views [N, G, B, D] of a cache full of NaN, as four engines might lay it out."""
    if layout == "layer-major":  # [2, N, G, B, D]
        kv = torch.full((2, num_blocks, num_groups, block_size, head_dim), float("nan"), dtype=dtype)
        return kv[0], kv[1]
    if layout == "block-major":  # [N, layers, 2, G, B, D]
        kv = torch.full((num_blocks, 3, 2, num_groups, block_size, head_dim), float("nan"), dtype=dtype)
        return kv[:, 1, 0], kv[:, 1, 1]
    if layout == "head-major":  # [2, G, N, B, D]
        kv = torch.full((2, num_groups, num_blocks, block_size, head_dim), float("nan"), dtype=dtype)
        return kv[0].transpose(0, 1), kv[1].transpose(0, 1)
    assert layout == "token-major"  # [N, B, 2, G, D]
    kv = torch.full((num_blocks, block_size, 2, num_groups, head_dim), float("nan"), dtype=dtype)
    return kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)


def dense_attention(
    case: PagedCase,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """[T, H, D] f64 by the definition."""
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    group = case.q.shape[1] // case.k_cache.shape[1]
    starts = case.query_starts.tolist()
    for sequence, length in enumerate(case.lengths.tolist()):
        keys = case.keys[sequence].double().repeat_interleave(group, dim=1)  # [L, H, D]
        values = case.values[sequence].double().repeat_interleave(group, dim=1)
        num_new = starts[sequence + 1] - starts[sequence]
        for j in range(num_new if length else 0):
            end = length - num_new + j + 1
            first = 0 if window is None else max(0, end - window)
            if chunk is not None:
                first = max(first, (end - 1) // chunk * chunk)
            row = starts[sequence] + j
            scores = torch.einsum("hd,lhd->hl", case.q[row].double(), keys[first:end]) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if alibi is not None:
                scores += alibi.double()[:, None] * (torch.arange(first, end) - (end - 1))
            total = scores.logsumexp(-1, keepdim=True)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.double()[:, None])
            out[row] = torch.einsum("hl,lhd->hd", (scores - total).exp(), values[first:end])
    return out

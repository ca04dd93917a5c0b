"""Paged attention with soft caps and 8-bit caches, which PyTorch's SDPA lacks. Plain, in f32, not fast.

`attention.py` calls it in these cases, where it is the oracle of `kernels/triton/attention.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCORED_ROWS = 1024  # queries x heads scored at a time: 32 MiB of scores over 8k tokens


def is_plain(
    q: Tensor, k_cache: Tensor, soft_cap: float | None, k_scale: Tensor | None, v_scale: Tensor | None
) -> bool:
    """Whether SDPA suffices: no soft cap, and a cache of the type of q."""
    return soft_cap is None and k_scale is None and v_scale is None and k_cache.dtype == q.dtype


def attend_in_f32(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Tensor:
    """As `paged_attention` in `attention.py`. One sequence at a time, SCORED_ROWS of its query rows."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = query_starts.tolist()
    for sequence, length in enumerate(lengths.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        if not length or start == end:
            continue
        keys = _tokens(k_cache, block_tables[sequence], length, k_scale)  # [G, L, D]
        values = _tokens(v_cache, block_tables[sequence], length, v_scale)
        for first in range(start, end, max(1, SCORED_ROWS // q.shape[1])):
            last = min(end, first + max(1, SCORED_ROWS // q.shape[1]))
            queries = q[first:last].float().reshape(last - first, len(keys), -1, q.shape[2])  # [n, G, R, D]
            scores = torch.einsum("ngrd,gld->ngrl", queries, keys).mul_(scale)
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            seen_by = torch.arange(length - (end - first), length - (end - last)).unsqueeze(1)
            age = seen_by - torch.arange(length)  # [n, L]
            is_seen = (age >= 0) & (age < (length if window is None else window))
            scores.masked_fill_(~is_seen[:, None, None].to(q.device), float("-inf"))
            seen = torch.einsum("ngrl,gld->ngrd", scores.softmax(-1), values)
            out[first:last] = seen.flatten(1, 2).to(q.dtype)
    return out


def _tokens(cache: Tensor, block_table: Tensor, length: int, scale: Tensor | None) -> Tensor:
    """Keys or values of a sequence's first L tokens, [G, L, D] f32.

    NOTE: reads all of them, also with a window, so the table must hold blocks for all.
    """
    block_size = cache.shape[2]
    blocks = cache[block_table[: -(-length // block_size)].long()]  # [blocks, G, B, D]
    tokens = blocks.transpose(0, 1).flatten(1, 2)[:, :length].float()
    return tokens if scale is None else tokens.mul_(scale[:, None, None])

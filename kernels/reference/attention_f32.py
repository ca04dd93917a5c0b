"""Paged attention with what PyTorch's SDPA lacks: soft caps, ALiBi, chunks, 8-bit caches. Plain, in f32, not fast.

`attention.py` calls it in these cases, where it is the oracle of `kernels/triton/attention.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .split_context import can_see_parts

SCORED_ROWS = 1024  # queries x heads scored at a time: 32 MiB of scores over 8k tokens


class F32Options(NamedTuple):
    """The arguments of `paged_attention` by these names."""

    soft_cap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    chunk: int | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    def are_plain(self, q: Tensor, k_cache: Tensor) -> bool:
        """Whether SDPA suffices: none of them, but for sinks where it returns sums, and a cache of the type of q."""
        is_plain = all(option is None for option in self._replace(sinks=None))
        return is_plain and k_cache.dtype == q.dtype and (self.sinks is None or can_see_parts(q.device))


def attend_in_f32(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    options: F32Options,
) -> Tensor:
    """As `paged_attention` in `attention.py`. One sequence at a time, SCORED_ROWS of its query rows."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = query_starts.tolist()
    for sequence, length in enumerate(lengths.tolist()):
        start, end = starts[sequence], starts[sequence + 1]
        if not length or start == end:
            continue
        first_block = _oldest(length - (end - start), window, options.chunk) // k_cache.shape[2]
        first_key = first_block * k_cache.shape[2]
        keys = _tokens(k_cache, block_tables[sequence, first_block:], length - first_key, options.k_scale)  # [G, L, D]
        values = _tokens(v_cache, block_tables[sequence, first_block:], length - first_key, options.v_scale)
        key_positions = torch.arange(first_key, length)
        for first in range(start, end, max(1, SCORED_ROWS // q.shape[1])):
            last = min(end, first + max(1, SCORED_ROWS // q.shape[1]))
            positions = torch.arange(length - (end - first), length - (end - last))
            queries = q[first:last].float().reshape(last - first, len(keys), -1, q.shape[2])  # [n, G, R, D]
            scores = torch.einsum("ngrd,gld->ngrl", queries, keys).mul_(scale)
            weights = _weights(scores, positions, key_positions, window, options)
            out[first:last] = torch.einsum("ngrl,gld->ngrd", weights, values).flatten(1, 2).to(q.dtype)
    return out


def _oldest(position: int, window: int | None, chunk: int | None) -> int:
    """The first position that the query at `position` sees."""
    return max(0 if window is None else position + 1 - window, 0 if chunk is None else position // chunk * chunk, 0)


def _weights(
    scores: Tensor, positions: Tensor, key_positions: Tensor, window: int | None, options: F32Options
) -> Tensor:
    """Softmax of scores [n, G, R, L] of queries at `positions` [n]; may overwrite `scores`."""
    if options.soft_cap is not None:
        scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    age = positions[:, None] - key_positions  # [n, L]
    if options.alibi is not None and options.alibi.dim() == 2:
        scores = scores + options.alibi[:, key_positions.to(scores.device)].view(*scores.shape[1:])  # [G, R, L]
    elif options.alibi is not None:
        slopes = options.alibi.view(*scores.shape[1:3], 1)  # [G, R, 1]
        scores = scores - slopes * age[:, None, None].to(scores.device)
    is_hidden = age < 0
    if window is not None:
        is_hidden |= age >= window
    if options.chunk is not None:
        is_hidden |= positions[:, None] // options.chunk != key_positions // options.chunk
    scores.masked_fill_(is_hidden[:, None, None].to(scores.device), float("-inf"))
    if options.sinks is None:
        return scores.softmax(-1)
    sinks = options.sinks.view(*scores.shape[1:3], 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def _tokens(cache: Tensor, block_table: Tensor, length: int, scale: Tensor | None) -> Tensor:
    """Keys or values of the first L tokens of a table, [G, L, D] f32."""
    block_size = cache.shape[2]
    blocks = cache[block_table[: -(-length // block_size)].long()]  # [blocks, G, B, D]
    tokens = blocks.transpose(0, 1).flatten(1, 2)[:, :length].float()
    return tokens if scale is None else tokens.mul_(scale[:, None, None])

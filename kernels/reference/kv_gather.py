"""Reads a paged cache as dense keys and values, with few calls for each bucket of rows.

`attention_plans.py` decides which rows make a bucket.

C rows of a bucket, N blocks of B tokens, G key/value heads, D head size.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class GatherBucket(NamedTuple):
    """C rows whose keys and values are gathered into one workspace of L' = blocks * B tokens a row."""

    rows: Tensor | None  # [C] i64 rows of q; None = all of q, in order
    sources: Tensor | None  # [C * G * blocks] i64 rows of `_block_rows`; None = the cache's layout has no such rows
    blocks: Tensor  # [C, blocks] i64 block ids, all valid
    start: int  # tokens [start, end) of the workspace are used: L = end - start
    end: int
    mask: Tensor | None = None  # [C, 1, 1, L] of q's type, added to scores; None = all rows see all L tokens
    unwritten: Tensor | None = None  # i64 tokens of the workspace, counted in [C, G, L'], that may hold NaN
    run: int | None = None  # first block of the only row, if its blocks follow each other: they are read in place


def gather(k_cache: Tensor, v_cache: Tensor, bucket: GatherBucket) -> tuple[Tensor, Tensor]:
    """Keys and values of a bucket, [C, G, L, D] each; tokens never written are zero. Copies, or views for a `run`.

    Where one cache is both, as with latents, they are one tensor.
    """
    if v_cache is k_cache:
        both = _gathered(k_cache, bucket)
        return both, both
    return _gathered(k_cache, bucket), _gathered(v_cache, bucket)


def _gathered(cache: Tensor, bucket: GatherBucket) -> Tensor:
    """One of keys and values, [C, G, L, D]."""
    if bucket.run is not None:
        return _in_place(cache, bucket)
    num_groups, block_size, head_dim = cache.shape[1:]
    num_rows, num_blocks = bucket.blocks.shape
    num_tokens = num_blocks * block_size
    if bucket.sources is not None:
        found = _block_rows(cache).index_select(0, bucket.sources)
    else:
        found = cache[bucket.blocks].transpose(1, 2).reshape(-1, head_dim)
    if bucket.unwritten is not None:
        found.view(-1, head_dim).index_fill_(0, bucket.unwritten, 0.0)
    found = found.view(num_rows, num_groups, num_tokens, head_dim)
    is_all = bucket.start == 0 and bucket.end == num_tokens
    return found if is_all else found[:, :, bucket.start : bucket.end]


def run_of(k_cache: Tensor, v_cache: Tensor, blocks: Tensor) -> int | None:
    """The first of `blocks` [C, blocks] if there is one row and its tokens are consecutive in memory, else None.

    A sequence that runs alone mostly has such blocks. Reading them in place saves a copy of its whole context in every
    step: 90 us a layer at 150 tokens of 3 heads (bf16, D = 64, one 2.5 GHz core), and in proportion for longer ones.
    """
    for cache in (k_cache, v_cache):
        if cache.stride(0) != cache.shape[2] * cache.stride(2) or cache.stride(3) != 1:
            return None
    ids = blocks.cpu().numpy()
    first = int(ids[0, 0]) if len(ids) == 1 else -1
    return first if first >= 0 and (ids[0] == np.arange(first, first + ids.shape[1])).all() else None


def _in_place(cache: Tensor, bucket: GatherBucket) -> Tensor:
    """The tokens of a `run` as a view, [1, G, L, D]."""
    assert bucket.run is not None
    block_stride, group_stride, token_stride, _ = cache.stride()
    offset = cache.storage_offset() + bucket.run * block_stride + bucket.start * token_stride
    size = (1, cache.shape[1], bucket.end - bucket.start, cache.shape[3])
    return cache.as_strided(size, (block_stride, group_stride, token_stride, 1), offset)


def rows_to_gather(k_cache: Tensor, v_cache: Tensor, blocks: Tensor) -> Tensor | None:
    """The rows of `_block_rows` for block ids [C, blocks], in the order [C, G, blocks]; None if the layout has none.

    One index_select of them lays out keys as SDPA needs them, 6 times faster than `cache[blocks].transpose(1, 2)`.
    """
    grid = _grid(k_cache)
    if grid is None or grid != _grid(v_cache):
        return None
    unit, block_stride, group_stride = grid
    group = torch.arange(k_cache.shape[1], device=blocks.device)
    rows = blocks.unsqueeze(1) * (block_stride // unit) + group.unsqueeze(1) * (group_stride // unit)
    return rows.reshape(-1)


def _grid(cache: Tensor) -> tuple[int, int, int] | None:
    """Strides of `_block_rows`, of blocks and of heads, in elements; None if a (block, head) tile is not one span."""
    num_blocks, num_groups, _, head_dim = cache.shape
    if cache.stride()[2:] != (head_dim, 1):
        return None
    block_stride = cache.stride(0) if num_blocks > 1 else 0
    group_stride = cache.stride(1) if num_groups > 1 else 0
    return math.gcd(block_stride, group_stride) or 1, block_stride, group_stride


def _block_rows(cache: Tensor) -> Tensor:
    """The cache as rows of one (block, head) tile each, [rows, B * D].

    Rows of other layers may lie in between. If heads are not whole tiles apart, rows overlap.
    """
    num_blocks, num_groups, block_size, head_dim = cache.shape
    grid = _grid(cache)
    assert grid is not None
    unit, block_stride, group_stride = grid
    num_rows = ((num_blocks - 1) * block_stride + (num_groups - 1) * group_stride) // unit + 1
    return cache.as_strided((num_rows, block_size * head_dim), (unit, 1))

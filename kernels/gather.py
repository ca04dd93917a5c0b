"""Reading a paged cache into dense workspaces in few calls: what is gathered together, from where, and what is masked.

Serves the attentions of `reference.py`; knows layouts and lengths, nothing of queries.

C rows of a bucket, N blocks of B tokens, G key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]

# One more bucket costs about 120 us of calls, as much as this many padded key elements (measured on 2 AVX-512 cores,
# 9 heads on 3, D = 64, bf16 and f32).
MAX_PADDING_ELEMENTS = 1 << 17
# Keys and values of a bucket. Past it fresh pages cost more than another bucket: 32 rows of 512 tokens in f32 take
# 4.7 ms in such pieces, 5.5 ms at once.
MAX_WORKSPACE_BYTES = 8 << 20


class Bucket(NamedTuple):
    """C rows whose keys and values are gathered into one workspace of L' = blocks * B tokens a row."""

    rows: Tensor | None  # [C] i64 rows of q; None = all of q, in order
    sources: Tensor | None  # [C * G * blocks] i64 rows of `_block_rows`; None = the cache's layout has no such rows
    blocks: Tensor  # [C, blocks] i64 block ids, all valid
    start: int  # tokens [start, end) of the workspace are used: L = end - start
    end: int
    mask: Tensor | None = None  # [C, 1, 1, L] as q, added to scores; None = all rows see all L tokens
    unwritten: Tensor | None = None  # i64 tokens of the workspace, counted in [C, G, L'], that may hold NaN


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """How the rows of one decode step are read; the same for all layers of one window and layout."""

    buckets: tuple[Bucket, ...]
    is_whole: bool  # one bucket has all rows in order: its result is the result


def plan_decode(
    k_cache: Tensor, v_cache: Tensor, block_tables: Tensor, lengths: Tensor, window: int | None, dtype: torch.dtype
) -> DecodePlan:
    """The buckets of a decode step; masks are of `dtype`. Arguments as in `paged_decode`.

    Raises ValueError if a length exceeds its block table.
    """
    num_groups, block_size, head_dim = k_cache.shape[1:]
    device = k_cache.device
    tables, ends = block_tables.cpu().numpy(), lengths.cpu().numpy().astype(np.int64)
    starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    first_blocks = starts // block_size
    num_blocks = -(-ends // block_size) - first_blocks
    if (first_blocks + num_blocks).max(initial=0) > tables.shape[1]:
        capacity = tables.shape[1] * block_size
        raise ValueError(f"a sequence of {ends.max()} tokens exceeds its block table, which has room for {capacity}")
    token_bytes = 2 * num_groups * head_dim * k_cache.element_size()
    max_padding = MAX_PADDING_ELEMENTS // (num_groups * head_dim)
    buckets = []
    for rows in _rows_that_go_together(num_blocks, block_size, max_padding, MAX_WORKSPACE_BYTES // token_bytes):
        blocks = torch.from_numpy(_block_ids(tables, rows, first_blocks[rows], num_blocks[rows])).to(device)
        offset = first_blocks[rows] * block_size
        begin, end = starts[rows] - offset, ends[rows] - offset  # [C] what each row sees of its L' tokens
        low, high = int(begin.min()), int(end.max())
        mask = unwritten = None
        if begin.max() > low or end.min() < high:
            token = np.arange(low, high)
            is_hidden = (token < begin[:, None]) | (token >= end[:, None])  # [C, L]
            mask = torch.from_numpy(np.where(is_hidden, np.float32(-np.inf), np.float32(0)))[:, None, None]
            mask = mask.to(device, dtype)
            tokens = _unwritten_tokens(end, high, block_size, blocks.shape[1], num_groups)
            unwritten = torch.from_numpy(tokens).to(device)
        chosen = None if len(rows) == len(ends) else torch.from_numpy(rows).to(device)
        sources = rows_to_gather(k_cache, v_cache, blocks)
        buckets.append(Bucket(chosen, sources, blocks, low, high, mask, unwritten))
    return DecodePlan(tuple(buckets), is_whole=len(buckets) == 1 and buckets[0].rows is None)


def _rows_that_go_together(num_blocks: Ints, block_size: int, max_padding: int, max_tokens: int) -> list[Ints]:
    """Row numbers of each bucket: longest rows first, a new bucket when padding or size would pass its limit in tokens.

    Rows without blocks are in none. If one bucket holds all rows, they stay in order.
    """
    order = np.argsort(-num_blocks, kind="stable")
    order = order[: np.count_nonzero(num_blocks)]
    buckets = []
    while len(order):
        longest = num_blocks[order[0]]
        padding = np.cumsum(longest - num_blocks[order]) * block_size
        fitting = int(np.searchsorted(padding, max_padding, side="right"))
        count = max(1, min(fitting, max_tokens // int(longest * block_size)))
        buckets.append(np.sort(order[:count]))
        order = order[count:]
    return buckets


def _block_ids(tables: npt.NDArray[np.int32], rows: Ints, first_blocks: Ints, num_blocks: Ints) -> Ints:
    """[C, blocks] i64: each row's blocks, then as padding one that is written from end to end and so holds no NaN."""
    column = np.arange(num_blocks.max())
    is_own = column < num_blocks[:, None]
    longest = num_blocks.argmax()  # where there is padding it has two blocks or more, so its first one is full
    filler = tables[rows[longest], first_blocks[longest]]
    own = tables[rows[:, None], np.where(is_own, column, 0) + first_blocks[:, None]]
    ids: Ints = np.where(is_own, own, filler).astype(np.int64)
    return ids


def _unwritten_tokens(ends: Ints, high: int, block_size: int, num_blocks: int, num_groups: int) -> Ints:
    """Tokens of a workspace [C, G, L'] past a row's end, in its last block and before `high`: they may hold anything.

    They are set to zero, as a masked probability of 0 times NaN is NaN.
    """
    token = ends[:, None] + np.arange(block_size - 1)
    is_touched = (token < high) & (token // block_size == ((ends - 1) // block_size)[:, None])
    row, _ = np.nonzero(is_touched)
    group = np.arange(num_groups)[:, None]
    tokens: Ints = (row * num_groups + group) * (num_blocks * block_size) + token[is_touched]  # [G, tokens]
    return tokens.reshape(-1)


# ---- reading the cache ----------------------------------------------------------------------------------------------


def gather(k_cache: Tensor, v_cache: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
    """Keys and values of a bucket, [C, G, L, D] both, with zeros where nothing may be seen."""
    num_groups, block_size, head_dim = k_cache.shape[1:]
    num_rows, num_blocks = bucket.blocks.shape
    num_tokens = num_blocks * block_size
    halves = []
    for cache in (k_cache, v_cache):
        if bucket.sources is not None:
            half = _block_rows(cache).index_select(0, bucket.sources)
        else:
            half = cache[bucket.blocks].transpose(1, 2).reshape(-1, head_dim)
        if bucket.unwritten is not None:
            half.view(-1, head_dim).index_fill_(0, bucket.unwritten, 0.0)
        half = half.view(num_rows, num_groups, num_tokens, head_dim)
        is_all = bucket.start == 0 and bucket.end == num_tokens
        halves.append(half if is_all else half[:, :, bucket.start : bucket.end])
    return halves[0], halves[1]


def rows_to_gather(k_cache: Tensor, v_cache: Tensor, blocks: Tensor) -> Tensor | None:
    """Rows of `_block_rows` in the order [C, G, blocks], for ids [C, blocks]; None if the layout has no such rows.

    So that one index_select lays keys out as SDPA wants them: 6 times faster than `cache[blocks].transpose(1, 2)`.
    """
    stride = _rows_per_block(k_cache)
    if stride is None or stride != _rows_per_block(v_cache):
        return None
    group = torch.arange(k_cache.shape[1], device=blocks.device)
    return (blocks.unsqueeze(1) * stride + group.unsqueeze(1)).reshape(-1)


def _rows_per_block(cache: Tensor) -> int | None:
    """How many rows of `_block_rows` apart two blocks are; None where a (block, head) tile is not one span."""
    _, num_groups, block_size, head_dim = cache.shape
    block_stride, group_stride = cache.stride()[:2]
    if cache.stride()[2:] != (head_dim, 1):
        return None
    if num_groups == 1:
        return 1
    return None if block_stride % group_stride else block_stride // group_stride


def _block_rows(cache: Tensor) -> Tensor:
    """The cache as rows of one (block, head) tile each, [rows, B * D]; rows of other layers may lie in between."""
    num_blocks, num_groups, block_size, head_dim = cache.shape
    if cache.is_contiguous():
        return cache.view(-1, block_size * head_dim)
    row_stride = cache.stride(0) if num_groups == 1 else cache.stride(1)
    per_block = 1 if num_groups == 1 else cache.stride(0) // row_stride
    num_rows = (num_blocks - 1) * per_block + num_groups
    return cache.as_strided((num_rows, block_size * head_dim), (row_stride, 1))

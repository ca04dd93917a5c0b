"""Reading a paged cache as dense keys and values in few calls: what is gathered together, from where, what is masked.

Serves the attentions of `reference.py`; knows layouts and lengths, nothing of queries.

C rows of a bucket, N blocks of B tokens, G key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .shared_prefix import SharedPrefix, shared_prefixes

Ints = npt.NDArray[np.int64]

# One more bucket costs about 120 us of calls, as much as this many padded key elements (measured on 2 AVX-512 cores,
# 9 heads on 3, D = 64, bf16 and f32).
MAX_PADDING_ELEMENTS = 1 << 17
# Keys and values of a bucket. Past it fresh pages cost more than another bucket: 32 rows of 512 tokens in f32 take
# 4.7 ms in such pieces, 5.5 ms at once.
MAX_WORKSPACE_BYTES = 8 << 20
# Key elements that a shared prefix must save: seeing it apart costs about 400 us of calls (measured as above).
MIN_SHARED_ELEMENTS = 1 << 19


class Bucket(NamedTuple):
    """C rows whose keys and values are gathered into one workspace of L' = blocks * B tokens a row."""

    rows: Tensor | None  # [C] i64 rows of q; None = all of q, in order
    sources: Tensor | None  # [C * G * blocks] i64 rows of `_block_rows`; None = the cache's layout has no such rows
    blocks: Tensor  # [C, blocks] i64 block ids, all valid
    start: int  # tokens [start, end) of the workspace are used: L = end - start
    end: int
    mask: Tensor | None = None  # [C, 1, 1, L] as q, added to scores; None = all rows see all L tokens
    unwritten: Tensor | None = None  # i64 tokens of the workspace, counted in [C, G, L'], that may hold NaN
    run: int | None = None  # the one row's first block where all its tokens lie in a row: they are read in place


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """How the rows of one decode step are read; the same for all layers of one window and layout.

    A row of a shared prefix sees that, and in its bucket what comes after it.
    """

    buckets: tuple[Bucket, ...]
    is_whole: bool  # one bucket has all rows in order: its result is the result
    shared: tuple[Shared, ...] = ()


class Shared(NamedTuple):
    """A prefix that C rows have in common: `bucket` reads it as one row, [1, G, L, D]."""

    rows: Tensor | None  # [C] i64 rows of q; None = all of q, in order
    bucket: Bucket


def plan_decode(
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    window: int | None,
    dtype: torch.dtype,
    min_shared_elements: int | None = None,
) -> DecodePlan:
    """The buckets of a decode step; masks are of `dtype`. Arguments as in `paged_decode`.

    Prefixes that save `min_shared_elements` key elements are seen apart; None: no prefix is. Raises ValueError if a
    length exceeds its block table.
    """
    num_groups, block_size, head_dim = k_cache.shape[1:]
    device = k_cache.device
    tables, ends = block_tables.cpu().numpy(), lengths.cpu().numpy().astype(np.int64)
    starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    prefixes = []
    if window is None and min_shared_elements is not None:
        prefixes = shared_prefixes(tables, ends, block_size, min_shared_elements // (num_groups * head_dim))
    for rows, num_shared in prefixes:
        starts[rows] = num_shared * block_size
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
        run = run_of(k_cache, v_cache, blocks)
        sources = rows_to_gather(k_cache, v_cache, blocks) if run is None else None
        buckets.append(Bucket(chosen, sources, blocks, low, high, mask, unwritten, run))
    shared = tuple(_shared(k_cache, v_cache, tables, prefix) for prefix in prefixes)
    return DecodePlan(tuple(buckets), len(buckets) == 1 and buckets[0].rows is None, shared)


def _shared(k_cache: Tensor, v_cache: Tensor, tables: npt.NDArray[np.int32], prefix: SharedPrefix) -> Shared:
    ids = tables[prefix.rows[:1], : prefix.num_blocks].astype(np.int64)
    blocks = torch.from_numpy(ids).to(k_cache.device)  # [1, blocks]
    run = run_of(k_cache, v_cache, blocks)
    sources = rows_to_gather(k_cache, v_cache, blocks) if run is None else None
    bucket = Bucket(None, sources, blocks, 0, prefix.num_blocks * k_cache.shape[2], run=run)
    is_all = len(prefix.rows) == len(tables)
    return Shared(None if is_all else torch.from_numpy(prefix.rows).to(k_cache.device), bucket)


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
    """Keys and values of a bucket, [C, G, L, D] both, with zeros where nothing may be seen: copies, but for a run."""
    if bucket.run is not None:
        return _in_place(k_cache, bucket), _in_place(v_cache, bucket)
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


def run_of(k_cache: Tensor, v_cache: Tensor, blocks: Tensor) -> int | None:
    """The first of the blocks [C, blocks] if they are one row's and follow each other, in a layout in which their
    tokens then do too; else None.

    A sequence that runs alone mostly has such blocks. It saves copying its whole context in every step: 90 us a layer
    at 150 tokens of 3 heads (bf16, D = 64, one 2.5 GHz core), and in proportion to the context from there.
    """
    for cache in (k_cache, v_cache):
        if cache.stride(0) != cache.shape[2] * cache.stride(2) or cache.stride(3) != 1:
            return None
    ids = blocks.cpu().numpy()
    first = int(ids[0, 0]) if len(ids) == 1 else -1
    return first if first >= 0 and (ids[0] == np.arange(first, first + ids.shape[1])).all() else None


def _in_place(cache: Tensor, bucket: Bucket) -> Tensor:
    """[1, G, L, D], a view."""
    assert bucket.run is not None
    block_stride, group_stride, token_stride, _ = cache.stride()
    offset = cache.storage_offset() + bucket.run * block_stride + bucket.start * token_stride
    size = (1, cache.shape[1], bucket.end - bucket.start, cache.shape[3])
    return cache.as_strided(size, (block_stride, group_stride, token_stride, 1), offset)


def rows_to_gather(k_cache: Tensor, v_cache: Tensor, blocks: Tensor) -> Tensor | None:
    """Rows of `_block_rows` in the order [C, G, blocks], for ids [C, blocks]; None if the layout has no such rows.

    So that one index_select lays keys out as SDPA wants them: 6 times faster than `cache[blocks].transpose(1, 2)`.
    """
    grid = _grid(k_cache)
    if grid is None or grid != _grid(v_cache):
        return None
    unit, block_stride, group_stride = grid
    group = torch.arange(k_cache.shape[1], device=blocks.device)
    rows = blocks.unsqueeze(1) * (block_stride // unit) + group.unsqueeze(1) * (group_stride // unit)
    return rows.reshape(-1)


def _grid(cache: Tensor) -> tuple[int, int, int] | None:
    """How far apart rows of `_block_rows` begin, and blocks and heads, in elements; None where a (block, head) tile is
    not one span."""
    num_blocks, num_groups, _, head_dim = cache.shape
    if cache.stride()[2:] != (head_dim, 1):
        return None
    block_stride = cache.stride(0) if num_blocks > 1 else 0
    group_stride = cache.stride(1) if num_groups > 1 else 0
    return math.gcd(block_stride, group_stride) or 1, block_stride, group_stride


def _block_rows(cache: Tensor) -> Tensor:
    """The cache as rows of one (block, head) tile each, [rows, B * D]; rows of other layers may lie in between, and
    where heads are not whole tiles apart, rows overlap."""
    num_blocks, num_groups, block_size, head_dim = cache.shape
    grid = _grid(cache)
    assert grid is not None
    unit, block_stride, group_stride = grid
    num_rows = ((num_blocks - 1) * block_stride + (num_groups - 1) * group_stride) // unit + 1
    return cache.as_strided((num_rows, block_size * head_dim), (unit, 1))

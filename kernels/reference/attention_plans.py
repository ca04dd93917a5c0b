"""Plans how a step's contexts are read: buckets of rows, their blocks, masks and shared prefixes.

The attention kernels of `attention.py` make a plan once a step, from lengths and block tables.

C rows of a bucket, S sequences, M blocks a row of a block table, N blocks of B tokens, G key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .kv_gather import GatherBucket, rows_to_gather, run_of
from .shared_prefix import SharedPrefix, shared_prefixes

Ints = npt.NDArray[np.int64]

# One more bucket costs about 120 us of calls, as much as this many padded key elements (measured on 2 AVX-512 cores,
# 9 query heads, 3 key/value heads, D = 64, bf16 and f32).
MAX_PADDING_ELEMENTS = 1 << 17
# Keys and values of a bucket. Beyond it, fresh memory pages cost more than another bucket: 32 rows of 512 tokens in f32
# take 4.7 ms in such pieces, 5.5 ms at once.
MAX_WORKSPACE_BYTES = 8 << 20
# Key elements that a shared prefix must save: attending to it separately costs about 400 us of calls (measured as
# above).
MIN_SHARED_ELEMENTS = 1 << 19


class SharedRows(NamedTuple):
    """A prefix that C rows of q share: `bucket` reads it as one row, [1, G, L, D]."""

    rows: Tensor | None  # [C] i64 rows of q; None = all of q, in order
    bucket: GatherBucket


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """How the rows of one decode step are read; the same for all layers of one window and layout.

    The bucket of a row with a shared prefix holds only the tokens after the prefix.
    """

    buckets: tuple[GatherBucket, ...]
    is_whole: bool  # one bucket holds all rows in order, so its result is the result
    shared: tuple[SharedRows, ...]


class ExtendedSequence(NamedTuple):
    """One sequence with several new tokens: rows [start, end) of q, its total tokens, and the first block it reads."""

    start: int
    end: int
    length: int
    first_block: int
    sequence: int


@dataclass(frozen=True, slots=True, eq=False)
class ExtendPlan:
    """The sequences of a step with more than one new token, and the prefixes they share."""

    sequences: tuple[ExtendedSequence, ...]
    shared: tuple[SharedRows, ...]


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

    Prefixes that save at least `min_shared_elements` key elements are read separately; None = no prefix is. Raises
    ValueError if a length exceeds its block table.
    """
    num_groups, block_size, head_dim = k_cache.shape[1:]
    device = k_cache.device
    tables, ends = block_tables.cpu().numpy(), lengths.cpu().numpy().astype(np.int64)
    starts = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
    prefixes = _prefixes(k_cache, tables, ends, window, min_shared_elements)
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
        buckets.append(GatherBucket(chosen, sources, blocks, low, high, mask, unwritten, run))
    shared = []
    for prefix in prefixes:
        members = None if len(prefix.rows) == len(ends) else torch.from_numpy(prefix.rows).to(device)
        shared.append(SharedRows(members, _common(k_cache, v_cache, tables, prefix)))
    return DecodePlan(tuple(buckets), len(buckets) == 1 and buckets[0].rows is None, tuple(shared))


def plan_extend(
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_starts: Tensor,
    lengths: Tensor,
    window: int | None,
    min_shared_elements: int | None = None,
) -> ExtendPlan:
    """The plan of `paged_attention` for sequences with several new tokens. Arguments as there and in `plan_decode`."""
    block_size = k_cache.shape[2]
    starts, ends = query_starts.cpu().numpy().astype(np.int64), lengths.cpu().numpy().astype(np.int64)
    num_new = np.diff(starts)
    extended = np.flatnonzero((num_new > 1) & (ends > 0))
    num_before = (ends - num_new)[extended]  # tokens that are not new
    tables = block_tables.cpu().numpy()[extended]
    prefixes = _prefixes(k_cache, tables, num_before + 1, window, min_shared_elements)
    first_blocks = np.zeros_like(num_before) if window is None else np.maximum(num_before + 1 - window, 0) // block_size
    shared = []
    for prefix in prefixes:
        first_blocks[prefix.rows] = prefix.num_blocks
        rows = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in extended[prefix.rows]])
        bucket = _common(k_cache, v_cache, tables, prefix)
        shared.append(SharedRows(torch.from_numpy(rows).to(k_cache.device), bucket))
    columns = (starts[extended], starts[extended + 1], ends[extended], first_blocks, extended)
    sequences = tuple(ExtendedSequence(*row) for row in zip(*(column.tolist() for column in columns), strict=True))
    return ExtendPlan(sequences, tuple(shared))


def _prefixes(
    k_cache: Tensor, tables: npt.NDArray[np.int32], ends: Ints, window: int | None, least_elements: int | None
) -> list[SharedPrefix]:
    if window is not None or least_elements is None:
        return []
    _, num_groups, block_size, head_dim = k_cache.shape
    return shared_prefixes(tables, ends, block_size, least_elements // (num_groups * head_dim))


def _common(k_cache: Tensor, v_cache: Tensor, tables: npt.NDArray[np.int32], prefix: SharedPrefix) -> GatherBucket:
    """The prefix as a bucket of one row."""
    blocks = torch.from_numpy(tables[prefix.rows[:1], : prefix.num_blocks].astype(np.int64)).to(k_cache.device)
    run = run_of(k_cache, v_cache, blocks)
    sources = rows_to_gather(k_cache, v_cache, blocks) if run is None else None
    return GatherBucket(None, sources, blocks, 0, prefix.num_blocks * k_cache.shape[2], run=run)


def _rows_that_go_together(num_blocks: Ints, block_size: int, max_padding: int, max_tokens: int) -> list[Ints]:
    """Row numbers of each bucket: longest rows first; a new bucket if padding or size, in tokens, passes its limit.

    Rows without blocks are in no bucket. Within a bucket, rows are in order.
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
    """Block ids [C, blocks] i64: each row's blocks, padded with a fully written block, which holds no NaN."""
    column = np.arange(num_blocks.max())
    is_own = column < num_blocks[:, None]
    longest = num_blocks.argmax()  # if there is padding it has two blocks or more, so its first block is full
    filler = tables[rows[longest], first_blocks[longest]]
    own = tables[rows[:, None], np.where(is_own, column, 0) + first_blocks[:, None]]
    ids: Ints = np.where(is_own, own, filler).astype(np.int64)
    return ids


def _unwritten_tokens(ends: Ints, high: int, block_size: int, num_blocks: int, num_groups: int) -> Ints:
    """Tokens of a workspace [C, G, L'] past a row's end, in its last block and before `high`; they may hold anything.

    The gather sets them to zero, as a masked probability of 0 times NaN is NaN.
    """
    token = ends[:, None] + np.arange(block_size - 1)
    is_touched = (token < high) & (token // block_size == ((ends - 1) // block_size)[:, None])
    row, _ = np.nonzero(is_touched)
    group = np.arange(num_groups)[:, None]
    tokens: Ints = (row * num_groups + group) * (num_blocks * block_size) + token[is_touched]  # [G, tokens]
    return tokens.reshape(-1)

"""The least bytes and operations of each kernel: the roofline that measured times are compared with.

Each tensor is counted once, as if caches never missed within a launch and never helped between two launches. The time
`max(bytes / bandwidth, flops / rate)` is a lower bound, not a forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchCost:
    """The bytes moved and operations computed by one launch."""

    num_bytes: int
    num_flops: int

    def __add__(self, other: LaunchCost) -> LaunchCost:
        return LaunchCost(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def floor_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """The least time in seconds on a device that moves and computes at these rates, both at once."""
        return max(self.num_bytes / bytes_per_s, self.num_flops / flops_per_s)


def rms_norm(num_tokens: int, dim: int, element_size: int) -> LaunchCost:
    elements = num_tokens * dim
    return LaunchCost((2 * elements + dim) * element_size, 4 * elements)


def add_rms_norm(num_tokens: int, dim: int, element_size: int) -> LaunchCost:
    """Reads two tensors and writes two: the sum goes back to the residual."""
    elements = num_tokens * dim
    return LaunchCost((4 * elements + dim) * element_size, 5 * elements)


def layer_norm(num_tokens: int, dim: int, element_size: int) -> LaunchCost:
    """With a weight and a bias."""
    elements = num_tokens * dim
    return LaunchCost((2 * elements + 2 * dim) * element_size, 7 * elements)


def attention_prologue(
    num_tokens: int,
    num_heads: int,
    num_groups: int,
    head_dim: int,
    rotary_dim: int,
    element_size: int,
    cache_size: int,
    has_norms: bool = False,
) -> LaunchCost:
    """Reads the projection once; writes what changes of queries, and keys and values of `cache_size` bytes a number.

    A row of both tables together is `rotary_dim` f32 numbers; a position and a slot are i64.
    """
    query_dim = head_dim if has_norms else rotary_dim
    read = num_heads * query_dim + 2 * num_groups * head_dim
    written = num_heads * query_dim * element_size + 2 * num_groups * head_dim * cache_size
    turned = (num_heads + num_groups) * rotary_dim
    normed = (num_heads + num_groups) * head_dim if has_norms else 0
    num_bytes = num_tokens * (read * element_size + written + rotary_dim * 4 + 16)
    return LaunchCost(num_bytes + 2 * head_dim * element_size * has_norms, num_tokens * (3 * turned + 4 * normed))


def prologue_decode(
    lengths: Sequence[int],
    num_heads: int,
    num_groups: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    element_size: int,
    window: int | None = None,
    cache_element_size: int | None = None,
    has_norms: bool = False,
) -> LaunchCost:
    """`paged_decode` with its prologue inside: new keys and values are read of the projection, and written.

    As they are not read of the cache, `paged_decode` has the bytes that are written.
    """
    whole = paged_decode(lengths, num_heads, num_groups, head_dim, block_size, element_size, window, cache_element_size)
    num_rows = sum(length > 0 for length in lengths)
    turned = (num_heads + num_groups) * rotary_dim
    normed = (num_heads + num_groups) * head_dim if has_norms else 0
    num_bytes = num_rows * (2 * num_groups * head_dim * element_size + rotary_dim * 4 + 16)
    num_bytes += 2 * head_dim * element_size * has_norms
    return whole + LaunchCost(num_bytes, num_rows * (3 * turned + 4 * normed))


def copy_blocks(num_blocks: int, block_bytes: int) -> LaunchCost:
    """`block_bytes` is the size of a whole block, all layers."""
    return LaunchCost(num_blocks * (2 * block_bytes + 16), 0)


def gated(num_tokens: int, dim: int, element_size: int) -> LaunchCost:
    """`dim` is the row size of the result; operations are those of SiLU."""
    return LaunchCost(3 * num_tokens * dim * element_size, 5 * num_tokens * dim)


def activated(num_tokens: int, dim: int, element_size: int) -> LaunchCost:
    """Operations are those of SiLU."""
    return LaunchCost(2 * num_tokens * dim * element_size, 4 * num_tokens * dim)


def paged_decode(
    lengths: Sequence[int],
    num_heads: int,
    num_groups: int,
    head_dim: int,
    block_size: int,
    element_size: int,
    window: int | None = None,
    cache_element_size: int | None = None,
) -> LaunchCost:
    """One new token for each sequence; `lengths` are their tokens, the new one included."""
    return paged_attention(
        [min(1, length) for length in lengths],
        lengths,
        num_heads,
        num_groups,
        head_dim,
        block_size,
        element_size,
        window,
        cache_element_size,
    )


def paged_attention(
    num_new: Sequence[int],
    lengths: Sequence[int],
    num_heads: int,
    num_groups: int,
    head_dim: int,
    block_size: int,
    element_size: int,
    window: int | None = None,
    cache_element_size: int | None = None,
) -> LaunchCost:
    """`num_new` tokens of sequences with `lengths` tokens, the new ones included. `walk_list` and `merge` add the cuts.

    `cache_element_size` is the size of a key or value number; None = `element_size`.
    """
    num_pairs = sum(seen_pairs(n, length, window) for n, length in zip(num_new, lengths, strict=True))
    num_cached = num_blocks = 0
    for n, length in zip(num_new, lengths, strict=True):
        if n:
            first = 0 if window is None else max(0, length - n + 1 - window)
            num_cached += length - first
            num_blocks += -(-length // block_size) - first // block_size
    query_bytes = 2 * sum(num_new) * num_heads * head_dim * element_size
    cache_bytes = 2 * num_cached * num_groups * head_dim * (cache_element_size or element_size)
    return LaunchCost(query_bytes + cache_bytes + 4 * num_blocks, 4 * num_pairs * num_heads * head_dim)


def list_work(num_sequences: int, num_items: int, num_splits: int, num_programs: int) -> LaunchCost:
    """Makes a list: reads lengths and starts; writes items of 11 numbers, a counter for each split, starts, counts."""
    numbers = 2 * num_sequences + 1 + 11 * num_items + num_splits + num_programs + 3
    return LaunchCost(4 * numbers, 0)


def walk_list(
    num_items: int, num_programs: int, num_partial_rows: int, num_merged_rows: int, head_dim: int, element_size: int
) -> LaunchCost:
    """The cost that a work list adds to `paged_attention`: reading it, and writing partial sums.

    The partial sums, with a maximum and a weight each, replace the results of `num_merged_rows` rows (token x head).
    """
    list_bytes = 4 * (10 * num_items + num_programs + 1)
    saved = num_merged_rows * head_dim * element_size
    return LaunchCost(list_bytes + num_partial_rows * (head_dim + 2) * 4 - saved, 0)


def merge(num_splits: int, num_partial_rows: int, num_merged_rows: int, head_dim: int, element_size: int) -> LaunchCost:
    """Reads, scales and adds up partial sums, as often as a counter of each split says that all have ended."""
    read = 4 * (num_partial_rows * (head_dim + 2) + 2 * num_splits)
    return LaunchCost(read + num_merged_rows * head_dim * element_size, 2 * num_partial_rows * head_dim)


def seen_pairs(num_new: int, length: int, window: int | None = None) -> int:
    """Pairs of a new token and a token it sees: token j of n sees `min(length - n + j + 1, window)` tokens."""
    fewest = length - num_new + 1  # seen by the first
    if window is None or length <= window:
        return num_new * (fewest + length) // 2
    if fewest >= window:
        return num_new * window
    num_growing = window - fewest  # tokens that see fewer than `window`
    return num_growing * (fewest + window - 1) // 2 + (num_new - num_growing) * window

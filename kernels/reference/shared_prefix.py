"""Finds rows of a step whose contexts begin with the same blocks, as the prefix cache arranges for a common prompt.

Attention then reads the shared part once, instead of once a row. Works on block tables in numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class SharedPrefix(NamedTuple):
    """The first `num_blocks` blocks of each of `rows` are the same, and full."""

    rows: Ints  # [C], at least 2, in order
    num_blocks: int  # at least 1


def shared_prefixes(
    tables: npt.NDArray[np.int32], ends: Ints, block_size: int, least_tokens: int
) -> list[SharedPrefix]:
    """The prefixes worth reading separately: reading one of them once saves at least `least_tokens` tokens.

    tables  [S, M]   block ids in token order; entries past a row's end are ignored
    ends    [S]      tokens of each row

    Every row is in at most one prefix and has at least one token after it, so neither part is empty. Rows that begin
    with the same block are compared with the longest of them only.
    """
    num_full = (ends - 1) // block_size  # [S] blocks that may be in a prefix
    candidates = np.flatnonzero(num_full > 0)
    if (len(candidates) - 1) * num_full.max(initial=0) * block_size < least_tokens:
        return []
    _, group, sizes = np.unique(tables[candidates, 0], return_inverse=True, return_counts=True)
    found = []
    for number in np.flatnonzero(sizes > 1):
        rows = candidates[group == number]
        depths = _common_blocks(tables, rows, num_full[rows])
        depth = _best_depth(depths)
        rows = rows[depths >= depth]
        if (len(rows) - 1) * depth * block_size >= least_tokens:
            found.append(SharedPrefix(rows, depth))
    return found


def _common_blocks(tables: npt.NDArray[np.int32], rows: Ints, num_full: Ints) -> Ints:
    """The number of leading blocks that each row shares with the longest row, [C]."""
    longest = int(num_full.argmax())
    width = int(num_full[longest])
    own = tables[rows, :width]
    is_same = (own == own[longest]) & (np.arange(width) < num_full[:, None])
    depths: Ints = np.where(is_same.all(1), width, is_same.argmin(1))
    return depths


def _best_depth(depths: Ints) -> int:
    """The number of blocks that saves most: a longer prefix is shared by fewer rows."""
    falling = np.sort(depths)[::-1]
    return int(falling[(np.arange(len(falling)) * falling).argmax()])

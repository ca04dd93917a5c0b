"""A work list done in float64, item by item, counting what it reads, writes and computes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from millrace.kernels.layout.list_work import HostWorkList, SplitTask
from millrace.kernels.layout.work_lists import Division, WorkItem
from tests.kernels.paged import PagedCase


@dataclass
class Counted:
    """Distinct things touched, and arithmetic."""

    cached: set[tuple[int, int, int]] = field(default_factory=set)  # (block, key/value head, offset)
    table_entries: set[tuple[int, int]] = field(default_factory=set)
    queries: set[tuple[int, int]] = field(default_factory=set)  # (row, head)
    results: set[tuple[int, int]] = field(default_factory=set)
    num_pairs: int = 0  # of a query head and a token it sees: a product and a sum for each element of K and of V
    num_items: int = 0
    num_partial_rows: int = 0
    num_merged_rows: int = 0


def walk(
    case: PagedCase, lists: list[tuple[Division, HostWorkList]], scale: float, window: int | None
) -> tuple[Tensor, Counted]:
    """[T, H, D] f64, and the counts."""
    out = torch.full(case.q.shape, float("nan"), dtype=torch.float64)
    counted = Counted()
    for division, listed in lists:
        partials: dict[int, dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]]] = defaultdict(dict)
        for item in listed.items.tolist():
            counted.num_items += 1
            for row, head, sums, peak, weight in _item(case, division, item, scale, window, counted):
                if item[WorkItem.PARTIAL] >= 0:
                    partials[item[WorkItem.PARTIAL]][row, head] = sums, peak, weight
                    counted.num_partial_rows += 1
                else:
                    counted.results.add((row, head))
                    out[row, head] = sums / weight if weight else 0.0
        for split in listed.splits.tolist():
            pieces = range(split[SplitTask.FIRST_PARTIAL], split[SplitTask.FIRST_PARTIAL] + split[SplitTask.NUM_PIECES])
            for row, head in partials[pieces[0]]:
                counted.num_merged_rows += 1
                parts = zip(*(partials[piece][row, head] for piece in pieces), strict=True)
                sums, peaks, weights = (torch.stack(part) for part in parts)
                share = torch.exp(peaks - peaks.max())
                out[row, head] = (sums * share[:, None]).sum(0) / (weights * share).sum()
    return out, counted


def _item(
    case: PagedCase, division: Division, item: list[int], scale: float, window: int | None, counted: Counted
) -> list[tuple[int, int, Tensor, Tensor, Tensor]]:
    """(row, head, sums, maximum, sum of weights) of each row of an item."""
    group = case.q.shape[1] // case.k_cache.shape[1]
    block_size = case.k_cache.shape[2]
    found = []
    for new in range(item[WorkItem.NUM_TOKENS]):
        last = item[WorkItem.POSITION] + new
        first = 0 if window is None else max(0, last + 1 - window)
        tiles = range(item[WorkItem.FIRST_TILE] * division.block_n, item[WorkItem.END_TILE] * division.block_n)
        tokens = [token for token in tiles if first <= token <= last]
        places = []
        for token in tokens:
            counted.table_entries.add((item[WorkItem.SEQUENCE], token // block_size))
            block = int(case.block_tables[item[WorkItem.SEQUENCE], token // block_size])
            counted.cached.add((block, item[WorkItem.GROUP], token % block_size))
            places.append((block, token % block_size))
        blocks, offsets = torch.tensor(places, dtype=torch.long).reshape(-1, 2).unbind(1)
        keys = case.k_cache[blocks, item[WorkItem.GROUP], offsets].double()
        values = case.v_cache[blocks, item[WorkItem.GROUP], offsets].double()
        for head in range(item[WorkItem.GROUP] * group, (item[WorkItem.GROUP] + 1) * group):
            row = item[WorkItem.ROW] + new
            counted.queries.add((row, head))
            counted.num_pairs += len(tokens)
            scores = keys @ case.q[row, head].double() * scale
            peak = scores.max() if tokens else torch.tensor(float("-inf"), dtype=torch.float64)
            weights = torch.exp(scores - peak)
            found.append((row, head, weights @ values, peak, weights.sum()))
    return found

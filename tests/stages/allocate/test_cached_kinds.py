"""Prefixes, forks and swaps where layers have several kinds of memory, through the allocator."""

from __future__ import annotations

from collections import Counter

from tests.counts import count
from tests.stages.allocate.cached_kinds_walk import walk


def test_hits_forks_swaps_and_evictions_of_kinds_at_random():
    seen: Counter[str] = Counter()
    for seed in range(count(in_ci=6, full=1500)):
        try:
            seen += walk(seed)[1]
        except Exception as error:
            raise AssertionError(f"python -m tests.stages.allocate.cached_kinds_walk --seed {seed}") from error
    rare = ("hit", "swapped", "fork of kind 1", "out of kind 1", "in of kind 1", "void", "entries of two kinds")
    assert all(seen[name] for name in rare), seen

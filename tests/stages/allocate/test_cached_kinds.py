"""Prefixes, forks and swaps where layers have several kinds of memory, through the allocator."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from millrace.kernels.layout.kv_layout import KVKind, KVLayout
from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.allocate.tiers.host_tier import HostTier
from millrace.stages.messages import Started, StepGrant, StepPlan
from millrace.stages.params import SamplingParams
from millrace.stages.recordings.format import grant_fields, plain, report_fields
from tests.counts import count
from tests.stages.allocate.cached_kinds_walk import ACTIONS, CachedWalk, walk
from tests.stages.schedule.plans import ints, plan


def test_hits_forks_swaps_and_evictions_of_kinds_at_random():
    seen: Counter[str] = Counter()
    for seed in range(count(in_ci=6, full=1500)):
        try:
            seen += walk(seed)[1]
        except Exception as error:
            raise AssertionError(f"python -m tests.stages.allocate.cached_kinds_walk --seed {seed}") from error
    rare = ("hit", "swapped", "fork of kind 1", "out of kind 1", "in of kind 1", "void", "entries of two kinds")
    assert all(seen[name] for name in rare), seen


def test_hits_forks_and_swaps_where_all_layers_have_windows():
    seen: Counter[str] = Counter()
    for seed in [number for number in range(40) if CachedWalk(number).has_index][: count(in_ci=4, full=40)]:
        try:
            seen += walk(seed)[1]
        except Exception as error:
            raise AssertionError(f"python -m tests.stages.allocate.cached_kinds_walk --seed {seed}") from error
    rare = ("hit", "swapped", "fork of windows", "out of windows", "in of windows", "entries of windows")
    assert all(seen[name] for name in rare), seen


# -- by hand: blocks of 2 tokens, a window of 4; a slab holds 2 blocks of the full kind, or 1 of the window

KINDS = (KVKind("full", (0,), None, 1, 8, 8, 64), KVKind("window", (1, 2), 4, 1, 8, 8, 128))


def make(num_slabs: int = 40, host: HostTier | None = None) -> Allocator:
    layout = KVLayout(KINDS, 2, 128, num_slabs, (2, 1), (2 * num_slabs, num_slabs), ((0, 0), (1, 0), (1, 1)))
    cache = PrefixCache(2)
    cache.min_tokens_to_wait_for = cache.min_tokens_to_fork = 1
    return Allocator(2 * num_slabs, 2, 4, 40, cache, host, layout)


def begin(step: int, slot: int, tokens: list[int], wanted: int | None = None, **fields: Any) -> StepPlan:
    """A plan in which a new sequence begins with `tokens`; all steps before are done."""
    sequence_id = 100 * step + slot
    started = Started(slot, sequence_id, f"r{sequence_id}", ints(*tokens), len(tokens), SamplingParams(), 0)
    return replace(plan(step, {slot: wanted or len(tokens)}, completed=step - 1, **fields), started=(started,))


def go_on(step: int, demands: dict[int, int], ended: Sequence[int] = ()) -> StepPlan:
    return replace(plan(step, demands, completed=step - 1, ended=ended), started=())


PROMPT = list(range(1, 13))


def computed_in_chunks(allocator: Allocator) -> int:
    """Slot 0 computes PROMPT by 5, 5 and 2 tokens, and ends. Returns the next step."""
    allocator.serve(begin(0, 0, PROMPT, 5))
    allocator.serve(go_on(1, {0: 5}))
    allocator.serve(go_on(2, {0: 2}))
    allocator.serve(go_on(3, {}, ended=[0]))
    allocator.check()
    return 4


def window_entries(grant: StepGrant | None) -> list[tuple[int, int]]:
    assert grant is not None
    return [pair for each in grant.more_tables for pair in zip(each.places.tolist(), each.blocks.tolist(), strict=True)]


def test_a_hit_after_chunks_longer_than_the_window_has_the_window_not_the_chunk():
    allocator = make()
    step = computed_in_chunks(allocator)
    grant, report = allocator.serve(begin(step, 1, [*PROMPT, 90, 91]))
    assert report.num_cached.tolist() == [12]
    assert sorted(place for place, _ in window_entries(grant)) == [4, 5, 6]  # the query at 12 sees 9 and later
    allocator.check()


def test_blocks_that_a_window_has_passed_are_evicted_before_the_older_end_of_a_prompt():
    allocator = make(num_slabs=34)
    step = computed_in_chunks(allocator)
    allocator.serve(begin(step, 1, [70 + i for i in range(20)], 4))
    for i in range(4):
        allocator.serve(go_on(step + 1 + i, {1: 4}))
    allocator.serve(begin(step + 5, 2, [40 + i for i in range(20)]))
    assert allocator.kinds[1].pool.num_evicted in range(3, 11), "more than passed before, and no more than passed since"
    _, report = allocator.serve(replace(begin(step + 6, 3, [*PROMPT, 90]), ended=[2]))
    assert report.num_cached.tolist() == [12]
    allocator.check()


def test_no_block_that_a_window_has_passed_is_copied_to_the_host():
    host = HostTier(64, 2, None, [64], [2.0])
    allocator = make(num_slabs=24, host=host)
    step = computed_in_chunks(allocator)
    grant, _ = allocator.serve(begin(step, 1, [70 + i for i in range(22)]))
    assert grant is not None and allocator.kinds[1].pool.num_evicted
    assert not [each for each in grant.copies if each.kind == 1]
    allocator.check()


def test_the_end_of_an_entry_leaves_a_block_that_another_sequence_got_since():
    allocator = make()
    computed_in_chunks(allocator)
    cache, pool = allocator.cache, allocator.kinds[1].pool
    assert cache is not None
    (index,) = cache.kinds
    number, block = next(iter(index.blocks.items()))
    pool.forget(block)
    index.evict(block)
    taken = pool.take(1)  # perhaps this block, by another sequence
    index.forget_number(number)
    assert pool.num_tables[taken].tolist() == [1] and number not in index.blocks


def test_a_copy_of_an_allocator_decides_alike_and_changes_nothing_of_the_first():
    """The time machine goes on from copies."""
    made = CachedWalk(3)
    for name in made.dice.choices(list(ACTIONS), list(ACTIONS.values()), k=80):
        getattr(made, name)()
    made.take_report()
    while not made.scheduler.may_plan:
        made.complete()
    before = [each.pool.state.copy() for each in made.allocator.kinds]
    copied = copy.deepcopy(made.allocator)
    next_plan = made.scheduler.next_plan(moves=1, admitted=4, row_limit=4, spare_budget=8)
    assert next_plan is not None
    grants = [grant_of(copied, next_plan)]
    assert all(map(np.array_equal, before, [each.pool.state for each in made.allocator.kinds]))
    grants.append(grant_of(made.allocator, next_plan))
    assert grants[0] == grants[1]
    copied.check()


def grant_of(allocator: Allocator, next_plan: StepPlan) -> Any:
    grant, report = allocator.serve(next_plan)
    return plain(report_fields(report)), None if grant is None else plain(grant_fields(grant, has_kinds=True))

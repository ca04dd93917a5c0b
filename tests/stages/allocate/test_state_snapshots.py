"""Snapshots of recurrent states: where they are taken, when they are known, and from which sequences go on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from millrace.kernels.layout.state_layout import StateLayout
from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.allocate.state_snapshots import StateSnapshots
from millrace.stages.allocate.tiers.host_tier import HostTier
from millrace.stages.messages import STATES, Direction, Started, StepGrant, StepPlan
from millrace.stages.params import SamplingParams
from tests.stages.schedule.plans import ints, plan

NUM_SLOTS, SIZE = 4, 2
PROMPT = [*range(1, 10)]  # 9 tokens: the last chunk begins at 8


def make(num_snapshots: int = 3, host: HostTier | None = None) -> Allocator:
    cache = PrefixCache(SIZE, states=StateLayout(64, NUM_SLOTS, num_snapshots=num_snapshots))
    cache.min_tokens_to_wait_for = 2
    return Allocator(40, SIZE, NUM_SLOTS, 40, cache, host)


def begin(step: int, slot: int, tokens: list[int], wanted: int | None = None, **fields: Any) -> StepPlan:
    """A plan in which a new sequence begins with `tokens`; all steps before are done, unless `completed` is given."""
    number = 100 * step + slot
    started = Started(slot, number, f"r{number}", ints(*tokens), len(tokens), SamplingParams(), 0)
    made = plan(step, {slot: wanted or len(tokens)}, **{"completed": step - 1, **fields})
    return replace(made, started=(started,))


def go_on(step: int, demands: dict[int, int], **fields: Any) -> StepPlan:
    return replace(plan(step, demands, **{"completed": step - 1, **fields}), started=())


def state_copies(grant: StepGrant | None) -> list[tuple[Direction, list[int], list[int]]]:
    assert grant is not None
    copies = [copy for copy in grant.copies if copy.kind == STATES]
    return [(copy.direction, copy.sources.tolist(), copy.destinations.tolist()) for copy in copies]


def computed(allocator: Allocator, prompt: list[int], slot: int = 0, step: int = 0) -> StepGrant:
    """A prompt is computed to its last whole block before its last token, and its sequence ends. Returns the grant."""
    grant, _ = allocator.serve(begin(step, slot, prompt))
    allocator.serve(go_on(step + 1, {}, ended=[slot]))
    allocator.check()
    assert grant is not None
    return grant


def test_a_prompt_is_split_at_its_last_whole_block_and_the_state_there_is_saved():
    allocator = make()
    grant, report = allocator.serve(begin(0, 0, PROMPT))
    assert report.num_granted.tolist() == [8] and not grant.is_sampled.any()
    assert state_copies(grant) == [(Direction.SAVE, [0], [NUM_SLOTS])]
    grant, report = allocator.serve(go_on(1, {0: 1}))
    assert report.num_granted.tolist() == [1] and grant.is_sampled.all() and not state_copies(grant)


def test_a_sequence_goes_on_from_the_longest_prefix_with_a_snapshot_not_with_blocks():
    allocator = make()
    computed(allocator, PROMPT)
    prompt = [*PROMPT[:7], 70, 71, 72]  # shares three blocks, behind which there is no snapshot
    grant, report = allocator.serve(begin(2, 1, prompt))
    assert report.num_cached.tolist() == [0] and grant.starts.tolist() == [0]
    prompt = [*PROMPT[:8], 70, 71, 72]
    grant, report = allocator.serve(begin(3, 2, prompt))
    assert report.num_cached.tolist() == [8] and grant.starts.tolist() == [8] and report.num_granted.tolist() == [2]
    assert state_copies(grant)[0] == (Direction.FORK, [NUM_SLOTS], [2])
    allocator.check()


def test_the_same_prompt_again_computes_its_last_token_alone():
    allocator = make()
    computed(allocator, PROMPT)
    grant, report = allocator.serve(begin(2, 1, PROMPT))
    assert report.num_cached.tolist() == [8] and report.num_granted.tolist() == [1] and grant.is_sampled.all()
    assert state_copies(grant) == [(Direction.FORK, [NUM_SLOTS], [1])]


def test_choices_of_one_prompt_wait_and_then_start_with_a_copy_of_its_state():
    allocator = make()
    allocator.serve(begin(0, 0, PROMPT))
    grant, report = allocator.serve(begin(1, 1, PROMPT, completed=-1))
    assert grant is None and report.num_granted.tolist() == [0], "the first choice computes it"
    grant, report = allocator.serve(go_on(2, {0: 1, 1: 9}, completed=0))
    assert report.num_cached.tolist() == [0, 8] and report.num_granted.tolist() == [1, 1]
    assert state_copies(grant) == [(Direction.FORK, [NUM_SLOTS], [1])]


def test_after_an_abort_in_mid_prefill_the_same_prompt_finds_no_unwritten_state():
    """A snapshot known from its grant on would be read before, or though, no step has written it."""
    allocator = make()
    allocator.serve(begin(0, 0, PROMPT))
    grant, report = allocator.serve(begin(1, 1, PROMPT, completed=-1, ended=[0]))  # aborted, step 0 in flight
    assert report.num_cached.tolist() == [0] and Direction.FORK not in [each[0] for each in state_copies(grant)]
    allocator.serve(go_on(2, {}, completed=0))
    assert allocator.cache is not None and allocator.cache.snapshots is not None
    assert not len(allocator.cache.snapshots), "the blocks of the aborted sequence are not in the cache"
    allocator.serve(go_on(3, {1: 1}, completed=1))
    assert len(allocator.cache.snapshots) == 1
    allocator.check()


def test_a_void_step_leaves_no_snapshot():
    allocator = make(num_snapshots=1)
    allocator.serve(begin(0, 0, PROMPT))
    allocator.serve(replace(go_on(1, {}, completed=0), voided=(0,), dropped=(0,)))
    allocator.check()
    grant, report = allocator.serve(begin(2, 0, PROMPT))
    assert report.num_cached.tolist() == [0]
    assert state_copies(grant) == [(Direction.SAVE, [0], [NUM_SLOTS])], "the place is free again"


def test_the_least_recently_used_snapshot_is_replaced():
    allocator = make(num_snapshots=2)
    others = [[each + 20 for each in PROMPT], [each + 40 for each in PROMPT]]
    assert state_copies(computed(allocator, PROMPT)) == [(Direction.SAVE, [0], [4])]
    assert state_copies(computed(allocator, others[0], step=2)) == [(Direction.SAVE, [0], [5])]
    computed(allocator, PROMPT, step=4)  # used again
    assert state_copies(computed(allocator, others[1], step=6)) == [(Direction.SAVE, [0], [5])]
    hits = [
        allocator.serve(begin(8 + i, i, each))[1].num_cached.tolist() for i, each in enumerate([PROMPT, *others[::-1]])
    ]
    assert hits == [[8], [8], [0]]


def test_a_snapshot_whose_place_is_taken_in_the_same_step_is_read_before():
    allocator = make(num_snapshots=1)
    computed(allocator, PROMPT)
    grant, _ = allocator.serve(begin(2, 1, [*PROMPT[:8], 70, 71, 72]))
    assert [each[0] for each in state_copies(grant)] == [Direction.FORK, Direction.SAVE]


def test_a_reset_of_the_cache_drops_snapshots_also_those_in_flight():
    allocator = make()
    computed(allocator, PROMPT)
    other = [each + 20 for each in PROMPT]
    allocator.serve(begin(2, 0, other))
    allocator.reset_prefix_cache()
    allocator.check()
    allocator.serve(go_on(3, {0: 1}))
    assert allocator.cache is not None and allocator.cache.snapshots is not None
    assert not len(allocator.cache.snapshots)
    for step, prompt in ((4, PROMPT), (5, other)):
        assert allocator.serve(begin(step, step - 3, prompt))[1].num_cached.tolist() == [0]
    allocator.check()


def test_after_a_crash_all_places_are_free():
    allocator = make(num_snapshots=2)
    computed(allocator, PROMPT)
    allocator.serve(begin(2, 0, [each + 20 for each in PROMPT]))
    allocator.reset(go_on(3, {}, completed=1))
    allocator.check()
    assert allocator.cache is not None and allocator.cache.snapshots is not None
    assert len(allocator.cache.snapshots._free) == 2


@pytest.mark.parametrize(
    ("start", "granted", "num_known", "wanted"),
    [
        (0, 9, 9, 8),
        (0, 5, 9, 5),
        (8, 1, 9, 1),
        (0, 8, 8, 6),  # the last token is always computed
        (0, 1, 1, 1),
        (0, 2, 2, 2),  # no whole block before the last token
        (0, 5000, 5001, 2048),
        (2048, 2952, 5001, 2048),
        (2000, 3000, 5001, 48),
        (4096, 905, 5001, 904),
        (20, 1, 9, 1),  # an answer
    ],
)
def test_rows_end_where_snapshots_are_taken(start: int, granted: int, num_known: int, wanted: int):
    snapshots = StateSnapshots(StateLayout(64, NUM_SLOTS, num_snapshots=1), SIZE)
    before = ints(granted)
    found = snapshots.cut(ints(start), before, ints(num_known))
    assert found.tolist() == [wanted] and found.dtype == before.dtype
    assert (found is before) == (granted == wanted)
    end = start + wanted
    assert snapshots.is_due(end, num_known) == (wanted < granted or end == (num_known - 1) // SIZE * SIZE > 0)


def test_plans_without_recurrent_layers_are_not_cut():
    allocator = Allocator(40, SIZE, NUM_SLOTS, 40, PrefixCache(SIZE))
    grant, report = allocator.serve(begin(0, 0, PROMPT))
    assert grant is not None and grant.num_tokens.tolist() == [9] and grant.is_sampled.all()

"""An allocator of several kinds: windows give back what slid out, and kinds share slabs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from millrace.kernels.layout.kv_layout import KVKind, KVLayout
from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.tiers import device_tier
from millrace.stages.allocate.tiers.block_pool import QUARANTINED, BlockPool
from millrace.stages.allocate.tiers.block_tables import WindowTables
from millrace.stages.allocate.tiers.slab_pool import KindPool, SlabPool
from millrace.stages.allocate.window_blocks import WindowBlocks
from millrace.stages.messages import Drafts, PlanReport, StepGrant, StepPlan
from tests.counts import count, first_seed
from tests.simulation.planting import changed
from tests.stages.allocate.kinds_walk import walk
from tests.stages.schedule.plans import ints, plan


def layout(
    num_slabs: int, *, window: int = 4, size: int = 2, of_full: int = 6, of_window: int = 2, chunk: bool = False
) -> KVLayout:
    """A full kind, of `of_full` blocks a slab, and a window of larger blocks, of `of_window`."""
    kinds = (
        KVKind("full", (0,), None, 1, 8, 8, 64),
        KVKind("chunk" if chunk else "window", (1, 2, 3), window, 1, 8, 8, 64 * of_full // of_window),
    )
    place = ((0, 0), (1, 0), (1, 1), (1, 2))
    num_blocks = (num_slabs * of_full, num_slabs * of_window)
    return KVLayout(kinds, size, 64 * of_full, num_slabs, (of_full, of_window), num_blocks, place)


def make(num_slabs: int, *, num_slots: int = 4, longest: int = 24, **sizes: Any) -> Allocator:
    made = layout(num_slabs, **sizes)
    return Allocator(made.num_blocks[0], made.block_size, num_slots, longest, layout=made)


def decoding(step: int, slots: np.ndarray, *, completed: int) -> StepPlan:
    wishes = plan(step, dict.fromkeys(slots.tolist(), 1), completed=completed)
    return replace(wishes, slots=slots, started=(), is_decode=True)


def held(allocator: Allocator, kind: int, slot: int) -> tuple[int, int]:
    """[first, end) of the places of a slot that it holds blocks for."""
    tables = allocator.kinds[kind].tables
    first = int(tables.num_retired[slot]) if isinstance(tables, WindowTables) else 0
    return first, int(tables.capacity[slot]) // tables.block_size


# -- windows


def test_a_window_holds_its_own_tokens_and_the_full_kind_all() -> None:
    allocator = make(20)
    allocator.serve(plan(0, {0: 11}))  # the query at 11 sees 8 to 11: blocks 4 and later
    assert held(allocator, 0, 0) == (0, 6) and held(allocator, 1, 0) == (4, 6)
    for step in range(1, 4):
        allocator.serve(plan(step, {0: 1}, completed=step - 1))
        allocator.check()
    assert held(allocator, 0, 0) == (0, 7) and held(allocator, 1, 0) == (5, 7)


def test_blocks_that_slid_out_wait_for_the_steps_in_flight() -> None:
    """With 159 tokens granted and 158 done, the query at 158 still sees position 31, of block 0."""
    made = layout(40, window=128, size=32)
    allocator = Allocator(made.num_blocks[0], 32, 1, 256, layout=made)
    allocator.serve(plan(0, {0: 158}))
    grant, _ = allocator.serve(plan(1, {0: 1}, completed=0))
    assert grant is not None and grant.starts.tolist() == [158]
    window = allocator.kinds[1]
    block = int(window.tables.blocks[0, 0])
    assert held(allocator, 1, 0) == (1, 5) and window.pool.state[block] == QUARANTINED
    allocator.serve(plan(2, {}, completed=0))
    assert window.pool.state[block] == QUARANTINED
    allocator.serve(plan(2, {}, completed=1))
    assert window.pool.state[block] != QUARANTINED and window.pool.num_quarantined == 0


def test_rejected_drafts_need_no_block_that_was_given_back() -> None:
    """Four tokens are certain, and three more are drafts: if none is right, the query at 5 comes next, and sees 2."""
    allocator = make(20)
    allocator.serve(plan(0, {0: 4}))
    drafting = replace(plan(1, {0: 4}, completed=0), started=(), drafts=Drafts(ints(3), np.zeros(3, np.intp)))
    grant, _ = allocator.serve(drafting)
    assert grant is not None and grant.num_tokens.tolist() == [4]
    assert held(allocator, 1, 0) == (1, 4)
    accepted = replace(plan(2, {0: 1}, completed=1), started=(), accepted=((0, 3),))
    grant, _ = allocator.serve(accepted)
    assert grant is not None and grant.starts.tolist() == [8] and held(allocator, 1, 0) == (3, 5)


def test_a_window_is_cut_by_its_own_size_whatever_the_chunk() -> None:
    for chunk in (1, 3, 5, 12):
        allocator = make(20, num_slots=1)
        for step, _ in enumerate(range(0, 24 - chunk + 1, chunk)):
            allocator.serve(plan(step, {0: chunk}, completed=step - 1))
        n = int(allocator.tables.num_tokens[0])
        assert held(allocator, 1, 0) == (max(0, n - 3) // 2, -(-n // 2)), f"chunks of {chunk}"


def test_a_chunk_kind_gives_back_whole_chunks_as_they_end() -> None:
    allocator = make(20, window=6, chunk=True)
    for step, (n, first) in enumerate([(5, 0), (6, 3), (11, 3), (12, 6)]):
        wanted = n - int(allocator.tables.num_tokens[0])
        allocator.serve(plan(step, {0: wanted}, completed=step - 1))
        allocator.check()
        assert held(allocator, 1, 0)[0] == first, f"with {n} tokens"


def test_a_sequence_that_ends_gives_back_the_blocks_it_holds_and_no_others() -> None:
    allocator = make(20)
    allocator.serve(plan(0, {0: 11, 1: 3}))
    allocator.serve(plan(1, {1: 1}, completed=0, ended=[0]))
    allocator.check()
    window = allocator.kinds[1].pool
    assert window.num_in_use == 2 and window.num_quarantined == 0


def test_a_decoder_of_windows_only_frees_blocks_of_kind_0() -> None:
    made = KVLayout.uniform(KVKind("window", (0,), 4, 1, 8, 8, 64), 2, 4)
    allocator = Allocator(4, 2, 1, 24, layout=made)
    allocator.serve(plan(0, {0: 4}))
    for step in range(1, 20):
        grant, _ = allocator.serve(plan(step, {0: 1}, completed=step - 1))
        assert grant is not None and grant.more_tables == ()
        allocator.check()
    assert held(allocator, 0, 0) == (10, 12)


# -- slabs


def test_the_size_check_counts_the_slabs_of_every_kind() -> None:
    """24 tokens take 12 full blocks, 2 slabs, and of a window of 4 up to 3 blocks at once, 2 slabs."""
    make(4)
    with pytest.raises(ValueError, match="num_slabs = 3 .* needs 4, for 12 blocks of kind full and 3 blocks of kind w"):
        make(3)


def test_memory_moves_to_the_kind_that_lacks_it() -> None:
    """A static split would leave one kind short while the other has room: here both orders use all slabs."""
    allocator = make(8, num_slots=8, longest=12, window=12)
    grant, _ = allocator.serve(plan(0, {slot: 2 for slot in range(8)}))  # 8 blocks of each: 2 and 4 slabs
    assert grant is not None and len(grant.slots) == 8
    assert [int(each.pool.is_lent.sum()) for each in pools(allocator)] == [2, 4]
    allocator.serve(plan(1, {}, completed=0, ended=list(range(8))))
    assert [int(each.pool.is_lent.sum()) for each in pools(allocator)] == [0, 0]
    grant, _ = allocator.serve(plan(1, {0: 12, 1: 12}, completed=0))  # 12 blocks of each: 2 and 6 slabs
    assert grant is not None and grant.num_tokens.tolist() == [12, 12]
    assert [int(each.pool.is_lent.sum()) for each in pools(allocator)] == [2, 6]


def pools(allocator: Allocator) -> list[Any]:
    return list(allocator.kinds)


def test_a_plan_fits_only_if_all_kinds_fit_together() -> None:
    slabs = SlabPool(layout(4))
    assert slabs.fits([12, 4]) and slabs.fits([24, 0]) and slabs.fits([0, 8])
    assert not slabs.fits([13, 4]) and not slabs.fits([12, 5])
    slabs.reserve([7, 3], None)
    slabs.pools[0].take(7)
    slabs.pools[1].take(3)
    assert not slabs.unlent and slabs.fits([5, 1]) and not slabs.fits([5, 2]) and not slabs.fits([6, 0])
    assert slabs.pools[0].num_available == 5


def cached(pool: KindPool, count: int) -> Any:
    """`count` blocks that are cached, and in no table."""
    blocks = pool.take(count)
    pool.keep(blocks)
    pool.give_back(blocks, -1, 0)
    return blocks


def test_a_slab_of_cached_blocks_goes_to_the_kind_that_needs_it_and_they_are_evicted() -> None:
    slabs = SlabPool(layout(3))
    full, window = slabs.pools
    old, new = cached(full, 6), cached(full, 2)
    evicted: list[int] = []
    full.subscribe(lambda blocks, hand: evicted.extend(blocks))
    window.take(2)
    assert not slabs.unlent and slabs.fits([0, 2])
    slabs.reserve([0, 1], None)
    window.take(1)
    assert sorted(evicted) == sorted(new.tolist()), "the slab with fewer cached blocks is emptied"
    assert not set(evicted) & set(old.tolist())
    slabs.check()
    full.check()


def test_a_kind_with_most_cached_evicts_its_own() -> None:
    slabs = SlabPool(layout(3))
    full, window = slabs.pools
    cached(full, 6)
    cached(window, 4)
    slabs.reserve([0, 1], None)
    window.take(1)
    assert full.num_cached == 6 and window.num_cached == 3


def test_a_kind_keeps_what_it_needs_itself_in_the_same_plan() -> None:
    slabs = SlabPool(layout(2))
    full, window = slabs.pools
    cached(full, 12)
    assert slabs.fits([6, 2]) and not slabs.fits([7, 1])
    slabs.reserve([6, 2], None)
    window.take(2)
    full.take(6)
    assert full.num_cached == 0 and full.num_in_use == 6 and window.num_in_use == 2


def test_slabs_go_back_after_a_crash_that_came_while_blocks_were_taken() -> None:
    slabs = SlabPool(layout(3))
    window = slabs.pools[1]
    cached(window, 6)

    def crash(blocks: list[int], hand: Any) -> None:
        raise ArithmeticError

    window.subscribe(crash)
    with pytest.raises(ArithmeticError):
        window.take(2)
    for pool in slabs.pools:
        pool.seize_all(0)
        pool.complete_steps(0)
        pool.check()
    slabs.check()
    assert sorted(slabs.unlent) == [0, 1, 2]


def test_the_room_of_a_report_is_what_one_more_sequence_could_have() -> None:
    """Of 8 slabs one sequence needs two for its window, at most 3 blocks; 6 are left for 36 full blocks."""
    allocator = make(8)
    _, report = allocator.serve(plan(0, {}))
    assert report.num_free == 36 and report.num_quarantined == 0
    _, report = allocator.serve(plan(0, {0: 2}))  # one slab each; its free blocks are 5 and 1
    assert report.num_free == 5 + 6 * 5


def test_of_sequences_that_are_stuck_the_last_is_computed_again() -> None:
    """12 tokens of each sequence fill two slabs, their windows two others, and neither may preempt the other."""
    allocator = make(4, num_slots=2, of_window=3)
    allocator.serve(plan(0, {0: 12}))
    for step, wanted in enumerate([4, 2, 2, 2, 2], 1):
        grant, _ = allocator.serve(plan(step, {1: wanted}, completed=step - 1))
        assert grant is not None and grant.num_tokens.tolist() == [wanted]
    grant, report = allocator.serve(plan(6, {0: 1, 1: 1}, completed=4))
    assert grant is None and not report.preempted, "a step is in flight, which may end a sequence"
    grant, report = allocator.serve(plan(6, {0: 1, 1: 1}, completed=5))
    assert grant is None and report.preempted == [1]
    grant, _ = allocator.serve(plan(6, {0: 1}, completed=5))
    assert grant is not None and grant.starts.tolist() == [12]


# -- in the long run


def test_steady_decoding_gives_the_same_grants_as_serving_row_by_row() -> None:
    for seed in range(6):
        dice = np.random.default_rng(seed)
        made = layout(int(dice.integers(10, 40)), window=int(dice.integers(2, 9)))
        same, other = (Allocator(made.num_blocks[0], 2, 6, 40, layout=made) for _ in range(2))
        prompts = plan(0, {slot: int(dice.integers(1, 8)) for slot in range(int(dice.integers(1, 6)))})
        for allocator in (same, other):
            allocator.serve(prompts)
        was_steady = 0
        for step in range(1, 25):
            wishes = decoding(step, prompts.slots, completed=step - 2)
            heard = told(*same.serve(wishes))
            assert heard == told(*other.serve(replace(wishes, slots=prompts.slots.copy())))
            was_steady += bool(same._steady.made)
            same.check()
        assert was_steady and not other._steady.made


@pytest.mark.parametrize("window", [3, 8, 9])
def test_many_rows_that_decode_go_on_in_the_blocks_that_they_passed(window: int) -> None:
    made = layout(40, window=window)
    keeps, gives_back = (Allocator(made.num_blocks[0], 2, 6, 60, layout=made) for _ in range(2))
    keeps._windows.many_rows = 3
    prompts, again = {0: 9, 1: 12, 2: 7}, 0
    for allocator in (keeps, gives_back):
        allocator.serve(plan(0, prompts))
    before = [set(held_blocks(keeps, slot)) for slot in range(3)]
    for step in range(1, 24):
        made_plan = replace(plan(step, dict.fromkeys(range(3), 1), completed=step - 1), started=(), is_decode=True)
        heard = told(*keeps.serve(made_plan))
        assert heard == told(*gives_back.serve(made_plan))
        keeps.check()
        after = [set(held_blocks(keeps, slot)) for slot in range(3)]
        again += sum(one == other for one, other in zip(before, after, strict=True))
        before = after
        most = made.most_blocks(1, 60)
        assert all(len(blocks) <= most + 1 for blocks in after)
    assert again > 23 * 3 / 2, "in most steps a row neither takes nor gives back a block"
    assert keeps.kinds[1].pool.num_moves < gives_back.kinds[1].pool.num_moves / 2


def held_blocks(allocator: Allocator, slot: int) -> list[int]:
    blocks: list[int] = allocator.kinds[1].tables.held_by(slot).tolist()
    return blocks


def told(grant: StepGrant | None, report: PlanReport) -> list[object]:
    heard: list[object] = [report.num_granted.tolist(), report.is_void]
    if grant is not None:
        heard += [
            grant.starts.tolist(),
            sorted(zip(grant.table_slots.tolist(), grant.table_places.tolist(), strict=True)),
        ]
        heard += [(t.kind, sorted(zip(t.slots.tolist(), t.places.tolist(), strict=True))) for t in grant.more_tables]
    return heard


SOMETIMES = ("preempted", "void", "reset", "drafted", "rejected", "seen in quarantine", "steady", "written again")


@pytest.mark.slow
def test_random_plans_keep_the_invariants_of_kinds() -> None:
    seed, num_steps, seen = first_seed(), 0, Counter[str]()
    wanted = count(300, 100_000)
    while num_steps < wanted:
        steps, found = walk(seed)
        num_steps, seen, seed = num_steps + steps, seen + found, seed + 1
    assert not [name for name in SOMETIMES if not seen[name]], f"never: {dict(seen)}"
    print(f"{num_steps} steps, {dict(seen)}")


# -- bugs of other engines, planted: random plans find them


def retired_without_quarantine() -> AbstractContextManager[None]:
    """What slid out of the granted tokens is free at once, although a step in flight sees it."""

    def change(retire: Any) -> Any:
        def hasty(self: WindowBlocks, slots: Any, step: int) -> None:
            retire(self, slots, -1)

        return hasty

    return changed(WindowBlocks, "retire", change)


def drafts_counted_as_certain() -> AbstractContextManager[None]:
    """Windows are cut by tokens with drafts, which may be rejected."""

    def change(retire: Any) -> Any:
        def hopeful(self: WindowBlocks, slots: Any, step: int) -> None:
            tables = self.device.tables
            counted, within = tables.num_tokens.copy(), tables.capacity[slots]
            tables.num_tokens[slots] = np.minimum(counted[slots] + 2, within)
            retire(self, slots, step)
            tables.num_tokens[:] = counted

        return hopeful

    return changed(WindowBlocks, "retire", change)


def window_one_key_short() -> AbstractContextManager[None]:
    """The oldest key that a query sees is given back."""

    def change(first_key: Any) -> Any:
        return lambda self, positions: first_key(self, positions) + (self.window is not None)

    return changed(KVKind, "first_key", change)


def window_of_all_layers() -> AbstractContextManager[None]:
    """Layers that see all keys have the window of the others."""

    def change(make_kinds: Any) -> Any:
        def uniform(pools: Any, layout: KVLayout, *sizes: int) -> Any:
            windows = [kind.window for kind in layout.kinds if kind.window is not None]
            kinds = tuple(replace(kind, window=min(windows)) for kind in layout.kinds)
            return make_kinds(pools, replace(layout, kinds=kinds), *sizes)

        return uniform

    return changed(device_tier, "_kinds", change)


def slab_lent_while_quarantined() -> AbstractContextManager[None]:
    """A slab is given back although a step in flight may still touch a block of it."""

    def change(complete_steps: Any) -> Any:
        def hasty(self: BlockPool, completed_step: int) -> None:
            complete_steps(self, completed_step + 1)

        return hasty

    return changed(BlockPool, "complete_steps", change)


def retired_blocks_given_back_again() -> AbstractContextManager[None]:
    """A sequence that ends gives back its whole table, what was retired included."""

    def change(clear: Any) -> Any:
        def whole(self: WindowTables, slot: int) -> Any:
            clear(self, slot) if not self.capacity[slot] else None
            self.num_retired[slot] = 0
            return clear(self, slot)

        return whole

    return changed(WindowTables, "clear", change)


def other_kinds_do_not_count() -> AbstractContextManager[None]:
    """A plan fits if the blocks of kind 0 fit."""

    def change(fits: Any) -> Any:
        def blind(self: SlabPool, needs: Any, **how: bool) -> bool:
            return bool(fits(self, [needs[0], *(0 for _ in needs[1:])], **how))

        return blind

    return changed(SlabPool, "fits", change)


def passed_blocks_written_at_once() -> AbstractContextManager[None]:
    """A row that decodes goes on in a block that it has passed, although a step in flight sees it."""

    def change(may_go_on: Any) -> Any:
        return lambda self, each, slots, num_in_flight: may_go_on(self, each, slots, 0)

    return changed(WindowBlocks, "may_go_on", change)


BUGS = (
    retired_without_quarantine,
    passed_blocks_written_at_once,
    drafts_counted_as_certain,
    window_one_key_short,
    window_of_all_layers,
    slab_lent_while_quarantined,
    retired_blocks_given_back_again,
    other_kinds_do_not_count,
)


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=[bug.__name__ for bug in BUGS])
def test_random_plans_find_what_went_wrong_elsewhere(bug: Callable[[], AbstractContextManager[None]]) -> None:
    with bug():
        for seed in range(60):
            try:
                walk(seed)
            except AssertionError:
                return
    raise AssertionError(f"{bug.__name__} was not found")

"""Admission where layers have several kinds of memory: each kind counts. The oracle counts blocks one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import count, product
from random import Random

import numpy as np
import pytest

from millrace.kernels.layout.kv_layout import KVKind, KVLayout, KVRoom
from millrace.model.decoder.rope import tables_bytes
from millrace.model.families.registry import parse_config
from millrace.stages.allocate.allocator import Allocator
from millrace.stages.backends import memory_needs
from millrace.stages.backends.memory_needs import cached_of_one
from millrace.stages.config import EngineConfig
from millrace.stages.messages import StepDone, TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.routing.reported_load import load_of
from millrace.stages.schedule.scheduler import Scheduler, StepLimits
from millrace.stages.schedule.spare_blocks import SpareOfKinds
from millrace.stages.schedule.step_timing.step_time_model import StepTimeCosts
from tests.model.checkpoints import SHAPE
from tests.stages.schedule.plans import ints

SIZE = 4  # tokens a block


def layout(num_slabs: int, window: int = 16, sizes: tuple[int, int] = (10, 2)) -> KVLayout:
    """A full kind of one layer and a window of five, as Gemma 3 has them."""
    kinds = (
        KVKind("full", (5,), None, 1, 64, 64, 64),
        KVKind("window", (0, 1, 2, 3, 4), window, 1, 64, 64, 320),
    )
    numbers = tuple(num_slabs * size for size in sizes)
    return KVLayout(kinds, SIZE, 640, num_slabs, sizes, numbers, ((1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (0, 0)))


def fits_by_hand(room: KVRoom, needs: list[int]) -> bool:
    """Tries each way to move slabs."""
    for given in product(*(range(idle + 1) for idle in room.idle)):
        left = room.num_unlent + sum(given)
        for need, own, gave, size in zip(needs, room.own, given, room.blocks_per_slab, strict=True):
            has = own - gave * size
            if has < 0:
                break
            while has < need:
                has, left = has + size, left - 1
        else:
            if left >= 0:
                return True
    return False


@pytest.mark.parametrize("seed", range(8))
def test_a_room_fits_what_some_way_to_move_slabs_makes_fit(seed: int) -> None:
    dice = Random(seed)
    for _ in range(60):
        sizes = dice.randint(1, 5), dice.randint(1, 5), dice.randint(1, 3)
        idle = tuple(dice.randint(0, 2) for _ in sizes)
        own = tuple(slabs * size + dice.randint(0, 4) for slabs, size in zip(idle, sizes, strict=True))
        room = KVRoom(own, idle, dice.randint(0, 3), sizes)
        needs = [dice.randint(0, 9) for _ in sizes]
        assert room.fits(needs) == fits_by_hand(room, needs), f"seed {seed}: {room}, {needs}"
        others = [0, *needs[1:]]
        most = next(number for number in count() if not fits_by_hand(room, [number, *needs[1:]])) - 1
        assert room.most_of_first(others) == most, f"seed {seed}: {room}, {needs}"


@pytest.mark.parametrize(("num_slabs", "length"), [(7, 40), (30, 8), (30, 100), (31, 41), (3, 12), (2, 40)])
def test_as_many_sequences_are_held_at_once_as_fit_one_after_another(num_slabs: int, length: int) -> None:
    found = 0
    while slabs_by_hand([length] * (found + 1)) <= num_slabs:
        found += 1
    assert layout(num_slabs).num_at_once(length) == found


def slabs_by_hand(lengths: list[int]) -> int:
    """Slabs for sequences of these lengths, whose blocks are taken one by one."""
    slabs, left = 0, [0, 0]
    for length in lengths:
        whole = -(-length // SIZE)
        for kind, need in enumerate((whole, min(whole, 5))):  # 16 keys may lie in five blocks
            for _ in range(need):
                if not left[kind]:
                    left[kind], slabs = (10, 2)[kind], slabs + 1
                left[kind] -= 1
    return slabs


class Engine:
    """A scheduler and an allocator. Steps run at once."""

    def __init__(self, made: KVLayout, num_slots: int, *, is_told: bool = True) -> None:
        kinds = made if is_told else None
        self.scheduler = Scheduler(StepLimits(num_slots, 4096, 200, SIZE, steps_in_flight=1, kv_layout=kinds))
        self.allocator = Allocator(made.num_blocks[0], SIZE, num_slots, 200, layout=made)
        self.num_preempted = 0

    def add(self, number: int, num_tokens: int, max_tokens: int = 100) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self.scheduler.add(TokenRequest(f"r{number}", 0, np.arange(num_tokens, dtype=np.int32), params, number))

    def step(self) -> None:
        plan = self.scheduler.plan()
        assert plan is not None
        grant, report = self.allocator.serve(plan)
        self.allocator.check()
        self.num_preempted += len(report.preempted)
        self.scheduler.on_report(report)
        assert grant is not None
        slots = grant.slots[grant.is_sampled]
        numbers = self.scheduler.slots.sequence_id[slots]
        prompts = self.scheduler.slots.num_prompt[slots]
        places = ((grant.starts + grant.num_tokens)[grant.is_sampled] - prompts).astype(np.intp)
        tokens = np.ones(len(slots), np.intp)
        self.scheduler.on_done(StepDone(grant.step, slots, numbers, places, tokens, np.zeros(len(slots), np.bool_)))

    @property
    def num_running(self) -> int:
        return self.scheduler.slots.num_running


def begun(made: KVLayout, num_slots: int, num_tokens: int, *, is_told: bool = True) -> Engine:
    """One sequence decodes, and as many as there are other slots have come."""
    engine = Engine(made, num_slots, is_told=is_told)
    engine.add(0, 9)
    engine.step()
    engine.step()
    for number in range(1, num_slots):
        engine.add(number, num_tokens)
    engine.step()
    return engine


@pytest.mark.parametrize(("num_slabs", "num_tokens"), [(25, 30), (26, 7), (28, 90), (40, 15), (60, 63)])
def test_as_many_are_admitted_as_fit_with_all_their_kinds(num_slabs: int, num_tokens: int) -> None:
    engine = begun(layout(num_slabs), 40, num_tokens)
    found = 0
    # the running sequence grows by MAX_GROWTH blocks, and each one that was admitted by one
    while slabs_by_hand([11 + 6 * SIZE, *[num_tokens + 1 + SIZE] * found, num_tokens + 1]) <= num_slabs:
        found += 1
    assert 0 < engine.num_running - 1 == found and not engine.num_preempted


def test_by_one_kind_alone_more_are_admitted_than_can_start() -> None:
    counted, uncounted = (begun(layout(25), 40, 30, is_told=is_told) for is_told in (True, False))
    for engine in (counted, uncounted):
        engine.step()  # prompts hold more of the window in the step that computes them
    num_started = [int(np.count_nonzero(engine.allocator.tables.capacity)) for engine in (counted, uncounted)]
    assert counted.num_running == num_started[0] and uncounted.num_running > num_started[1]


def test_a_router_hears_of_the_tokens_that_all_kinds_hold() -> None:
    costs = StepTimeCosts(0.01, 1e-4, 1e-9, 1e-4, 1e-8)
    for num_slabs in (25, 31):
        engine = Engine(layout(num_slabs), 40)
        empty = load_of(engine.scheduler, engine.allocator, costs, 0)
        assert empty.free_tokens == empty.capacity_tokens > 0
        for number in range(3):
            engine.add(number, 30)
        engine.step()
        told = load_of(engine.scheduler, engine.allocator, costs, 0)
        most = max(count for count in range(100) if slabs_by_hand([31] * count) <= num_slabs)
        assert most * 31 <= told.capacity_tokens < (most + 1) * 31 < engine.allocator.pool.num_blocks * SIZE
        assert 0.5 * (told.capacity_tokens - 3 * 31) < told.free_tokens < told.capacity_tokens - 3 * 31


def test_the_longest_sequence_that_fits_keeps_the_last_tokens_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = parse_config({"model_type": "llama", **SHAPE}, "")
    windows = (None, 50, 200, 50)
    mixers = [replace(llama.attention, window=window) for window in windows]
    spec = replace(llama, layers=tuple(replace(llama.layers[0], mixer=mixer) for mixer in mixers))
    each, config = llama.attention.cached_numbers, EngineConfig(max_model_len="auto")
    assert cached_of_one(spec, 120) == each * (120 + 50 + 120 + 50) and cached_of_one(spec, 30) == each * 120
    for free in (100_000, 500_000, 2_000_000):
        monkeypatch.setattr(memory_needs, "free_host_share", lambda config, free=free: free)
        most, used = 0, 0
        while True:
            used += 2 * tables_bytes(spec, 1) + each * sum(
                window is None or most < window for window in (None, 50, 200, 50)
            )
            if used > free:
                break
            most += 1
        assert memory_needs.positions_that_fit(config, spec, 1 << 40, "cpu") == most


def test_a_prompt_that_is_not_split_needs_a_window_of_its_own_length() -> None:
    made, room = layout(12), KVRoom((0, 0), (0, 0), 12, (10, 2))
    split, whole = (SpareOfKinds(made, room, splits_prompts=splits) for splits in (True, False))
    assert split.for_tokens(40) == 90 and whole.for_tokens(40) == 70  # beside 5 and 10 blocks of the window
    assert whole.for_tokens(200) < 0 and split.for_tokens(200) == 90


def test_blocks_of_parked_rows_and_what_rows_lack_count_in_every_kind() -> None:
    made = layout(12)
    spare = SpareOfKinds(made, KVRoom((3, 1), (0, 0), 2, (10, 2)), splits_prompts=True)
    spare.count_rows(ints(4, 30), ints(12, 36))  # 1 and 8 blocks become 3 and 9; of the window 1 and 5 become 3 and 5
    assert spare.for_tokens(1) == 10 + 3 - 3  # 1 + 2 blocks of the window: its own and a slab
    spare.count_parked(ints(17))  # 5 blocks of each
    assert spare.for_tokens(1) == 20 + 3 - 3 + 5

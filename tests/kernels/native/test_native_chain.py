"""Steps that follow each other by the library's own thread: what steps one by one come to, to the bit."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.kernels.native.slot_step import NativeChooser, StepChain
from tests.kernels.draw_rows import draw_rows
from tests.kernels.native.test_native_slots import NUM_SLOTS, PROMPTS, Slots
from tests.kernels.native_weights import Array

pytestmark = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
)

RUNNING = np.array(sorted(PROMPTS))  # slots
MOST_LINKS = 40


class Linked:
    """Slots as in the tests of steps one by one, every second one's tokens drawn unless none are, with blocks for all
    that comes."""

    def __init__(self, are_drawn: bool = True) -> None:
        self.slots = Slots("bfloat16")
        self.run = self.slots.run
        self.lengths = np.zeros(NUM_SLOTS, np.int64)  # tokens in the cache
        for slot, count in PROMPTS.items():
            self.lengths[slot] = count
            blocks = self.run._tables[slot]
            self.slots.tables[slot, : len(blocks)] = blocks
        free = iter(sorted(set(range(self.run.cache.num_blocks)) - {b for t in self.run._tables.values() for b in t}))
        for slot, count in PROMPTS.items():
            for place in range(-(-count // 4), -(-(count + MOST_LINKS) // 4)):
                self.slots.tables[slot, place] = next(free)
        self.chooser = NativeChooser(
            self.run.model,
            is_random=(np.arange(NUM_SLOTS) % 2 == 1) & are_drawn,
            draws=draw_rows(NUM_SLOTS, temperature=1.3, top_p=0.95),
            seeds=np.arange(NUM_SLOTS, dtype=np.uint64) + 11,
            num_prompt=self.lengths.astype(np.int32),
        )
        self.num_prompt = self.lengths.copy()
        self.chain = StepChain(self.slots.decoding, self.chooser)

    def one_by_one(self, rows: Array) -> Array:
        """Tokens of the next step of these slots, by a call for its logits and one for its choice."""
        logits = self.slots.decoding.step(rows, self.lengths[rows].astype(np.int32))
        assert logits is not None
        places = self.lengths[rows] + 1 - self.num_prompt[rows]
        token_ids, is_broken = self.chooser.choose(logits, rows, places)
        assert not is_broken.any()
        self.slots.last_tokens[rows] = token_ids
        self.lengths[rows] += 1
        return token_ids


def rows_of(step: int) -> Array:
    """Some of the slots, others in turn, as where sequences end."""
    return RUNNING[: 2 + step % 3] if step % 4 == 3 else RUNNING


@pytest.mark.parametrize("are_drawn", [False, True])
def test_links_choose_what_steps_one_by_one_do_wherever_they_are_handed_over(are_drawn: bool) -> None:
    alone, linked = Linked(are_drawn), Linked(are_drawn)
    right = [alone.one_by_one(rows_of(step)) for step in range(MOST_LINKS)]
    num_followed, chain = 0, linked.chain

    def starts(step: int) -> Array:
        taken = sum(np.isin(np.arange(NUM_SLOTS), rows_of(before)).astype(np.int64) for before in range(step))
        return (linked.num_prompt + taken)[rows_of(step)].astype(np.int32)

    is_in_line = False
    for step in range(MOST_LINKS):
        if not is_in_line:
            chain.begin(step, rows_of(step), starts(step))
        is_in_line = step + 1 < MOST_LINKS and chain.follow(step + 1, rows_of(step + 1), starts(step + 1))
        num_followed += is_in_line
        found = chain.wait(step, len(rows_of(step)))
        assert found is not None and not found[1].any()
        assert np.array_equal(found[0], right[step]), f"step {step}"
    assert num_followed > 0, "no step was handed over in time"
    assert np.array_equal(linked.run.cache.data, alone.run.cache.data)
    assert np.array_equal(linked.slots.last_tokens, alone.slots.last_tokens)


def test_nothing_follows_a_step_that_is_over_or_never_began() -> None:
    linked = Linked()
    before, tokens = linked.run.cache.data.copy(), linked.slots.last_tokens.copy()
    starts = linked.lengths[RUNNING].astype(np.int32)
    assert not linked.chain.follow(1, RUNNING, starts)
    linked.chain.drain()
    assert np.array_equal(linked.run.cache.data, before) and np.array_equal(linked.slots.last_tokens, tokens)
    linked.chain.begin(1, RUNNING, starts)
    assert linked.chain.wait(1, len(RUNNING)) is not None
    assert not linked.chain.follow(2, RUNNING, starts + 1)
    assert not linked.chain.follow(3, RUNNING, starts + 1)


@pytest.mark.parametrize("spoil", ["prompt", "slot"])
def test_a_step_that_cannot_run_does_nothing_and_neither_do_the_ones_behind_it(spoil: str) -> None:
    linked = Linked()
    before, tokens = linked.run.cache.data.copy(), linked.slots.last_tokens.copy()
    rows, starts = RUNNING.copy(), linked.lengths[RUNNING].astype(np.int32)
    if spoil == "prompt":
        linked.slots.num_known[RUNNING[2]] += 1
    else:
        rows[1] = NUM_SLOTS
    linked.chain.begin(7, rows, starts)
    is_behind = linked.chain.follow(8, RUNNING, starts + 1)
    for step in (7, 8) if is_behind else (7,):
        if spoil == "prompt":
            assert linked.chain.wait(step, len(RUNNING)) is None
        else:
            with pytest.raises(ValueError, match="row"):
                linked.chain.wait(step, len(RUNNING))
    assert np.array_equal(linked.run.cache.data, before) and np.array_equal(linked.slots.last_tokens, tokens)


@pytest.mark.parametrize("are_drawn", [False, True])
def test_a_row_without_a_number_is_told_and_the_others_have_their_tokens(are_drawn: bool) -> None:
    right, linked = Linked(are_drawn).one_by_one(RUNNING), Linked(are_drawn)
    broken = RUNNING[1]
    cache = linked.run.cache
    cache.data[cache.at(np.array(linked.run._tables[broken][:1], np.int64))] = 0x7FC0  # NaN in bfloat16
    linked.chain.begin(0, RUNNING, linked.lengths[RUNNING].astype(np.int32))
    found = linked.chain.wait(0, len(RUNNING))
    assert found is not None and found[1].tolist() == [slot == broken for slot in RUNNING]
    assert found[0][1] == 0 and np.array_equal(np.delete(found[0], 1), np.delete(right, 1))


def test_queued_steps_that_are_never_taken_make_room_for_later_ones() -> None:
    linked = Linked()
    for step in range(0, 24, 2):
        starts = linked.lengths[RUNNING].astype(np.int32)
        linked.chain.begin(step, RUNNING, starts)
        linked.chain.follow(step + 1, RUNNING, starts + 1)
    linked.chain.drain()
    again = Linked()
    linked.slots.last_tokens[:], linked.run.cache.data[:] = again.slots.last_tokens, again.run.cache.data
    assert np.array_equal(linked.one_by_one(RUNNING), again.one_by_one(RUNNING))


def test_a_model_that_is_dropped_while_a_link_runs_waits_for_it() -> None:
    for _ in range(20):
        linked = Linked()
        starts = linked.lengths[RUNNING].astype(np.int32)
        linked.chain.begin(0, RUNNING, starts)
        linked.chain.follow(1, RUNNING, starts + 1)
        del linked
        gc.collect()


def test_other_calls_come_behind_what_is_in_line() -> None:
    alone, linked = Linked(), Linked()
    right: list[Any] = [alone.one_by_one(RUNNING) for _ in range(3)]
    starts = linked.lengths[RUNNING].astype(np.int32)
    linked.chain.begin(0, RUNNING, starts)
    in_line = 1 + linked.chain.follow(1, RUNNING, starts + 1)
    linked.lengths[RUNNING] += in_line
    assert np.array_equal(linked.one_by_one(RUNNING), right[in_line])

"""Decoding steps that the library reads in the slots' own columns: the bits of steps whose inputs are made for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.model import NativeModel
from millrace.kernels.native.shape import DType
from millrace.kernels.native.slot_step import SlotStep
from tests.kernels.native_oracle import Checkpoint
from tests.kernels.native_run import Run
from tests.kernels.native_weights import Array

pytestmark = pytest.mark.skipif(
    not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no C++ compiler"
)

NUM_SLOTS = 5
PROMPTS = {3: 17, 0: 1, 4: 40, 1: 15}  # slot -> tokens


class Slots:
    """Sequences in slots, whose prompts are in the cache."""

    def __init__(self, dtype: DType = "float32", block_size: int = 4) -> None:
        self.run = Run(Checkpoint.random().load(dtype, num_threads=2, worth_a_thread=1), block_size, num_blocks=160)
        self.tables = np.zeros((NUM_SLOTS, 96 // block_size), np.int32)
        self.last_tokens = np.arange(7, 7 + NUM_SLOTS) * 5
        self.num_known = np.zeros(NUM_SLOTS, np.int64)
        for slot, count in PROMPTS.items():
            self.run.step({slot: [(slot * 31 + i) % 70 for i in range(count)]})
            self.num_known[slot] = count
        self.decoding = SlotStep(
            self.run.model, self.run.cache, last_tokens=self.last_tokens, num_known=self.num_known, tables=self.tables
        )

    def expect(self, slots: list[int]) -> Array:
        """[L, V] of a step that is told all that it reads; it takes the blocks, too."""
        self.run.step({slot: [int(self.last_tokens[slot])] for slot in slots})
        for slot in slots:
            self.tables[slot, : len(self.run._tables[slot])] = self.run._tables[slot]
        return np.stack([self.run.logits[slot][-1] for slot in slots])

    def starts(self, slots: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Where their newest tokens come, once they are there."""
        return np.array([self.run._lengths[slot] - 1 for slot in slots], np.int32)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_of_slots_gives_the_bits_of_one_that_is_told_all_it_reads(dtype: DType, block_size: int) -> None:
    slots = Slots(dtype, block_size)
    for step in range(6):
        slots.last_tokens[:] = (slots.last_tokens * 3 + step) % 70
        some = [4, 3, 0, 1] if step % 2 else [1, 4]
        expected = slots.expect(some)
        written = slots.run.cache.data.copy()
        begun = [slot for slot in some if slots.starts([slot])[0] % block_size == 0]
        cache = slots.run.cache
        cache.data[cache.at(np.array([slots.run._tables[slot][-1] for slot in begun], np.int64))] = 0
        found = slots.decoding.step(np.array(some), slots.starts(some))
        assert found is not None and np.array_equal(found, expected)
        assert np.array_equal(slots.run.cache.data, written)


def test_a_step_with_a_row_that_reads_its_prompt_is_left_to_others() -> None:
    slots = Slots()
    slots.expect([4, 3])
    slots.num_known[3] += 1  # as after a preemption: the token came with the sequence
    before = slots.run.cache.data.copy()
    place = slots.run.cache.at(slots.run._tables[4][-1])
    slots.run.cache.data[place] = before[place] = 1
    assert slots.decoding.step(np.array([4, 3]), slots.starts([4, 3])) is None
    assert np.array_equal(slots.run.cache.data, before)
    assert slots.decoding.step(np.array([4]), slots.starts([4])) is not None


def spoil_token(slots: Slots) -> None:
    slots.last_tokens[4] = 70


def spoil_block(slots: Slots) -> None:
    slots.tables[4, 2] = 160


def spoil_position(slots: Slots) -> None:
    slots.run._lengths[4] = 97


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (spoil_token, "outside the vocabulary"),
        (spoil_block, "a block id outside the cache"),
        (spoil_position, "do not fit"),
    ],
)
def test_columns_that_point_outside_are_refused_before_any_computing(
    spoil: Callable[[Slots], None], problem: str
) -> None:
    slots = Slots()
    slots.expect([4])
    slots.run.cache.data[:] = 1
    spoil(slots)
    with pytest.raises(ValueError, match=problem):
        slots.decoding.step(np.array([4]), slots.starts([4]))
    with pytest.raises(ValueError, match="not one of the tokens"):
        slots.decoding.step(np.array([NUM_SLOTS]), np.zeros(1, np.int32))
    assert (slots.run.cache.data == 1).all()


def test_a_cache_of_another_type_is_refused() -> None:
    model: NativeModel = Checkpoint.random().load("float32", num_threads=1)
    cache = NativeCache.uniform(model.shape, 4, 4, "bfloat16")
    longs = np.zeros(2, np.int64)
    with pytest.raises(AssertionError, match="cache dtype bfloat16"):
        SlotStep(model, cache, last_tokens=longs, num_known=longs, tables=np.zeros((2, 2), np.int32))

"""Memory that is taken before it is used: how much, when, and that nothing in it changes."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

from millrace.kernels.native.cache import NativeCache
from millrace.kernels.native.page_preallocation import (
    CHECK_INTERVAL_BYTES,
    IDLE_S,
    LARGE_PAGE,
    PagePreallocation,
    take_pages,
)
from tests.kernels.native.test_native_weights import resident_bytes
from tests.kernels.native_weights import small_shape

MIB = 1 << 20
HAS_CALL = take_pages(np.zeros(1 << 14, np.uint8).ctypes.data // 4096 * 4096, 4096)
NEEDS_CALL = pytest.mark.skipif(not HAS_CALL, reason="this system takes no pages before they are written to")

SHAPE = small_shape(vocab_size=8, num_heads=1, num_kv_heads=1, head_dim=64, intermediate_size=64, rotary_dim=64)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Recorded:
    """Regions of address space, of which nothing is really taken."""

    def __init__(
        self, num_regions: int, region_bytes: int, ahead_bytes: int, num_takers: int = 1, left_bytes: int = 0
    ) -> None:
        self.memory = np.empty((num_regions, region_bytes), np.uint8)
        self.clock = Clock()
        self.taken: list[tuple[int, int]] = []  # (region, bytes from its beginning) where each piece ends
        self.answer = True
        self.room_bytes = 1 << 40
        self.ahead = PagePreallocation(
            self.memory,
            ahead_bytes,
            left_bytes=left_bytes,
            num_takers=num_takers,
            take=self._take,
            available_bytes=lambda: self.room_bytes,
            now=self.clock,
        )
        self.clock.now_s += 1  # idle

    def _take(self, address: int, num_bytes: int) -> bool:
        place = address + num_bytes - self.memory.ctypes.data
        self.taken.append((max(0, (place - 1) // self.memory.strides[0]), place % self.memory.strides[0]))
        self.room_bytes -= num_bytes
        return self.answer

    def take(self) -> list[tuple[int, int]]:
        """What is taken once it begins."""
        before = len(self.taken)
        self.ahead.start()
        self.ahead.join()
        return self.taken[before:]


@NEEDS_CALL
def test_pages_past_what_is_used_are_there_and_all_hold_what_they_held():
    memory = np.zeros((3, 32 * MIB), np.uint8)
    memory[0, :5] = memory[1, 3 * MIB : 3 * MIB + 5] = memory[2, 9 * MIB] = 7
    clock = Clock()
    ahead = PagePreallocation(memory, 8 * MIB, now=clock)
    gc.collect()  # what other tests left behind is not given back meanwhile
    before = resident_bytes()
    clock.now_s += 1
    ahead.start()
    ahead.join()
    grown = resident_bytes() - before
    assert 3 * 8 * MIB - 4 * LARGE_PAGE <= grown <= 3 * (8 * MIB + LARGE_PAGE) + MIB
    assert np.flatnonzero(memory[0]).tolist() == [0, 1, 2, 3, 4]
    assert np.flatnonzero(memory[1]).tolist() == [3 * MIB + i for i in range(5)]
    assert np.flatnonzero(memory[2]).tolist() == [9 * MIB]


def test_each_region_has_so_much_ahead_of_what_is_used_and_the_first_to_need_a_page_gets_it_first():
    recorded = Recorded(3, 64 * MIB, 8 * MIB)
    first = recorded.take()
    assert {region for region, _ in first[:3]} == {0, 1, 2}
    for region in range(3):
        reached = max(end for place, end in first if place == region)
        assert 8 * MIB <= reached <= 8 * MIB + LARGE_PAGE
    recorded.ahead.note_used(20 * MIB)
    recorded.ahead.join()
    for region in range(3):
        reached = max(end for place, end in recorded.taken if place == region)
        assert 28 * MIB <= reached <= 28 * MIB + LARGE_PAGE
    assert len(recorded.taken) == len(set(recorded.taken))  # nothing twice
    assert recorded.ahead.num_taken >= 3 * 28 * MIB


def test_nothing_is_taken_past_the_end_of_a_region():
    recorded = Recorded(1, 5 * MIB, 64 * MIB)
    recorded.take()
    assert recorded.ahead.num_taken <= 5 * MIB + 2 * 4096
    assert recorded.take() == []


def test_small_growth_does_not_trigger_a_check_and_an_eighth_of_the_rest_does():
    recorded = Recorded(1, 64 * MIB, 16 * MIB)
    num_taken = len(recorded.take())
    recorded.ahead.note_used(2 * MIB)
    recorded.ahead.join()
    assert len(recorded.taken) == num_taken
    recorded.ahead.note_used(5 * MIB)
    recorded.ahead.join()
    assert len(recorded.taken) > num_taken


@pytest.mark.parametrize("num_takers", [1, 2])
def test_nothing_is_taken_within_a_step_or_shortly_after_it(num_takers: int):
    recorded = Recorded(1, 64 * MIB, 8 * MIB, num_takers)
    recorded.ahead.begin_step()
    recorded.ahead.start()
    time.sleep(2 * IDLE_S)
    assert not recorded.taken
    recorded.ahead.end_step()
    time.sleep(2 * IDLE_S)  # by the clock that it reads, no time has passed
    assert not recorded.taken
    recorded.clock.now_s += IDLE_S
    recorded.ahead.join()
    assert recorded.taken


def test_two_take_pages_at_a_time_and_none_of_them_twice():
    memory = np.empty((2, 64 * MIB), np.uint8)
    clock, both_are_there = Clock(), threading.Barrier(2, timeout=60)
    taken: list[int] = []
    takers: set[int] = set()

    def take(address: int, num_bytes: int) -> bool:
        if threading.get_ident() not in takers:
            takers.add(threading.get_ident())
            both_are_there.wait()
        taken.append(address)
        return True

    ahead = PagePreallocation(memory, 16 * MIB, num_takers=2, take=take, now=clock)
    clock.now_s += 1
    ahead.start()
    ahead.join()
    assert len(taken) == len(set(taken))
    assert 2 * 16 * MIB <= ahead.num_taken <= 2 * (16 * MIB + LARGE_PAGE)


def test_who_wants_nothing_ahead_gets_nothing():
    recorded = Recorded(1, 64 * MIB, 0)
    recorded.ahead.note_used(10 * MIB)
    assert recorded.take() == []


@pytest.mark.parametrize("num_takers", [1, 2])
def test_a_system_that_refuses_is_asked_once_by_each_thread(num_takers: int):
    recorded = Recorded(2, 64 * MIB, 8 * MIB, num_takers)
    recorded.answer = False
    assert 1 <= len(recorded.take()) <= num_takers
    assert recorded.take() == []
    assert recorded.ahead.num_taken == 0
    assert not take_pages(4096, 4096)  # nothing is there


@pytest.mark.parametrize("num_takers", [1, 2])
def test_so_much_is_left_to_others_and_a_little_more_that_is_used_has_it_look_again(num_takers: int):
    recorded = Recorded(2, 64 * MIB, 64 * MIB, num_takers, left_bytes=32 * MIB)
    recorded.room_bytes = 32 * MIB + 9 * MIB
    recorded.take()
    assert 32 * MIB - num_takers * LARGE_PAGE <= recorded.room_bytes < 32 * MIB
    assert recorded.take() == []
    recorded.room_bytes = 128 * MIB
    recorded.ahead.note_used(CHECK_INTERVAL_BYTES + 1)
    recorded.ahead.join()
    assert recorded.ahead.num_taken >= (9 + 96) * MIB


@NEEDS_CALL
def test_memory_of_host_blocks_is_taken_ahead_once_the_cache_is_nearly_full():
    cache = NativeCache.uniform(SHAPE, 512, 16, "float32", blocks_ahead=512)
    host = cache.make_host_blocks(512)
    block_bytes = host[:1].nbytes
    ahead = cache.ahead_on_host
    assert ahead is not None
    cache.note_used(383)
    ahead.join()
    assert ahead.num_taken == 0
    cache.begin_step()
    cache.note_used(384)
    time.sleep(2 * IDLE_S)
    assert ahead.num_taken == 0
    cache.end_step()
    ahead.join()
    assert 256 * block_bytes <= ahead.num_taken <= 256 * block_bytes + LARGE_PAGE
    cache.copy_out(np.array([1, 2]), host, np.array([0, 300]))
    ahead.join()
    assert 512 * block_bytes <= ahead.num_taken < 512 * block_bytes + LARGE_PAGE


@NEEDS_CALL
def test_a_released_cache_takes_no_more_memory():
    cache = NativeCache.uniform(SHAPE, 2048, 16, "bfloat16", blocks_ahead=1024)
    ahead = cache.ahead
    ahead.begin_step()  # threads begin, and wait
    cache.note_used(1023)
    del cache
    gc.collect()
    ahead.join()
    assert ahead.num_taken == 0
    ahead.end_step()
    ahead.start()
    ahead.join()
    assert ahead.num_taken == 0

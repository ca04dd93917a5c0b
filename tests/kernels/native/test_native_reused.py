"""Memory of logits is taken again, and never while it can be read."""

from __future__ import annotations

import numpy as np

from millrace.kernels.native.arrays import LogitsBuffers


def test_memory_is_reused_once_it_is_released():
    rows = LogitsBuffers(8)
    first = rows.take(4)
    place = first.ctypes.data
    del first
    assert rows.take(4).ctypes.data == place
    assert rows.take(3).ctypes.data == place  # and so is a part of it


def test_memory_in_use_is_never_given_out_again():
    rows = LogitsBuffers(8)
    held = []
    for number in range(10):
        taken = rows.take(5)
        taken[:] = number
        held.append(taken[2:3, ::2])  # a view of a view is enough
        del taken
    assert [row[0, 0] for row in held] == list(range(10))
    assert len({row.ctypes.data for row in held}) == 10


def test_larger_steps_get_larger_memory_and_the_small_one_is_let_go():
    rows = LogitsBuffers(8)
    for number in (1, 2, 5, 100):
        taken = rows.take(number)
        assert taken.shape == (number, 8) and taken.dtype == np.float32 and taken.flags.c_contiguous
        del taken
        assert sum(kept.size for kept in rows._kept) == 8 * number


def test_two_that_alternate_take_no_new_memory():
    rows = LogitsBuffers(8)
    before, places = rows.take(6), set()
    for _ in range(10):
        now = rows.take(6)  # while the one before is still held
        places.add(now.ctypes.data)
        before = now
    assert len(places | {before.ctypes.data}) <= 3

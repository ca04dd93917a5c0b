"""Comparisons, counts and sums of arrays."""

import numpy as np
import pytest

from millrace.stages.array_checks import equal, is_zero, num_true, total


@pytest.mark.parametrize("dtype", [np.int32, np.intp, np.int8])
@pytest.mark.parametrize("length", [0, 1, 17])
def test_columns_are_equal_until_one_number_differs_or_one_is_longer(dtype: type, length: int) -> None:
    column = np.arange(length, dtype=dtype)
    assert equal(column, column.copy())
    assert equal(column, np.repeat(column, 2)[::2])  # wherever in memory they lie
    assert not equal(column, np.append(column, column.dtype.type(0)))
    for row in range(length):
        other = column.copy()
        other[row] += 1
        assert not equal(column, other)


@pytest.mark.parametrize("dtype", [np.int8, np.uint64])
@pytest.mark.parametrize("length", [0, 1, 17])
def test_a_column_is_zero_until_one_number_is_not(dtype: type, length: int) -> None:
    column = np.zeros(length, dtype)
    assert is_zero(column)
    for row in range(length):
        for value in (1, np.iinfo(dtype).max):
            other = column.copy()
            other[row] = value
            assert not is_zero(other)


@pytest.mark.parametrize("length", [0, 1, 17])
def test_what_is_true_is_counted_wherever_in_memory_it_lies(length: int) -> None:
    is_even = np.arange(length) % 2 == 0
    assert num_true(is_even) == num_true(np.repeat(is_even, 2)[::2]) == (length + 1) // 2


@pytest.mark.parametrize("length", [0, 1, 17])
def test_a_sum_of_many_small_numbers_does_not_overflow_their_type(length: int) -> None:
    column = np.full(length, 2**31 - 1, np.int32)
    assert total(column) == total(np.repeat(column, 2)[::2]) == length * (2**31 - 1)

"""Columns of a step compared."""

import numpy as np
import pytest

from millrace.stages.columns import equal


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

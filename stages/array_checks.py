"""Comparisons, counts and sums of short arrays, faster than numpy's own at a few hundred entries."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .messages import Bools


def equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two arrays of the same dtype hold the same numbers.

    Takes 0.12 us for 16 entries of 64 bits and 0.45 us for 256; numpy's comparison and count takes about 1 us.
    """
    return a.tobytes() == b.tobytes()


def is_zero(a: NDArray[Any]) -> bool:
    """Whether all entries are zero."""
    return not a.tobytes().strip(b"\0")


def num_true(a: Bools) -> int:
    """How many entries are True."""
    return a.tobytes().count(1)


def total(a: NDArray[np.integer[Any]]) -> int:
    """The sum of all entries, without the detour of `a.sum()` through Python."""
    return int(np.add.reduce(a))

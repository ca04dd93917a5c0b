"""Columns of a step compared and counted: what numpy offers for it costs more than a few dozen rows are worth.

Knows arrays of one length. Refuses to know what is in them.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from .messages import Bools


def equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether two arrays of one type hold the same numbers: 0.12 us for 16 of 64 bits, 0.45 for 256. To compare and
    count what differs takes 1.1 and 0.9 (2 busy cores of an EPYC)."""
    return a.tobytes() == b.tobytes()


def is_zero(a: NDArray[Any]) -> bool:
    """Whether all numbers are zero."""
    return not a.tobytes().strip(b"\0")


def num_true(a: Bools) -> int:
    """How many are."""
    return a.tobytes().count(1)

"""Rows of `DRAWS`, the numbers of a draw, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.kernels.layout.sampling_fields import DRAWS


def draw_rows(num_rows: int, **values: Any) -> NDArray[np.float64]:
    """[num_rows, D]: `values` are one number for all rows, or one each; the other cuts are off, at temperature 1."""
    given = {field.name: field.default for field in DRAWS} | values
    assert len(given) == len(DRAWS), values
    return np.stack([np.broadcast_to(np.asarray(value, np.float64), num_rows) for value in given.values()], 1)

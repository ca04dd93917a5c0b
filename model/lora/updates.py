"""The numbers of merging, in float32: what an adapter makes of one weight of its base."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def merged(weight: Floats, a: Floats, b: Floats, scale: float, magnitude: Floats | None) -> Floats:
    """W + scale B A of a linear: weight [rows, columns], a [r, columns], b [rows, r].

    With DoRA's `magnitude` [rows], each row of the sum gets that length.
    """
    total = np.asarray((b * np.float32(scale)) @ a, np.float32)
    total += weight
    return total if magnitude is None else total * _factors(total, magnitude, axis=1)[:, None]


def merged_embedding(weight: Floats, a: Floats, b: Floats, scale: float, magnitude: Floats | None) -> Floats:
    """The same for an embedding: weight [V, hidden], a [r, V], b [hidden, r]; DoRA's lengths are those of columns."""
    total = np.asarray(a.T @ (b * np.float32(scale)).T, np.float32)
    total += weight
    return total if magnitude is None else total * _factors(total, magnitude, axis=0)


def _factors(total: Floats, magnitude: Floats, axis: int) -> Floats:
    """A row or column of zeros stays one."""
    lengths = np.sqrt(np.einsum("ij,ij->i" if axis == 1 else "ij,ij->j", total, total))
    return np.asarray(magnitude / np.where(lengths == 0, 1, lengths), np.float32)

"""Rows of `DRAWS`, the numbers of a draw, for tests; and what they keep, by the definitions in float64."""

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


def kept_weights(
    row: NDArray[np.floating[Any]],
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    top_n_sigma: float = 0.0,
    typical_p: float = 1.0,
) -> NDArray[np.float64]:
    """Weights [V] of what may be drawn from the logits of a row; 0 elsewhere."""
    logits = row.astype(np.float64)
    value = (logits - logits.max()) / temperature
    falling, is_kept = np.sort(value)[::-1], np.ones(len(row), np.bool_)
    if top_k:
        is_kept &= value >= falling[min(top_k, len(row)) - 1]
    if top_p < 1:
        weights = np.exp(falling) * (falling >= value[is_kept].min())
        before = weights.cumsum() - weights
        is_kept &= value >= falling[np.count_nonzero(before < top_p * weights.sum()) - 1]
    if min_p:
        is_kept &= value >= np.log(min_p)
    if top_n_sigma > 0:
        known = logits[np.isfinite(logits)]
        sigma = np.sqrt(((known - known.mean()) ** 2).sum() / len(known))
        is_kept &= logits >= logits.max() - top_n_sigma * sigma
    if typical_p < 1:
        weights = np.where(is_kept, np.exp(value), 0.0)
        shares = weights / weights.sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(shares)
            apart = np.abs(surprise - np.nansum(shares * surprise))
        order = np.argsort(apart, kind="stable")
        last = np.count_nonzero(shares[order].cumsum() < typical_p)
        is_kept &= apart <= apart[order[min(last, len(row) - 1)]]
    return np.where(is_kept, np.exp(value), 0.0)

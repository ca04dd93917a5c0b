"""Two configurations compared in one process: the median of paired ratios, and how sure it is.

Blocks of steps alternate, A B B A, so that a drift of clocks or temperature meets both alike. Step i of a block of A is
paired with step i of the block of B beside it. The interval is a bootstrap over pairs of blocks, whose steps stay
together, since steps of one block resemble each other: percentiles of the medians of what was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

NUM_DRAWN = 2000


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """B over A: below 1 where B is faster."""

    ratio: float
    low: float
    high: float


def order(num_pairs: int) -> Iterator[str]:
    """A B B A A B B A ...: `num_pairs` blocks of each."""
    for pair in range(num_pairs):
        yield from "AB" if pair % 2 == 0 else "BA"


def paired_ratio(a: ArrayLike, b: ArrayLike, seed: int = 0, confidence: float = 0.95) -> PairedRatio:
    """Times of blocks x steps, [P, S] each."""
    ratios = np.asarray(b, float) / np.asarray(a, float)
    dice = np.random.default_rng(seed)
    drawn = dice.integers(0, len(ratios), (NUM_DRAWN, len(ratios)))
    medians = np.median(ratios[drawn].reshape(NUM_DRAWN, -1), axis=1)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return PairedRatio(float(np.median(ratios)), float(low), float(high))

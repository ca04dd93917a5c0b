"""The product of rows with a weight in groups of codes, in numpy: the twin of the native one, to the bit.

A row x becomes q = round(x / s), s = max |x| / 32512, which are 16 bits. The codes of a group, or of 128 columns of a
larger one, are multiplied by q as whole numbers; only the sums become float32: y += d * sum, and y += m * sum of q.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..layout.grouped_codes import TABLES, Floats, GroupedCodes, GroupedFormat

Longs = NDArray[np.int64]

MAX_SPLIT = np.float32(32512)  # 127 * 256
MAX_CHUNK = 128  # columns whose products are summed as whole numbers


def grouped_product(x: Floats, weight: GroupedCodes) -> Floats:
    """x [M, k] @ weight.T, [M, n]."""
    form, k = weight.format, weight.num_columns
    scales, q = split(x if weight.columns is None else x[:, weight.columns])
    d, m = _float_scales(weight)
    chunk = min(form.group, MAX_CHUNK)
    y = np.zeros((len(x), weight.num_rows), np.float32)
    turns = _turns(form, weight.unpacked())
    for super_begin in range(0, k, 256):
        for turn, (codes, factor) in enumerate(turns):
            for begin in range(super_begin, min(super_begin + 256, k), chunk):
                part = slice(begin, min(begin + chunk, super_begin + 256, k))
                whole = q[:, part] @ codes[:, part].T  # [M, k'] @ [k', n] -> [M, n]
                group = begin // form.group
                y = fused(d[:, group] * factor, whole.astype(np.float32), y)
                if m is not None and turn == 0:
                    y = fused(m[:, group], q[:, part].sum(1)[:, None].astype(np.float32), y)
    return y * scales[:, None]


def split(x: Floats) -> tuple[Floats, Longs]:
    """([M] scales, [M, k] whole numbers of 16 bits) of rows. NaN and infinity make the scale NaN."""
    largest = np.abs(x).max(1, initial=0)
    is_zero = ~(largest >= np.finfo(np.float32).tiny * MAX_SPLIT)
    with np.errstate(all="ignore"):
        inverse = np.where(is_zero, np.float32(0), MAX_SPLIT / largest)
        scales = np.where(is_zero, np.float32(0), largest / MAX_SPLIT) + (x * np.float32(0)).sum(1)
        return scales, np.rint(x * inverse[:, None]).astype(np.int64)


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c, rounded once: in float64 to the odd neighbour, which leaves the rounding to float32 as it is."""
    product = a.astype(np.float64) * b.astype(np.float64)  # exact
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    is_even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(error > 0, np.inf, -np.inf))
    rounded: Floats = np.where((error != 0) & is_even, odd, total).astype(np.float32)
    return rounded


def _turns(form: GroupedFormat, codes: NDArray[np.uint8]) -> list[tuple[Longs, np.float32]]:
    """The whole numbers that codes stand for, and their unit; those of nf4 in two parts of 8 bits."""
    if form.table == "e2m1":
        return [((2 * TABLES["e2m1"][codes]).astype(np.int64) - 2 * form.zero, np.float32(0.5))]
    if form.table == "nf4":
        whole = np.rint(TABLES["nf4"] * MAX_SPLIT).astype(np.int64)[codes]
        return [(whole >> 8, np.float32(256) / MAX_SPLIT), (whole & 255, np.float32(1) / MAX_SPLIT)]
    return [(TABLES[form.table][codes].astype(np.int64) - form.zero, np.float32(1))]


def _float_scales(weight: GroupedCodes) -> tuple[Floats, Any]:
    """([n, G] scales, [n, G] offsets or None); a zero of a group becomes an offset."""
    d, m = weight.group_scales(), weight.group_offsets()
    return d, -(d * weight.zeros.astype(np.float32)) if weight.zeros is not None else m

"""What the formats share to give their layers as rows of codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.layout.grouped_codes import GroupedCodes, GroupedFormat, NumberType, Packing
from ..grouped_matrix import GroupedMatrix, Index
from .codes import Bytes, unpacked
from .parts import Parts

ReadCodes = Callable[[Index], tuple[Bytes, Packing]]  # the codes of some rows, and how they are packed

NUMBER_TYPES: dict[str, NumberType] = {"F16": "f16", "BF16": "bf16", "F32": "f32", "F8_E8M0": "e8m0", "U8": "e8m0"}
LEAST = 16  # columns of a group, and what its size is a multiple of


def why_no_groups(group: int, num_columns: int) -> str | None:
    """Why products cannot use groups of this many columns; None: they can."""
    if group >= max(num_columns, LEAST) or (group >= LEAST and group % LEAST == 0):
        return None
    return f"groups of {group} columns are no multiple of {LEAST}"


def number_type(parts: Parts, suffix: str) -> NumberType:
    """The type of stored scales. Raises CheckpointError for one in which there are none."""
    dtype = parts.dtype(suffix)
    if dtype not in NUMBER_TYPES:
        parts.fail(f"{suffix} is {dtype}, and scales are {', '.join(NUMBER_TYPES)}")
    return NUMBER_TYPES[dtype]


def column_order(groups: NDArray[Any], group: int) -> NDArray[np.int32] | str | None:
    """The columns sorted by group, from the group of each; None: they are in order. Or why they cannot be sorted."""
    expected = np.arange(len(groups)) // group
    if np.array_equal(groups, expected):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], expected):
        return "its groups of columns (g_idx) are of different sizes"
    return order.astype(np.int32)


def codes_of_words(
    words: NDArray[Any], bits: int, count: int, order: NDArray[np.int32] | None
) -> tuple[Bytes, Packing]:
    """The first `count` codes of each row of 32-bit words [R, W], sorted by `order`, and how they are packed."""
    raw = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4 and order is None and count % 2 == 0:
        return np.ascontiguousarray(raw[:, : count // 2]), "pairs"
    if bits in (2, 4, 8):
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = ((raw[:, :, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(len(raw), -1)[:, :count]
    else:
        codes = unpacked(words, bits)[:, :count].astype(np.uint8)
    return np.ascontiguousarray(codes if order is None else codes[:, order]), "bytes"


def rows_of(
    parts: Parts,
    form: GroupedFormat,
    num_columns: int,
    read: ReadCodes,
    scales: NDArray[Any],
    zeros: NDArray[Any] | None = None,
    order: NDArray[np.int32] | None = None,
) -> GroupedMatrix:
    """A matrix of N rows with scales [N, G], and zeros [N, G] if the format has them.

    Raises CheckpointError for another number of groups, and for zeros that are no bytes.
    """
    if scales.shape[1] != form.num_groups(num_columns):
        parts.fail(f"scales for {scales.shape[1]} groups: {num_columns} columns have {form.num_groups(num_columns)}")
    if zeros is not None and form.has_zeros and (zeros.min(initial=0) < 0 or zeros.max(initial=0) > 255):
        parts.fail(f"zero points from {zeros.min()} to {zeros.max()}: must be 0 to 255 as codes")

    def take(index: Index) -> GroupedCodes:
        codes, packing = read(index)
        return GroupedCodes(
            format=form,
            num_columns=num_columns,
            codes=np.ascontiguousarray(codes),
            packing=packing,
            scales=np.ascontiguousarray(scales[index]),
            zeros=np.ascontiguousarray(zeros[index], np.uint8) if zeros is not None and form.has_zeros else None,
            columns=order,
        )

    return GroupedMatrix(form, len(scales), num_columns, take, columns=order)


def integers(bits: int, group: int, scale: NumberType, zeros: NDArray[Any]) -> GroupedFormat:
    """The format of integers with these zeros, which may all be the same."""
    first = int(zeros.flat[0])
    is_one = bool((zeros == first).all())
    return GroupedFormat(bits=bits, group=group, scale=scale, zero=first if is_one else 0, has_zeros=not is_one)


def signed(weight: NDArray[np.int8]) -> Bytes:
    """Signed bytes as codes, whose zero is 128."""
    codes: Bytes = weight.view(np.uint8) ^ np.uint8(128)
    return codes

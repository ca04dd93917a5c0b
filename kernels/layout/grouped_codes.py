"""A weight as a quantized file has it: codes of few bits, with scales and offsets for groups of columns.

Producers: `model/gguf` (blocks of GGUF files), `model/quantized` (AWQ, GPTQ, compressed-tensors, MXFP4, nf4) and the
quantization at load. They fill a `GroupedCodes` for some rows at a time, so that no matrix exists in float32.
Consumers: `kernels/native` packs the rows into panels and multiplies them; `kernels/reference/grouped.py` is its twin.
`NativeModel` takes the formats of its matrices by name when it is made (`formats`), then their rows (`set_rows`).

A weight [n, k] has G = ceil(k / group) groups of columns. The number in row i and column j, of group g = j // group, is

    scale[i, g] * (T[code[i, j]] - zero[i, g]) + offset[i, g]

numpy only. FP8 has no such form: its codes are no multiples of a scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

Table = Literal["affine", "iq4", "e2m1", "nf4"]
NumberType = Literal["f16", "bf16", "f32", "e8m0"]  # as float16, uint16, float32 and uint8 arrays
Packing = Literal["bytes", "pairs", "halves_of_32", "halves_of_64"]

TABLES: dict[Table, Floats] = {  # the values of codes, before the scale
    "affine": np.arange(256, dtype=np.float32),
    "iq4": np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32),
    "e2m1": np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32),
    "nf4": np.array(
        [
            *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
            *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
            *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
            *(0.7229568362236023, 1.0),
        ],
        np.float32,
    ),
}
STORED: dict[NumberType, type[np.generic]] = {
    "f16": np.float16,
    "bf16": np.uint16,
    "f32": np.float32,
    "e8m0": np.uint8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedFormat:
    """What the codes of a matrix mean; known before its numbers are read, as the memory for panels depends on it."""

    bits: int  # of a code: 2 to 8; 4 with a table other than affine
    group: int  # columns that share a scale, a multiple of 16, or at least k: one scale for each row
    table: Table = "affine"
    scale: NumberType = "f16"
    zero: int = 0  # the value that stands for 0, of all codes; 0 where there is a zero for each group
    has_zeros: bool = False  # a zero for each row and group, in bytes
    offset: NumberType | None = None  # None: there are no offsets
    # Two levels: `scales` and `offsets` are for `super_group` columns each, and a byte for each group multiplies them.
    super_group: int | None = None  # a multiple of `group`; None: one level
    has_signed_scales: bool = False  # the bytes of scales are int8; False: uint8, as those of offsets

    def check(self) -> None:
        """Raises ValueError for a format that does not exist."""
        if not 2 <= self.bits <= 8 or (self.table != "affine" and self.bits != 4):
            raise ValueError(f"bits = {self.bits}: must be 2 to 8, and 4 with the table {self.table}")
        if self.group < 16 or (self.super_group is not None and self.super_group % self.group):
            raise ValueError(f"group = {self.group}: must be at least 16 and divide super_group = {self.super_group}")
        if self.has_zeros and (self.zero or self.offset is not None):
            raise ValueError("a zero for each group: there must be no other zero and no offset")

    def num_groups(self, num_columns: int) -> int:
        """G: the last group may be cut."""
        return -(-num_columns // self.group)

    def num_supers(self, num_columns: int) -> int:
        """Columns of `scales` and `offsets`."""
        return self.num_groups(num_columns) if self.super_group is None else -(-num_columns // self.super_group)

    def bits_per_weight(self, num_columns: int) -> float:
        """Bits that a number takes, with its share of scales, zeros and offsets."""
        of_scales = 8 * np.dtype(STORED[self.scale]).itemsize
        of_offsets = 8 * np.dtype(STORED[self.offset]).itemsize if self.offset else 0
        of_bytes = 8 * self.has_zeros + (8 * (1 + bool(self.offset)) if self.super_group else 0)
        supers, groups = self.num_supers(num_columns), self.num_groups(num_columns)
        return self.bits + ((of_scales + of_offsets) * supers + of_bytes * groups) / num_columns


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedCodes:
    """Rows of a weight: R rows, k columns, G groups, S = `GroupedFormat.num_supers(k)`. All arrays are C-contiguous.

    codes      [R, k] uint8 in `bytes`; else [R, k / 2] with two codes of 4 bits a byte, the low half first:
               `pairs`: columns 2j and 2j + 1; `halves_of_32`: of each 32 columns j and j + 16 (most blocks of GGUF);
               `halves_of_64`: of each 64 columns j and j + 32 (Q4_K)
    scales     [R, S] as `GroupedFormat.scale` says
    zeros      [R, G] uint8, if the format has them
    offsets    [R, S] as `GroupedFormat.offset` says; two levels: their negatives where the file subtracts them
    sub_scales, sub_offsets  [R, G] int8 or uint8, and uint8: in two levels they multiply scales and offsets
    factor     multiplies all scales: NVFP4's scale of the matrix
    columns    [k] int32, the column of the input that each column of codes multiplies; None: in order. The same for all
               rows, and in q, k and v of one layer (GPTQ in the order of activations)
    """

    format: GroupedFormat
    num_columns: int  # k
    codes: Bytes
    scales: NDArray[Any]
    packing: Packing = "bytes"
    zeros: Bytes | None = None
    offsets: NDArray[Any] | None = None
    sub_scales: NDArray[Any] | None = None
    sub_offsets: Bytes | None = None
    factor: float = 1.0
    columns: NDArray[np.int32] | None = None

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.codes)

    def check(self) -> None:
        """Raises ValueError for arrays that do not fit the format. Does not look at the numbers."""
        self.format.check()
        form, rows, k = self.format, self.num_rows, self.num_columns
        if form.table == "nf4" and self.factor != 1.0:
            raise ValueError(f"factor = {self.factor}: must be 1 with the table nf4; multiply its scales instead")
        groups, supers = form.num_groups(k), form.num_supers(k)
        unit = {"bytes": 1, "pairs": 2, "halves_of_32": 32, "halves_of_64": 64}[self.packing]
        if k % unit or (unit > 1 and form.bits != 4):
            raise ValueError(f"packing {self.packing}: k = {k} must be a multiple of {unit}, and bits = {form.bits} 4")
        has_subs, sub_type = form.super_group is not None, np.int8 if form.has_signed_scales else np.uint8
        wanted: dict[str, tuple[int, type[np.generic]] | None] = {
            "codes": (k if unit == 1 else k // 2, np.uint8),
            "scales": (supers, STORED[form.scale]),
            "zeros": (groups, np.uint8) if form.has_zeros else None,
            "offsets": (supers, STORED[form.offset]) if form.offset else None,
            "sub_scales": (groups, sub_type) if has_subs else None,
            "sub_offsets": (groups, np.uint8) if has_subs and form.offset else None,
        }
        for name, want in wanted.items():
            array: NDArray[Any] | None = getattr(self, name)
            if (array is None) != (want is None):
                raise ValueError(f"{name}: must be {'given' if want else 'absent'} in {form}")
            if array is None or want is None:
                continue
            if array.shape != (rows, want[0]) or array.dtype != want[1] or not array.flags.c_contiguous:
                raise ValueError(f"{name}: {array.dtype} {array.shape}: must be {np.dtype(want[1])} {(rows, want[0])}")
        if self.columns is not None and self.columns.shape != (k,):
            raise ValueError(f"columns: {self.columns.shape}: must be {(k,)}")

    def rows(self, first: int, last: int) -> GroupedCodes:
        """Rows [first, last), as views."""
        names = ("codes", "scales", "zeros", "offsets", "sub_scales", "sub_offsets")
        parts: dict[str, Any] = {name: None if (a := getattr(self, name)) is None else a[first:last] for name in names}
        return replace(self, **parts)

    def unpacked(self) -> Bytes:
        """The codes [R, k], one a byte."""
        if self.packing == "bytes":
            return self.codes
        half = {"pairs": 1, "halves_of_32": 16, "halves_of_64": 32}[self.packing]
        parts = self.codes.reshape(self.num_rows, -1, 1, half)
        return np.concatenate([parts & 15, parts >> 4], axis=2).reshape(self.num_rows, self.num_columns)

    def group_scales(self) -> Floats:
        """[R, G] the scale of each group."""
        scales = self._by_group(as_floats(self.scales, self.format.scale), self.sub_scales)
        return scales if self.factor == 1.0 else scales * np.float32(self.factor)

    def group_offsets(self) -> Floats | None:
        """[R, G] the offset of each group; None: there are none. A zero of a group is no offset."""
        if self.offsets is None or self.format.offset is None:
            return None
        return self._by_group(as_floats(self.offsets, self.format.offset), self.sub_offsets)

    def dequantize(self) -> Floats:
        """The numbers [R, k] in float32, their columns in the order of the input: what every product is judged by."""
        values = self._values() - np.float32(self.format.zero)
        if self.zeros is not None:
            values -= self._by_column(self.zeros.astype(np.float32))
        values *= self._by_column(self.group_scales())
        offsets = self.group_offsets()
        if offsets is not None:
            values += self._by_column(offsets)
        if self.columns is None:
            return values
        ordered = np.empty_like(values)
        ordered[:, self.columns] = values
        return ordered

    def _values(self) -> Floats:
        """[R, k] what codes stand for, before zeros and scales."""
        codes = self.unpacked()
        return codes.astype(np.float32) if self.format.table == "affine" else TABLES[self.format.table][codes]

    def _by_column(self, numbers: Floats) -> Floats:
        """[R, k] of [R, G]: each group's number for its columns."""
        return np.repeat(numbers, self.format.group, axis=1)[:, : self.num_columns]

    def _by_group(self, numbers: Floats, bytes_of_groups: NDArray[Any] | None) -> Floats:
        if bytes_of_groups is None or self.format.super_group is None:
            return numbers
        supers = np.arange(bytes_of_groups.shape[1]) * self.format.group // self.format.super_group
        return numbers[:, supers] * bytes_of_groups.astype(np.float32)


class GroupedSource(Protocol):
    """A matrix that its file can give row by row, in the order of the rows of an unquantized checkpoint."""

    @property
    def format(self) -> GroupedFormat: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    def rows(self, first: int, last: int) -> GroupedCodes:
        """Rows [first, last). Their memory may be reused by the next call."""


def as_floats(numbers: NDArray[Any], kind: NumberType) -> Floats:
    """Stored numbers in float32."""
    if kind == "bf16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    if kind == "e8m0":
        return np.ldexp(np.float32(1), numbers.astype(np.int32) - 127).astype(np.float32)
    return numbers.astype(np.float32)

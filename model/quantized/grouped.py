"""AWQ and GPTQ: codes of a few bits, with a scale and a zero point for each group of input columns.

Both store the transposed weight [K, N]. Layouts: https://github.com/casper-hansen/AutoAWQ and
https://github.com/ModelCloud/GPTQModel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...kernels.layout.grouped_codes import Packing
from ..errors import quoted
from ..grouped_matrix import GroupedMatrix, Index
from .codes import Bytes, Codes, Floats, unpacked
from .parts import Parts
from .rows import codes_of_words, column_order, integers, number_type, rows_of, why_no_groups

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight, in the order in which a word holds them, lowest first
Fail = Callable[[str], NoReturn]


@dataclass(frozen=True, slots=True)
class Awq:
    """AWQ's `gemm` layout: 4 bits; eight columns of N in a word."""

    name: str
    marks: ClassVar[tuple[str, ...]] = (".qweight",)
    suffixes: ClassVar[tuple[str, ...]] = (".qweight", ".qzeros", ".scales")

    @classmethod
    def read(cls, config: dict[str, Any], fail: Fail) -> Awq:
        bits, version = config.get("bits", config.get("w_bit", 4)), str(config.get("version", "gemm")).lower()
        if bits != 4:
            fail(f"bits = {quoted(bits)}: awq has 4")
        if version != "gemm":
            fail(f"version = {quoted(version)}: only gemm is read; the same model is mostly published as gemm too")
        return cls("awq, 4 bits")

    def shape(self, parts: Parts) -> tuple[int, ...]:
        rows, words = parts.shape(".qweight")
        return words * 8, rows

    def unpack(self, parts: Parts) -> Floats:
        codes, zeros = (self._codes(parts.array(suffix)) for suffix in (".qweight", ".qzeros"))
        scales = parts.floats(".scales")
        if zeros.shape != scales.shape or len(codes) % len(scales):
            parts.fail(f"qweight, qzeros and scales are for {codes.shape}, {zeros.shape} and {scales.shape} numbers")
        groups = np.arange(len(codes)) // (len(codes) // len(scales))
        return _weight(codes, zeros, scales, groups)

    def grouped(self, parts: Parts) -> GroupedMatrix | str:
        (num_rows, num_columns), zeros = self.shape(parts), self._codes(parts.array(".qzeros"))
        words, scales = parts.array(".qweight").view(np.uint32), parts.array(".scales")
        if zeros.shape != scales.shape or zeros.shape[1] != num_rows or num_columns % len(scales):
            parts.fail(f"qweight, qzeros and scales are for {num_rows}, {zeros.shape} and {scales.shape} numbers")
        group = num_columns // len(scales)
        if reason := why_no_groups(group, num_columns):
            return reason
        places = np.argsort(AWQ_COLUMNS)  # of each of eight columns in a word

        def read(index: Index) -> tuple[Bytes, Packing]:
            rows = np.arange(num_rows)[index]
            codes = (words[:, rows // 8] >> (4 * places[rows % 8]).astype(np.uint32)) & np.uint32(15)
            return codes.astype(np.uint8).T, "bytes"

        form = integers(4, group, number_type(parts, ".scales"), zeros)
        return rows_of(parts, form, num_columns, read, scales.T, zeros.T)

    def _codes(self, words: np.ndarray[Any, Any]) -> Codes:
        stored = unpacked(words, 4).reshape(len(words), -1, 8)
        codes = np.empty_like(stored)
        codes[:, :, list(AWQ_COLUMNS)] = stored
        return codes.reshape(len(words), -1)


@dataclass(frozen=True, slots=True)
class Gptq:
    """GPTQ: 2, 3, 4 or 8 bits; codes along K in a column of words; perhaps an order of activation (`g_idx`).

    Zero points are stored less one in the older form (`gptq`), and as they are in `gptq_v2`. Where all are equal to
    the middle of the codes, or one less, that tells the form, as some files name the wrong one.
    """

    name: str
    bits: int
    is_v2: bool
    is_symmetric: bool
    marks: ClassVar[tuple[str, ...]] = (".qweight",)
    suffixes: ClassVar[tuple[str, ...]] = (".qweight", ".qzeros", ".scales", ".g_idx")

    @classmethod
    def read(cls, config: dict[str, Any], fail: Fail) -> Gptq:
        bits, form = config.get("bits"), str(config.get("checkpoint_format", "gptq"))
        if bits not in (2, 3, 4, 8):
            fail(f"bits = {quoted(bits)}: gptq is read with 2, 3, 4 and 8")
        if form not in ("gptq", "gptq_v2"):
            fail(f"checkpoint_format = {quoted(form)}: only gptq and gptq_v2 are read")
        return cls(f"gptq, {int(bits)} bits", int(bits), form == "gptq_v2", config.get("sym", True) is not False)

    def shape(self, parts: Parts) -> tuple[int, ...]:
        words, columns = parts.shape(".qweight")
        return columns, words * 32 // self.bits

    def unpack(self, parts: Parts) -> Floats:
        codes = unpacked(np.ascontiguousarray(parts.array(".qweight").T), self.bits).T
        return _weight(codes, self._zeros(parts), parts.floats(".scales"), self._groups(parts))

    def grouped(self, parts: Parts) -> GroupedMatrix | str:
        (_, num_columns), zeros = self.shape(parts), self._zeros(parts)
        words, scales, bits = parts.array(".qweight"), parts.array(".scales"), self.bits
        group = -(-num_columns // len(scales))
        if reason := why_no_groups(group, num_columns):
            return reason
        order = column_order(self._groups(parts), group)
        if isinstance(order, str):
            return order

        def read(index: Index) -> tuple[Bytes, Packing]:
            return codes_of_words(words[:, index].T, bits, num_columns, order)

        form = integers(bits, group, number_type(parts, ".scales"), zeros)
        return rows_of(parts, form, num_columns, read, scales.T, zeros.T, order)

    def _zeros(self, parts: Parts) -> Codes:
        """[G, N] the zero points. Raises CheckpointError if they are not for the weight's rows."""
        scales, num_rows = parts.shape(".scales"), self.shape(parts)[0]
        zeros = unpacked(parts.array(".qzeros"), self.bits)[:, : scales[1]]
        if zeros.shape != scales or num_rows != scales[1]:
            parts.fail(f"qweight, qzeros and scales are for {num_rows}, {zeros.shape} and {scales} numbers")
        return zeros if self._has_v2_zeros(zeros) else (zeros + 1) & ((1 << self.bits) - 1)

    def _groups(self, parts: Parts) -> NDArray[np.int64]:
        """[K] the group of each column."""
        num_columns, num_groups = self.shape(parts)[1], parts.shape(".scales")[0]
        if ".g_idx" not in parts:
            return np.arange(num_columns) // -(-num_columns // num_groups)
        groups = parts.array(".g_idx").astype(np.int64)
        if len(groups) != num_columns or groups.min(initial=0) < 0 or groups.max(initial=0) >= num_groups:
            parts.fail(f"g_idx holds {len(groups)} groups up to {groups.max(initial=0)}, of {num_groups}")
        return groups

    def _has_v2_zeros(self, zeros: Codes) -> bool:
        middle = 1 << (self.bits - 1)
        if self.is_symmetric and (zeros == middle).all():
            return True
        if self.is_symmetric and (zeros == middle - 1).all():
            return False
        return self.is_v2


def _weight(codes: Codes, zeros: Codes, scales: Floats, groups: np.ndarray[Any, Any]) -> Floats:
    """[N, K] from codes [K, N], and zeros and scales [G, N] of the group of each of the K rows."""
    weight = (codes - zeros[groups]).astype(np.float32) * scales[groups]
    return np.ascontiguousarray(weight.T)

"""AWQ and GPTQ: codes of a few bits, with a scale and a zero point for each group of input columns.

Both store the transposed weight [K, N]. Layouts: https://github.com/casper-hansen/AutoAWQ and
https://github.com/ModelCloud/GPTQModel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np

from ..errors import quoted
from .codes import Codes, Floats, unpacked
from .parts import Parts

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
        scales = parts.floats(".scales")
        zeros = unpacked(parts.array(".qzeros"), self.bits)[:, : scales.shape[1]]
        if zeros.shape != scales.shape or codes.shape[1] != scales.shape[1]:
            parts.fail(f"qweight, qzeros and scales are for {codes.shape}, {zeros.shape} and {scales.shape} numbers")
        zeros = zeros if self._has_v2_zeros(zeros) else (zeros + 1) & ((1 << self.bits) - 1)
        if ".g_idx" in parts:
            groups = parts.array(".g_idx").astype(np.int64)
            if len(groups) != len(codes) or groups.min(initial=0) < 0 or groups.max(initial=0) >= len(scales):
                parts.fail(f"g_idx holds {len(groups)} groups up to {groups.max(initial=0)}, of {len(scales)}")
        else:
            groups = np.arange(len(codes)) // -(-len(codes) // len(scales))
        return _weight(codes, zeros, scales, groups)

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

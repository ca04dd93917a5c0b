"""FP8 weights: e4m3 numbers with a scale for the tensor, each row, or each block of 128 x 128.

The forms of DeepSeek and transformers (`fp8`: `weight_scale_inv`, which multiplies in spite of its name), of fbgemm
(`weight_scale` [N, 1]) and of modelopt (`weight_scale`, one number). Scales of activations are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np

from ..errors import quoted
from .codes import Floats, by_block, by_group, e4m3, e8m0
from .parts import Parts

Fail = Callable[[str], NoReturn]
FLOATS = "its codes are 8-bit floating-point numbers, which no product here multiplies"


@dataclass(frozen=True, slots=True)
class Fp8:
    """`block`: rows and columns that share a scale; None: a scale for all, or for each row."""

    name: str
    block: tuple[int, int] | None
    marks: ClassVar[tuple[str, ...]] = (".weight_scale_inv", ".weight_scale")
    suffixes: ClassVar[tuple[str, ...]] = (
        *(".weight", ".weight_scale_inv", ".weight_scale"),
        *(".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale"),
    )

    @classmethod
    def read(cls, config: dict[str, Any], fail: Fail) -> Fp8:
        algorithm = str(config.get("quant_algo", "FP8"))
        if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
            fail(f"quant_algo = {quoted(algorithm)}: of modelopt's FP8, FP8_PER_CHANNEL_PER_TOKEN and NVFP4 are read")
        block = config.get("weight_block_size")
        if block is not None and not (isinstance(block, list) and len(block) == 2 and min(map(int, block)) > 0):
            fail(f"weight_block_size = {quoted(block)}: must be two counts")
        return cls("fp8", None if block is None else (int(block[0]), int(block[1])))

    def shape(self, parts: Parts) -> tuple[int, ...]:
        return parts.shape(".weight")

    def unpack(self, parts: Parts) -> Floats:
        suffix = ".weight_scale_inv" if ".weight_scale_inv" in parts else ".weight_scale"
        scales = e8m0(parts.array(suffix)) if parts.dtype(suffix) == "F8_E8M0" else parts.floats(suffix)
        return scaled(parts, ".weight", scales, self.block)

    def grouped(self, parts: Parts) -> str:
        return FLOATS


def scaled(parts: Parts, suffix: str, scales: Floats, block: tuple[int, int] | None) -> Floats:
    """The e4m3 tensor [N, K] times its scales. Raises CheckpointError for scales of another shape, and for NaN."""
    if parts.dtype(suffix) != "F8_E4M3":
        parts.fail(f"its weight is {parts.dtype(suffix)}, and FP8 weights are F8_E4M3")
    numbers = e4m3(parts.array(suffix))
    rows, columns = numbers.shape
    if np.isnan(numbers).any():
        parts.fail("its weight holds NaN (0x7F)")
    if scales.size == 1 or scales.shape in ((rows,), (rows, 1)):
        return np.asarray(numbers * by_group(scales.reshape(-1, 1), columns), np.float32)
    block = block or (128, 128)
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if scales.shape != expected:
        parts.fail(f"its scales are {list(scales.shape)}, and {rows} x {columns} in blocks of {block} has {expected}")
    return np.asarray(numbers * by_block(scales, (rows, columns), block), np.float32)

"""4-bit floats: NVFP4, 16 with an e4m3 scale and a factor of the matrix; MXFP4, 32 with a power of two.

In the forms of compressed-tensors (`weight_packed`, and a factor that divides) and of modelopt (`weight`, and
`weight_scale_2`, which multiplies). Two numbers in a byte, the first in the lower half. Activations are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np

from ...kernels.layout.grouped_codes import GroupedCodes, GroupedFormat
from ..errors import quoted
from ..grouped_matrix import GroupedMatrix, Index
from .codes import E2M1, Floats, by_group, e4m3, e8m0
from .parts import Parts


@dataclass(frozen=True, slots=True)
class Fp4Tensors:
    """The names of a layer's tensors, beside `.weight_scale`."""

    packed: str
    whole: str  # scale of the matrix
    divides: bool  # whether the numbers are divided by it


@dataclass(frozen=True, slots=True)
class ModeloptFp4:
    """NVFP4 as modelopt stores it."""

    name: str = "modelopt, nvfp4"
    marks: ClassVar[tuple[str, ...]] = (".weight_scale_2",)
    suffixes: ClassVar[tuple[str, ...]] = (
        *(".weight", ".weight_scale", ".weight_scale_2", ".input_scale", ".k_scale", ".v_scale", ".pre_quant_scale"),
    )
    tensors: ClassVar[Fp4Tensors] = Fp4Tensors(".weight", ".weight_scale_2", divides=False)

    @classmethod
    def read(cls, config: dict[str, Any], fail: Callable[[str], NoReturn]) -> ModeloptFp4:
        if (group := config.get("group_size") or 16) != 16:
            fail(f"group_size = {quoted(group)}: NVFP4 has 16")
        return cls()

    def shape(self, parts: Parts) -> tuple[int, ...]:
        rows, columns = parts.shape(".weight")
        return rows, 2 * columns

    def unpack(self, parts: Parts) -> Floats:
        self._check(parts)
        return fp4_numbers(parts, self.tensors)

    def grouped(self, parts: Parts) -> GroupedMatrix | str:
        self._check(parts)
        return fp4_rows(parts, self.tensors)

    def _check(self, parts: Parts) -> None:
        if parts.dtype(".weight") != "U8" or parts.dtype(".weight_scale") != "F8_E4M3":
            parts.fail(f"its weight is {parts.dtype('.weight')}, and its scales {parts.dtype('.weight_scale')}")
        if ".pre_quant_scale" in parts:
            parts.fail("pre_quant_scale: activations that are scaled first (AWQ) are not read")


def fp4_numbers(parts: Parts, tensors: Fp4Tensors) -> Floats:
    """The weight [N, K]."""
    packed = parts.array(tensors.packed)
    numbers = E2M1[np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)]
    stored = parts.array(".weight_scale")
    if parts.dtype(".weight_scale") == "F8_E4M3":
        whole = parts.floats(tensors.whole).reshape(-1)[0]
        scales = e4m3(stored) / whole if tensors.divides else e4m3(stored) * whole
    else:
        scales = e8m0(stored)
    return np.asarray(numbers * by_group(scales, numbers.shape[1]), np.float32)


def fp4_rows(parts: Parts, tensors: Fp4Tensors) -> GroupedMatrix | str:
    """The weight as rows of codes. Those of NVFP4 differ from `fp4_numbers` in the last bit, where that divides."""
    packed, scales = parts.array(tensors.packed), parts.array(".weight_scale")
    num_rows, num_columns = len(packed), 2 * packed.shape[1]
    is_nv = parts.dtype(".weight_scale") == "F8_E4M3"
    group = 16 if is_nv else 32
    if scales.shape != (num_rows, num_columns // group) or num_columns % group:
        parts.fail(f"weight_scale is {list(scales.shape)}, and the weight {[num_rows, num_columns]}")
    if not is_nv and parts.dtype(".weight_scale") not in ("U8", "F8_E8M0"):
        parts.fail(f"weight_scale is {parts.dtype('.weight_scale')}: must be U8, F8_E8M0 or F8_E4M3")
    factor = 1.0
    if is_nv:
        whole = parts.floats(tensors.whole).reshape(-1)[0]
        factor = float(np.float32(1) / whole if tensors.divides else whole)
    form = GroupedFormat(bits=4, group=group, table="e2m1", scale="f16" if is_nv else "e8m0")

    def take(index: Index) -> GroupedCodes:
        rows = scales[index]
        return GroupedCodes(
            format=form,
            num_columns=num_columns,
            codes=np.ascontiguousarray(packed[index]),
            packing="pairs",
            scales=e4m3(rows).astype(np.float16) if is_nv else np.ascontiguousarray(rows),
            factor=factor,
        )

    return GroupedMatrix(form, num_rows, num_columns, take, factor=factor)

"""Packed layers whose scales or zero points do not fit their codes: refused by the layer's name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millrace.model.errors import CheckpointError
from millrace.model.quantized.compressed_tensors import CompressedTensors
from millrace.model.quantized.parts import Parts

DTYPES = {"int8": "I8", "uint8": "U8", "int64": "I64", "float16": "F16"}


class Stored:
    def __init__(self, arrays: dict[str, Any]) -> None:
        self.arrays = arrays

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.arrays[name].shape)

    def dtype(self, name: str) -> str:
        return DTYPES[str(self.arrays[name].dtype)]

    def raw(self, name: str) -> Any:
        return self.arrays[name]


def grouped(**arrays: Any) -> Any:
    named = {f".{suffix}": array for suffix, array in arrays.items()}
    return CompressedTensors("test", 8, None).grouped(Parts(Stored(named), "layers.3", {name: name for name in named}))


def test_scales_of_another_number_of_groups_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"layer layers.3: scales for 65 groups: 1000 columns have 63"):
        grouped(weight=np.zeros((32, 1000), np.int8), weight_scale=np.ones((32, 65), np.float16))


def test_scales_of_4_bit_floats_of_another_type_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"layer layers.3: weight_scale is F16: must be U8"):
        grouped(weight_packed=np.zeros((32, 32), np.uint8), weight_scale=np.ones((32, 2), np.float16))


def test_zero_points_that_are_no_bytes_are_refused() -> None:
    zeros = np.zeros((32, 1), np.int64)
    zeros[3] = 200
    with pytest.raises(CheckpointError, match=r"layer layers.3: zero points from 128 to 328: must be 0 to 255"):
        grouped(weight=np.zeros((32, 64), np.int8), weight_scale=np.ones((32, 1), np.float16), weight_zero_point=zeros)

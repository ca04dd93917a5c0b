"""Experts that stay in the codes of their file, for kernels that multiply codes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.layout.experts import CodedMatrices
from ...kernels.layout.grouped_codes import STORED, TABLES, GroupedCodes, GroupedFormat, NumberType
from ..errors import CheckpointError
from ..grouped_matrix import GroupedMatrix

CODES_AT_ONCE = 4 << 20  # that are on their way to the device
SCALE_TYPES: dict[NumberType, torch.dtype] = {  # that hold the scales of a file as they are
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "e8m0": torch.bfloat16,
}


class CodesSource(Protocol):
    """What is needed of a checkpoint: see `TensorSource`."""

    @property
    def packing(self) -> str: ...

    def grouped(self, name: str) -> GroupedMatrix | str | None: ...
    def stored_name(self, name: str) -> str: ...
    def forget(self, name: str) -> None: ...


def coded_format(source: CodesSource, each: Sequence[Sequence[str]]) -> GroupedFormat | None:
    """The one format in which a file has matrices of experts, each of several joined; None: they are to be unpacked."""
    found: set[tuple[GroupedFormat, int]] = set()
    for name in (name for joined in each for name in joined):
        matrix = source.grouped(name) if source.packing else None
        if not isinstance(matrix, GroupedMatrix) or matrix.columns is not None or matrix.shape[1] % 2:
            return None
        found.add((matrix.format, matrix.shape[1]))
    return found.pop()[0] if len(found) == 1 else None


def bits_per_number(form: GroupedFormat, num_columns: int) -> float:
    """Bits that a number takes on the device, with its share of scales, zeros and offsets."""
    scale = 32 if form.super_group else 8 * SCALE_TYPES[form.scale].itemsize
    of_group = scale + 8 * form.has_zeros + 32 * (form.offset is not None)
    return (4 if form.bits <= 4 else 8) + of_group * form.num_groups(num_columns) / num_columns


def load_coded(
    source: CodesSource, experts: Sequence[Sequence[str]], form: GroupedFormat, device: torch.device
) -> CodedMatrices:
    """The matrices of experts by their names, each of several joined along their rows: [E, N, K].

    Raises CheckpointError for scales that are no numbers.
    """
    matrices = [[_matrix(source, name) for name in each] for each in experts]
    num_rows, num_columns = sum(part.shape[0] for part in matrices[0]), matrices[0][0].shape[1]
    sizes = len(experts), num_rows
    groups = (*sizes, form.num_groups(num_columns))
    is_one_level = form.super_group is None and all(part.factor == 1.0 for each in matrices for part in each)
    is_packed = form.bits <= 4

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    stack = CodedMatrices(
        codes=empty((*sizes, num_columns // 2 if is_packed else num_columns), torch.uint8),
        scales=empty(groups, SCALE_TYPES[form.scale] if is_one_level else torch.float32),
        zeros=empty(groups, torch.uint8) if form.has_zeros else None,
        offsets=empty(groups, torch.float32) if form.offset is not None else None,
        table=None if form.table == "affine" else torch.from_numpy(TABLES[form.table].copy()).to(device),
        zero=float(form.zero),
        group=min(form.group, num_columns),
        num_columns=num_columns,
        is_packed=is_packed,
    )
    for expert, (each, parts) in enumerate(zip(experts, matrices, strict=True)):
        begin = 0
        for name, matrix in zip(each, parts, strict=True):
            for first, codes in matrix.portions(CODES_AT_ONCE):
                _fill(stack, expert, begin + first, codes, source.stored_name(name))
            begin += matrix.shape[0]
            source.forget(name)
    return stack


def _matrix(source: CodesSource, name: str) -> GroupedMatrix:
    matrix = source.grouped(name)
    assert isinstance(matrix, GroupedMatrix), "coded_format() said so"
    return matrix


def _fill(stack: CodedMatrices, expert: int, first: int, rows: GroupedCodes, stored: str) -> None:
    """Writes some rows of an expert, from row `first` on."""
    at = slice(first, first + rows.num_rows)
    scales, offsets = rows.group_scales(), rows.group_offsets()
    if not math.isfinite(float(np.abs(scales).max(initial=0))):
        raise CheckpointError(f"tensor {stored}: its scales hold NaN or infinity; fetch the file again")
    codes = rows.unpacked()
    _put(stack.codes[expert, at], codes[:, ::2] | (codes[:, 1::2] << 4) if stack.is_packed else codes)
    _put(stack.scales[expert, at], scales)
    if stack.zeros is not None and rows.zeros is not None:
        _put(stack.zeros[expert, at], rows.zeros)
    if stack.offsets is not None and offsets is not None:
        _put(stack.offsets[expert, at], offsets)


def _put(part: Tensor, numbers: NDArray[Any]) -> None:
    part.copy_(torch.from_numpy(np.ascontiguousarray(numbers)))


assert set(SCALE_TYPES) == set(STORED)

"""The matrices of an adapter in a dtype of the run time, read and converted many tensors at a time.

numpy releases the interpreter lock within an operation: a few large ones delay other threads less than many small ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint.canonical import widened
from ..checkpoint.safetensors import BFLOAT16
from .weights import AdaptedModule, AdapterFiles, B

BLOCK_BYTES = 512 << 10  # of a file, read at once; what converts them stays in the cache of a core
SAME = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # stored dtypes that are one of the run time


@dataclass(frozen=True, slots=True)
class WantedMatrix:
    """A tensor to read; `check_shape` has seen it."""

    module: AdaptedModule
    kind: str  # A or B; the module's scale multiplies B
    is_copied: bool  # its array is used for a moment only, so it shares no memory with those that are kept

    @property
    def scale(self) -> float:
        return self.module.scale if self.kind == B else 1.0


def read_matrices(files: AdapterFiles, wanted: Sequence[WantedMatrix], dtype: str) -> Mapping[str, NDArray[Any]]:
    """The matrices by their names in the file, in `dtype`; many are views of one array. Raises AdapterError."""
    found: dict[str, NDArray[Any]] = {}
    for block in _blocks(files, wanted):
        numbers, begin = _converted(files, block, dtype), 0
        for one in block:
            shape = files.shape(one.module, one.kind)
            end = begin + shape[0] * shape[1]
            found[one.module.tensors[one.kind]] = numbers[begin:end].reshape(shape)
            begin = end
    return found


def rounded(numbers: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Numbers in a dtype of weights, rounded to nearest, ties to even; bfloat16 has the dtype `BFLOAT16`."""
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(numbers).view(np.uint32)
        found = bits >> 16
        found &= 1
        found += np.uint32(0x7FFF)
        found += bits
        found >>= 16
        return found.astype(BFLOAT16)
    with np.errstate(over="ignore"):
        return np.array(numbers, np.float16 if dtype == "float16" else np.float32)  # a copy, as a file may change


def _blocks(files: AdapterFiles, wanted: Sequence[WantedMatrix]) -> Iterator[list[WantedMatrix]]:
    """The tensors in groups that lie one after another in the file, of one dtype each."""
    block: list[WantedMatrix] = []
    block_begin = block_end = 0
    for begin, end, one in sorted(
        ((*files.extent(one.module, one.kind), one) for one in wanted), key=lambda row: row[:2]
    ):
        if block and (
            begin != block_end
            or end - block_begin > BLOCK_BYTES
            or one.is_copied != block[0].is_copied
            or files.dtype(one.module, one.kind) != files.dtype(block[0].module, block[0].kind)
        ):
            yield block
            block = []
        if not block:
            block_begin = begin
        block.append(one)
        block_end = end
    if block:
        yield block


def _converted(files: AdapterFiles, block: Sequence[WantedMatrix], dtype: str) -> NDArray[Any]:
    """The numbers of successive tensors, [N]."""
    first, last = block[0], block[-1]
    stored = files.flat((first.module, first.kind), (last.module, last.kind))
    numbers = widened(stored)
    if not np.isfinite(numbers).all():
        bad = next(one for one, part in _parts(files, block, numbers) if not np.isfinite(part).all())
        files.config.fail(f"{bad.kind} of {bad.module.label} holds NaN or infinity")
    if SAME.get(files.dtype(first.module, first.kind)) == dtype and all(one.scale == 1.0 for one in block):
        return stored
    with np.errstate(over="ignore"):  # what is too large is found below
        for one, part in _parts(files, block, numbers):
            if one.scale != 1.0:
                part *= np.float32(one.scale)
    found = numbers if dtype == "float32" else rounded(numbers, dtype)
    if not _is_finite(found):
        bad = next(one for one, part in _parts(files, block, found) if not _is_finite(part))
        files.config.fail(f"{bad.module.label}: its numbers are too large for {dtype}")
    return found


def _parts(
    files: AdapterFiles, block: Sequence[WantedMatrix], numbers: NDArray[Any]
) -> Iterator[tuple[WantedMatrix, NDArray[Any]]]:
    """The numbers of each tensor of a block."""
    begin = 0
    for one in block:
        rows, columns = files.shape(one.module, one.kind)
        yield one, numbers[begin : begin + rows * columns]
        begin += rows * columns


def _is_finite(numbers: NDArray[Any]) -> bool:
    if numbers.dtype == BFLOAT16:
        return not len(numbers) or int((numbers & 0x7FFF).max()) < 0x7F80
    return bool(np.isfinite(numbers).all())

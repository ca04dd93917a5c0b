"""The matrices of an adapter in a dtype of the run time, read and converted many tensors at a time.

numpy releases the interpreter lock within an operation: a few large ones delay other threads less than many small ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
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


@dataclass(frozen=True, slots=True)
class _Part:
    """A wanted tensor where it lies in the file."""

    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]
    scale: float
    wanted: WantedMatrix


def read_matrices(files: AdapterFiles, wanted: Iterable[WantedMatrix], dtype: str) -> Mapping[str, NDArray[Any]]:
    """The matrices by their names in the file, in `dtype`; many are views of one array. Raises AdapterError."""
    found: dict[str, NDArray[Any]] = {}
    for block in _blocks(files, wanted):
        for part, numbers in _split(block, _converted(files, block, dtype)):
            found[part.wanted.module.tensors[part.wanted.kind]] = numbers.reshape(part.shape)
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


def _blocks(files: AdapterFiles, wanted: Iterable[WantedMatrix]) -> Iterator[list[_Part]]:
    """The tensors in groups that lie one after another in the file, of one dtype each."""
    block: list[_Part] = []
    for part in sorted((_part(files, one) for one in wanted), key=attrgetter("begin")):
        files.pause()
        if block and (
            part.begin != block[-1].end
            or part.end - block[0].begin > BLOCK_BYTES
            or part.dtype != block[0].dtype
            or part.wanted.is_copied != block[0].wanted.is_copied
        ):
            yield block
            block = []
        block.append(part)
    if block:
        yield block


def _part(files: AdapterFiles, wanted: WantedMatrix) -> _Part:
    files.pause()
    entry = files.entry(wanted.module, wanted.kind)
    scale = wanted.module.scale if wanted.kind == B else 1.0
    return _Part(entry.begin, entry.begin + entry.num_bytes, entry.dtype, entry.shape, scale, wanted)


def _converted(files: AdapterFiles, block: Sequence[_Part], dtype: str) -> NDArray[Any]:
    """The numbers of successive tensors, [N]."""
    stored = files.flat(block[0].begin, block[-1].end, block[0].dtype)
    numbers = widened(stored)
    if not np.isfinite(numbers).all():
        bad = next(part.wanted for part, some in _split(block, numbers) if not np.isfinite(some).all())
        files.config.fail(f"{bad.kind} of {bad.module.label} holds NaN or infinity")
    is_scaled = any(part.scale != 1.0 for part in block)
    if not is_scaled and SAME.get(block[0].dtype) == dtype:
        return stored
    with np.errstate(over="ignore"):  # what is too large is found below
        for part, some in _split(block, numbers) if is_scaled else ():
            if part.scale != 1.0:
                some *= np.float32(part.scale)
    found = numbers if dtype == "float32" else rounded(numbers, dtype)
    if not _is_finite(found):
        bad = next(part.wanted for part, some in _split(block, found) if not _is_finite(some))
        files.config.fail(f"{bad.module.label}: its numbers are too large for {dtype}")
    return found


def _split(block: Sequence[_Part], numbers: NDArray[Any]) -> Iterator[tuple[_Part, NDArray[Any]]]:
    """The numbers of each tensor of a block."""
    begin = 0
    for part in block:
        end = begin + part.shape[0] * part.shape[1]
        yield part, numbers[begin:end]
        begin = end


def _is_finite(numbers: NDArray[Any]) -> bool:
    if numbers.dtype == BFLOAT16:
        return not len(numbers) or int((numbers & 0x7FFF).max()) < 0x7F80
    return bool(np.isfinite(numbers).all())

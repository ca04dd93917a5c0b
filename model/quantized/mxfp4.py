"""MXFP4 as gpt-oss has it: stacks of a layer's experts, a power of two for 32 numbers, gate and up row by row in turns.

Two numbers in a byte, the first in the lower half. All other tensors are stored as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from ...kernels.layout.grouped_codes import GroupedCodes, GroupedFormat
from ..grouped_matrix import GroupedMatrix, Index
from .codes import Floats
from .parts import Parts

BLOCKS, SCALES = "_blocks", "_scales"
FORM = GroupedFormat(bits=4, group=32, table="e2m1", scale="e8m0")
ROWS = {  # stacks -> the networks' matrices, and their rows in the stack
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}


class ExpertParts(Parts):
    """The rows of one expert's matrix in a stack."""

    def __init__(self, stack: Parts, stem: str, expert: int, rows: slice) -> None:
        super().__init__(stack.stored, stem, stack.by_suffix)
        self.expert, self.rows = expert, rows


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """MXFP4 as gpt-oss is published."""

    name: str = "mxfp4"
    marks: ClassVar[tuple[str, ...]] = (BLOCKS,)
    suffixes: ClassVar[tuple[str, ...]] = (BLOCKS, SCALES)

    @classmethod
    def read(cls, config: dict[str, Any], fail: Callable[[str], NoReturn]) -> Mxfp4:
        return cls()

    def experts_of(self, stack: Parts) -> Iterator[ExpertParts]:
        """The matrices in a stack of all experts of a layer, by the names that experts have one by one."""
        stem, _, name = stack.stem.rpartition(".")
        if name not in ROWS or not stem.endswith(".experts"):
            stack.fail("MXFP4 in stacks is read for experts, gate_up_proj and down_proj")
        shape = stack.shape(BLOCKS)
        if len(shape) != 4:
            stack.fail(f"{BLOCKS} is {list(shape)}, and must be [experts, rows, groups, 16]")
        for expert in range(shape[0]):
            for matrix, rows in ROWS[name].items():
                yield ExpertParts(stack, f"{stem}.{expert}.{matrix}", expert, rows)

    def shape(self, parts: Parts) -> tuple[int, ...]:
        _, rows, groups, _ = parts.shape(BLOCKS)
        return len(range(rows)[_rows(parts)]), groups * 32

    def unpack(self, parts: Parts) -> Floats:
        return self.grouped(parts).rows(0, self.shape(parts)[0]).dequantize()

    def grouped(self, parts: Parts) -> GroupedMatrix:
        assert isinstance(parts, ExpertParts)
        whole, scales = parts.shape(BLOCKS), parts.shape(SCALES)
        if whole[3] != 16 or scales != whole[:3] or {parts.dtype(BLOCKS), parts.dtype(SCALES)} != {"U8"}:
            parts.fail(f"{BLOCKS} is {list(whole)}, and {SCALES} {list(scales)}: must be bytes, 16 for a scale")
        packed, powers = (parts.array(suffix)[parts.expert, parts.rows] for suffix in (BLOCKS, SCALES))
        num_rows, num_columns = self.shape(parts)

        def take(index: Index) -> GroupedCodes:
            return GroupedCodes(
                format=FORM,
                num_columns=num_columns,
                codes=_matrix(packed[index]),
                packing="pairs",
                scales=_matrix(powers[index]),
            )

        return GroupedMatrix(FORM, num_rows, num_columns, take)


def _rows(parts: Parts) -> slice:
    assert isinstance(parts, ExpertParts)
    return parts.rows


def _matrix(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[R, bytes of a row]."""
    return np.ascontiguousarray(rows).reshape(len(rows), -1)

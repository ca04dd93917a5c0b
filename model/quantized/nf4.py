"""bitsandbytes: 4-bit codes into a table (nf4, fp4) with a maximum for each block, or int8 with one for each row.

Layout: https://github.com/bitsandbytes-foundation/bitsandbytes. The columns that LLM.int8 computes in half precision
are found while computing, so a file does not have them; here all columns are of the 8 bits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np

from ...kernels.layout.grouped_codes import TABLES, GroupedFormat, Packing
from ..grouped_matrix import GroupedMatrix, Index
from .codes import Bytes, Floats
from .parts import Parts
from .rows import LEAST, rows_of, signed, why_no_groups

Fail = Callable[[str], NoReturn]
STATES = (".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4")


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """Both kinds; the tensors of a layer tell which it is."""

    name: str
    marks: ClassVar[tuple[str, ...]] = (".weight.absmax", ".SCB")
    suffixes: ClassVar[tuple[str, ...]] = (
        *(".weight", ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map"),
        *STATES,
        *(".SCB", ".weight_format"),
    )

    @classmethod
    def read(cls, config: dict[str, Any], fail: Fail) -> BitsAndBytes:
        if config.get("load_in_8bit"):
            return cls("bitsandbytes, 8 bits")
        return cls(f"bitsandbytes, {config.get('bnb_4bit_quant_type', 'fp4')}")

    def shape(self, parts: Parts) -> tuple[int, ...]:
        if ".SCB" in parts:
            return parts.shape(".weight")
        return tuple(int(count) for count in self._state(parts)["shape"])

    def unpack(self, parts: Parts) -> Floats:
        if ".SCB" in parts:
            maxima = parts.floats(".SCB").reshape(-1, 1)
            return np.asarray(parts.array(".weight").astype(np.float32) * (maxima / np.float32(127)), np.float32)
        state = self._state(parts)
        shape, block_size = self.shape(parts), int(state["blocksize"])
        packed = parts.array(".weight").reshape(-1)
        codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[: math.prod(shape)]
        maxima = self._maxima(parts, state)
        if len(codes) != math.prod(shape) or len(maxima) != -(-len(codes) // block_size):
            parts.fail(f"{len(codes)} codes and {len(maxima)} blocks of {block_size} do not make {list(shape)}")
        numbers = parts.floats(".weight.quant_map")[codes]
        return (numbers * np.repeat(maxima, block_size)[: len(codes)]).reshape(shape)

    def grouped(self, parts: Parts) -> GroupedMatrix | str:
        num_rows, num_columns = self.shape(parts)
        if ".SCB" in parts:
            weight, scales = parts.array(".weight"), parts.floats(".SCB").reshape(-1, 1) / np.float32(127)
            form = GroupedFormat(bits=8, group=max(num_columns, LEAST), scale="f32", zero=128)
            if scales.shape[0] != num_rows:
                parts.fail(f"SCB holds {scales.shape[0]} numbers for {num_rows} rows")
            return rows_of(parts, form, num_columns, lambda index: (signed(weight[index]), "bytes"), scales)
        state = self._state(parts)
        block_size = int(state["blocksize"])
        if not np.array_equal(parts.floats(".weight.quant_map"), TABLES["nf4"]):
            return "its table of 16 numbers is not that of nf4"
        if num_columns % block_size or why_no_groups(block_size, num_columns):
            return f"blocks of {block_size} numbers do not divide rows of {num_columns}"
        packed, scales = parts.array(".weight").reshape(-1), self._maxima(parts, state)
        if 2 * len(packed) != num_rows * num_columns or len(scales) * block_size != 2 * len(packed):
            parts.fail(f"{2 * len(packed)} codes and {len(scales)} blocks of {block_size} do not make its shape")
        pairs: Bytes = packed.reshape(num_rows, -1)
        form = GroupedFormat(bits=4, group=block_size, table="nf4", scale="f32")
        by_row = scales.reshape(num_rows, -1)

        def read(index: Index) -> tuple[Bytes, Packing]:
            return np.asarray((pairs[index] >> 4) | (pairs[index] << 4), np.uint8), "pairs"

        return rows_of(parts, form, num_columns, read, by_row)

    def _maxima(self, parts: Parts, state: dict[str, Any]) -> Floats:
        """[B] the factor of each block, which may itself be quantized."""
        if ".weight.nested_absmax" not in parts:
            return parts.floats(".weight.absmax")
        codes = parts.array(".weight.absmax")
        outer = parts.floats(".weight.nested_absmax")
        table = parts.floats(".weight.nested_quant_map")
        size, offset = int(state["nested_blocksize"]), np.float32(state["nested_offset"])
        return np.asarray(table[codes] * np.repeat(outer, size)[: len(codes)] + offset, np.float32)

    def _state(self, parts: Parts) -> dict[str, Any]:
        suffix = next((suffix for suffix in STATES if suffix in parts), STATES[0])
        try:
            state = json.loads(parts.array(suffix).astype(np.uint8).tobytes())
            if isinstance(state, dict) and isinstance(state.get("shape"), list) and "blocksize" in state:
                return state
        except ValueError:
            pass
        parts.fail(f"{suffix} is not the JSON of a quant_state")

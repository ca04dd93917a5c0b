"""The formats of compressed-tensors (llm-compressor): integers and small floats, packed or not.

Source: https://github.com/vllm-project/compressed-tensors. Scales of activations and of the KV cache are not used.
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
from .codes import Bytes, Codes, Floats, by_group, unpacked
from .fp4 import Fp4Tensors, fp4_numbers, fp4_rows
from .fp8 import FLOATS, scaled
from .parts import Parts
from .rows import codes_of_words, column_order, integers, number_type, rows_of, signed, why_no_groups

Fail = Callable[[str], NoReturn]
FP4 = Fp4Tensors(".weight_packed", ".weight_global_scale", divides=True)
FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "dense"),
)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """`bits` of integers; the tensors of a layer tell which of the formats it has."""

    name: str
    bits: int
    block: tuple[int, int] | None
    marks: ClassVar[tuple[str, ...]] = (".weight_packed", ".weight_scale")
    suffixes: ClassVar[tuple[str, ...]] = (
        *(".weight_packed", ".weight", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx"),
        *(".weight_global_scale", ".input_global_scale", ".input_scale", ".input_zero_point"),
        *(".output_scale", ".output_zero_point", ".k_scale", ".v_scale", ".q_scale"),
    )

    @classmethod
    def read(cls, config: dict[str, Any], fail: Fail) -> CompressedTensors:
        groups = config.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            fail("config_groups: must be an object of groups")
        sparsity = config.get("sparsity_config") or {}
        if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
            fail(f"sparsity_config: format = {quoted(sparsity['format'])} is not read; only dense is")
        if config.get("transform_config"):
            fail("transform_config: rotations of weights are not read; serve a checkpoint without them")
        formats = {str(group.get("format") or config.get("format", "dense")) for group in groups.values()}
        if unknown := sorted(formats - {*FORMATS, "mixed-precision"}):
            fail(f"format = {quoted(unknown[0])} is not read; read are {', '.join(FORMATS)}")
        weights = [group.get("weights") or {} for group in groups.values()]
        bits = {int(weight.get("num_bits", 8)) for weight in weights}
        if len(bits) != 1:
            fail(f"config_groups: weights of {sorted(bits)} bits in one checkpoint are not read")
        (num_bits,) = bits
        if not 1 <= num_bits <= 8:
            fail(f"config_groups: num_bits = {num_bits}: weights of 1 to 8 bits are read")
        found: Any = next((weight["block_structure"] for weight in weights if weight.get("block_structure")), None)
        block = None if found is None else (int(found[0]), int(found[1]))
        if block is not None and (len(found) != 2 or min(block) < 1):
            fail(f"config_groups: block_structure = {quoted(found)}: must be two counts")
        return cls(f"compressed-tensors, {num_bits} bits", num_bits, block)

    def shape(self, parts: Parts) -> tuple[int, ...]:
        if ".weight_packed" not in parts:
            return parts.shape(".weight")
        rows, words = parts.shape(".weight_packed")
        if parts.dtype(".weight_packed") == "U8":
            return rows, words * 2
        if ".weight_shape" in parts:
            return tuple(int(count) for count in parts.array(".weight_shape"))
        return rows, words * 32 // self.bits

    def unpack(self, parts: Parts) -> Floats:
        if ".weight_packed" in parts:
            return fp4_numbers(parts, FP4) if parts.dtype(".weight_packed") == "U8" else self._of_words(parts)
        scales = parts.floats(".weight_scale")
        if parts.dtype(".weight").startswith("F8"):
            return scaled(parts, ".weight", scales, self.block)
        if parts.dtype(".weight") not in ("I8", "U8"):  # "dense": to be rounded while computing
            parts.fail(f"its weight is {parts.dtype('.weight')}, not in codes; save the checkpoint compressed")
        scales = scales.reshape(-1, scales.shape[-1] if scales.ndim > 1 else 1)
        codes = parts.array(".weight").astype(np.float32)
        if ".weight_zero_point" in parts:
            zeros = parts.array(".weight_zero_point").astype(np.float32)
            codes = codes - by_group(zeros.reshape(scales.shape), codes.shape[1])
        return np.asarray(codes * by_group(scales, codes.shape[1]), np.float32)

    def grouped(self, parts: Parts) -> GroupedMatrix | str:
        if ".weight_packed" in parts:
            return fp4_rows(parts, FP4) if parts.dtype(".weight_packed") == "U8" else self._rows_of_words(parts)
        if parts.dtype(".weight").startswith("F8"):
            return FLOATS
        if parts.dtype(".weight") != "I8":
            return "its codes are not signed bytes"
        return self._rows_of_bytes(parts)

    def _rows_of_bytes(self, parts: Parts) -> GroupedMatrix | str:
        """Rows of signed bytes, which are codes less 128."""
        weight, (num_rows, num_columns) = parts.array(".weight"), parts.shape(".weight")
        scales = _by_row(parts.array(".weight_scale"), num_rows)
        group = -(-num_columns // scales.shape[1])
        if reason := why_no_groups(group, num_columns):
            return reason
        zeros = np.full((1, 1), 128)
        if ".weight_zero_point" in parts:
            zeros = parts.array(".weight_zero_point").reshape(-1, scales.shape[1]).astype(np.int32) + 128
        form = integers(8, group, number_type(parts, ".weight_scale"), zeros)
        by_row = np.broadcast_to(zeros, scales.shape)
        return rows_of(parts, form, num_columns, lambda index: (signed(weight[index]), "bytes"), scales, by_row)

    def _rows_of_words(self, parts: Parts) -> GroupedMatrix | str:
        num_rows, num_columns = self.shape(parts)
        words = parts.array(".weight_packed")
        if words.shape[1] != -(-num_columns * self.bits // 32):
            return "its codes are in words of an older version"
        if not 2 <= self.bits <= 8:
            return f"its codes are of {self.bits} bits"
        scales = _by_row(parts.array(".weight_scale"), num_rows)
        group = -(-num_columns // scales.shape[1])
        if reason := why_no_groups(group, num_columns):
            return reason
        order = column_order(self._groups(parts, scales.shape[1], num_columns), group)
        if isinstance(order, str):
            return order
        zeros = np.full((1, 1), 1 << (self.bits - 1))
        if ".weight_zero_point" in parts:
            zeros = zeros + self._zeros(parts, num_rows, scales.shape[1])

        def read(index: Index) -> tuple[Bytes, Packing]:
            return codes_of_words(words[index], self.bits, num_columns, order)

        form = integers(self.bits, group, number_type(parts, ".weight_scale"), zeros)
        return rows_of(parts, form, num_columns, read, scales, np.broadcast_to(zeros, scales.shape), order)

    def _of_words(self, parts: Parts) -> Floats:
        """Integers of few bits, in words along K; a zero point is packed along N. Codes are stored plus the middle."""
        rows, columns = self.shape(parts)
        middle = 1 << (self.bits - 1)
        codes = _codes(parts.array(".weight_packed"), self.bits, columns) - middle
        scales = parts.floats(".weight_scale").reshape(-1, parts.shape(".weight_scale")[-1])
        groups = self._groups(parts, scales.shape[1], columns)
        if codes.shape != (rows, columns) or len(scales) not in (1, rows):
            parts.fail(f"weight_packed is of {codes.shape} numbers, and weight_scale is {list(scales.shape)}")
        numbers = codes.astype(np.float32)
        if ".weight_zero_point" in parts:
            zeros = self._zeros(parts, rows, scales.shape[1])
            numbers = numbers - zeros[:, groups]
        return np.asarray(numbers * scales[:, groups], np.float32)

    def _groups(self, parts: Parts, num_groups: int, num_columns: int) -> NDArray[np.int64]:
        """[K] the group of each column."""
        if ".weight_g_idx" not in parts:
            return np.arange(num_columns) // -(-num_columns // num_groups)
        groups = parts.array(".weight_g_idx").astype(np.int64)
        if len(groups) != num_columns or groups.min(initial=0) < 0 or groups.max(initial=0) >= num_groups:
            parts.fail(f"weight_g_idx holds {len(groups)} groups up to {groups.max(initial=0)}")
        return groups

    def _zeros(self, parts: Parts, num_rows: int, num_groups: int) -> Codes:
        """[N, G] the zero points, as signed as the weights."""
        stored = parts.array(".weight_zero_point")
        if parts.dtype(".weight_zero_point") != "I32":
            return stored.astype(np.int32).reshape(-1, num_groups)
        words = np.ascontiguousarray(stored.reshape(-1, num_groups).T)
        return _codes(words, self.bits, num_rows).T - (1 << (self.bits - 1))


def _by_row(scales: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """[N, G] scales of which one row, or one number, may be stored for all rows."""
    scales = scales.reshape(-1, scales.shape[-1] if scales.ndim > 1 else 1)
    return np.broadcast_to(scales, (num_rows, scales.shape[1]))


def _codes(words: np.ndarray[Any, Any], bits: int, count: int) -> np.ndarray[Any, Any]:
    """[R, count] codes of rows of words: a dense stream of bits, or, of older versions, no code in two words."""
    if words.shape[1] == -(-count * bits // 32):
        return unpacked(words, bits)[:, :count]
    shifts = (np.arange(32 // bits) * bits).astype(np.uint32)
    codes = (words.view(np.uint32)[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    return codes.reshape(len(words), -1)[:, :count].astype(np.int32)

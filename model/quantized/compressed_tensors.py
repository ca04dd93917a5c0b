"""The formats of compressed-tensors (llm-compressor): integers and small floats, packed or not.

Source: https://github.com/vllm-project/compressed-tensors. Scales of activations and of the KV cache are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import numpy as np

from ..errors import quoted
from .codes import E2M1, Floats, by_group, e4m3, e8m0, unpacked
from .fp8 import scaled
from .parts import Parts

Fail = Callable[[str], NoReturn]
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
            return self._of_fp4(parts) if parts.dtype(".weight_packed") == "U8" else self._of_words(parts)
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

    def _of_words(self, parts: Parts) -> Floats:
        """Integers of few bits, in words along K; a zero point is packed along N. Codes are stored plus the middle."""
        rows, columns = self.shape(parts)
        middle = 1 << (self.bits - 1)
        codes = _codes(parts.array(".weight_packed"), self.bits, columns) - middle
        scales = parts.floats(".weight_scale").reshape(-1, parts.shape(".weight_scale")[-1])
        if ".weight_g_idx" in parts:
            groups = parts.array(".weight_g_idx").astype(np.int64)
            if len(groups) != columns or groups.min(initial=0) < 0 or groups.max(initial=0) >= scales.shape[1]:
                parts.fail(f"weight_g_idx holds {len(groups)} groups up to {groups.max(initial=0)}")
        else:
            groups = np.arange(columns) // -(-columns // scales.shape[1])
        if codes.shape != (rows, columns) or len(scales) not in (1, rows):
            parts.fail(f"weight_packed is of {codes.shape} numbers, and weight_scale is {list(scales.shape)}")
        numbers = codes.astype(np.float32)
        if ".weight_zero_point" in parts:
            stored = parts.array(".weight_zero_point")
            if parts.dtype(".weight_zero_point") == "I32":
                words = np.ascontiguousarray(stored.reshape(-1, scales.shape[1]).T)
                zeros = _codes(words, self.bits, rows).T - middle
            else:
                zeros = stored.astype(np.int32).reshape(scales.shape)
            numbers = numbers - zeros[:, groups]
        return np.asarray(numbers * scales[:, groups], np.float32)

    def _of_fp4(self, parts: Parts) -> Floats:
        """Pairs of 4-bit floats, the first in the lower half: NVFP4 in groups of 16, MXFP4 of 32."""
        packed = parts.array(".weight_packed")
        numbers = E2M1[np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)]
        stored = parts.array(".weight_scale")
        if parts.dtype(".weight_scale") == "F8_E4M3":
            whole = parts.floats(".weight_global_scale").reshape(-1)[0]
            scales = e4m3(stored) / whole
        else:
            scales = e8m0(stored)
        return np.asarray(numbers * by_group(scales, numbers.shape[1]), np.float32)


def _codes(words: np.ndarray[Any, Any], bits: int, count: int) -> np.ndarray[Any, Any]:
    """[R, count] codes of rows of words: a dense stream of bits, or, of older versions, no code in two words."""
    if words.shape[1] == -(-count * bits // 32):
        return unpacked(words, bits)[:, :count]
    shifts = (np.arange(32 // bits) * bits).astype(np.uint32)
    codes = (words.view(np.uint32)[:, :, None] >> shifts) & np.uint32((1 << bits) - 1)
    return codes.reshape(len(words), -1)[:, :count].astype(np.int32)

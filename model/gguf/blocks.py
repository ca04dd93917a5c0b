"""Blocks of packed numbers: each type's size, the codes that it holds, and the numbers that these stand for.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. In a block, `d` and `m` are factors and offsets
in half precision; a number is d * code + m, or what the type says. Numbers are exactly those of the `gguf` package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.layout.grouped_codes import GroupedCodes, GroupedFormat, Packing
from ..grouped_matrix import GroupedMatrix, Index

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Arrays = dict[str, NDArray[Any]]  # of `GroupedCodes`, [R, B, ...] for R rows of B blocks

AT_ONCE = 1 << 18  # numbers unpacked at a time, so that temporaries stay in the cache


@dataclass(frozen=True, slots=True)
class Block:
    """A type: `size` numbers take `num_bytes` bytes.

    `read` maps blocks [R, B, num_bytes] to their arrays. `format` None: the numbers are not packed, and `read` gives
    them as "numbers".
    """

    size: int
    num_bytes: int
    read: Callable[[Bytes], Arrays]
    format: GroupedFormat | None = None
    packing: Packing = "bytes"

    def codes(self, rows: Bytes) -> GroupedCodes:
        """The codes of packed rows [R, bytes of a row], in arrays of their own."""
        assert self.format is not None
        num_blocks = rows.shape[1] // self.num_bytes
        arrays = self.read(rows.reshape(len(rows), num_blocks, self.num_bytes))
        flat: dict[str, Any] = {
            name: np.ascontiguousarray(array.reshape(len(rows), math.prod(array.shape[1:])))
            for name, array in arrays.items()
        }
        return GroupedCodes(format=self.format, num_columns=num_blocks * self.size, packing=self.packing, **flat)


def unpack(type_name: str, packed: Bytes, shape: tuple[int, ...]) -> Floats:
    """The numbers of a tensor of this shape, from all of its bytes."""
    block = BLOCKS[type_name]
    blocks = packed.reshape(-1, block.num_bytes)
    if block.format is None:
        return np.array(block.read(blocks)["numbers"]).reshape(shape)  # not a view of the file
    numbers = np.empty((len(blocks), block.size), np.float32)
    count = max(1, AT_ONCE // block.size)
    with np.errstate(invalid="ignore", over="ignore"):  # of a factor that is no number, which the caller refuses
        for begin in range(0, len(blocks), count):
            numbers[begin : begin + count] = block.codes(blocks[begin : begin + count]).dequantize()
    return numbers.reshape(shape)


def matrix(
    type_name: str, packed: Bytes, shape: tuple[int, ...], drop: Callable[[int, int], None] | None = None
) -> GroupedMatrix | None:
    """A tensor [N, K] as rows of codes, from all of its bytes; None: it is no packed matrix.

    `drop(begin, end)` releases the memory of bytes [begin, end).
    """
    block = BLOCKS[type_name]
    if block.format is None or len(shape) != 2:
        return None
    rows = packed.reshape(shape[0], -1)

    def take(index: Index) -> GroupedCodes:
        return block.codes(rows[index])

    def forget(first: int, last: int) -> None:
        if drop is not None:
            drop(first * rows.shape[1], last * rows.shape[1])

    return GroupedMatrix(block.format, shape[0], shape[1], take, drop=forget)


def name_of_type(kind: int) -> str:
    """The name of a type by its number in the file."""
    return NAMES.get(kind, f"number {kind}")


# -- parts of blocks


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """[R, B, 1] the half-precision number at a byte."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)


def _minus_half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """[R, B, 1] its negative."""
    return -_half(blocks, at)


def _nibbles(blocks: Bytes, at: int, count: int) -> Bytes:
    """[R, B, 2 count] 4-bit codes: first the low halves of `count` bytes, then the high ones."""
    part = blocks[..., at : at + count]
    return np.concatenate([part & 15, part >> 4], axis=-1)


def _bits(blocks: Bytes, at: int, count: int) -> Bytes:
    """[R, B, count] bits of consecutive bytes, lowest first."""
    return np.unpackbits(blocks[..., at : at + count // 8], axis=-1, bitorder="little")


def _shifted(part: Bytes, shifts: tuple[int, ...], mask: int) -> Bytes:
    """[R, B, S, W] the bytes [R, B, W] shifted right by each of the shifts, masked."""
    return (part[..., None, :] >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)


def _pairs_of_bits(blocks: Bytes, at: int) -> Bytes:
    """[R, B, 256] 2-bit codes of 64 bytes: of each 32 bytes first the lowest bits, then the next."""
    halves = blocks[..., at : at + 64].reshape(*blocks.shape[:-1], 2, 32)
    return _shifted(halves, (0, 2, 4, 6), 3).reshape(*blocks.shape[:-1], 256)


# -- types without codes


def _f32(blocks: Bytes) -> Arrays:
    return {"numbers": np.ascontiguousarray(blocks).view(np.float32)}


def _f16(blocks: Bytes) -> Arrays:
    return {"numbers": np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)}


def _bf16(blocks: Bytes) -> Arrays:
    return {"numbers": (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)}


# -- blocks of 32


def _q4_0(blocks: Bytes) -> Arrays:
    return {"scales": _half(blocks, 0), "codes": blocks[..., 2:]}


def _q4_1(blocks: Bytes) -> Arrays:
    return {"scales": _half(blocks, 0), "offsets": _half(blocks, 2), "codes": blocks[..., 4:]}


def _q5_0(blocks: Bytes) -> Arrays:
    return {"scales": _half(blocks, 0), "codes": _nibbles(blocks, 6, 16) | (_bits(blocks, 2, 32) << 4)}


def _q5_1(blocks: Bytes) -> Arrays:
    codes = _nibbles(blocks, 8, 16) | (_bits(blocks, 4, 32) << 4)
    return {"scales": _half(blocks, 0), "offsets": _half(blocks, 2), "codes": codes}


def _q8_0(blocks: Bytes) -> Arrays:
    return {"scales": _half(blocks, 0), "codes": blocks[..., 2:] ^ np.uint8(128)}  # int8 plus 128


def _mxfp4(blocks: Bytes) -> Arrays:
    return {"scales": blocks[..., :1], "codes": blocks[..., 1:]}


# -- super-blocks of 256, whose groups of 16 or 32 have scales and offsets of few bits


def _q2_k(blocks: Bytes) -> Arrays:
    of_groups = {"sub_scales": blocks[..., :16] & 15, "sub_offsets": blocks[..., :16] >> 4}
    halves = {"scales": _half(blocks, 80), "offsets": _minus_half(blocks, 82)}
    return {**halves, **of_groups, "codes": _pairs_of_bits(blocks, 16)}


def _q3_k(blocks: Bytes) -> Arrays:
    high = _shifted(blocks[..., :32], tuple(range(8)), 1).reshape(*blocks.shape[:-1], 256)
    packed = blocks[..., 96:108]
    low_scales = np.concatenate([packed[..., :8] & 15, packed[..., :8] >> 4], axis=-1)
    high_scales = _shifted(packed[..., 8:], (0, 2, 4, 6), 3).reshape(*blocks.shape[:-1], 16)
    scales = (low_scales | (high_scales << 4)).view(np.int8) - np.int8(32)
    return {"scales": _half(blocks, 108), "sub_scales": scales, "codes": _pairs_of_bits(blocks, 32) | (high << 2)}


def _of_6_bits(blocks: Bytes) -> Arrays:
    """Scales and offsets of Q4_K and Q5_K, of 8 groups in 12 bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    return {
        "scales": _half(blocks, 0),
        "offsets": _minus_half(blocks, 2),
        "sub_scales": np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=-1),
        "sub_offsets": np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=-1),
    }


def _q4_k(blocks: Bytes) -> Arrays:
    return {**_of_6_bits(blocks), "codes": blocks[..., 16:]}


def _q5_k(blocks: Bytes) -> Arrays:
    quarters = blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 1, 32)
    low = np.concatenate([quarters & 15, quarters >> 4], axis=-2).reshape(*blocks.shape[:-1], 8, 32)
    high = _shifted(blocks[..., 16:48], tuple(range(8)), 1)
    return {**_of_6_bits(blocks), "codes": low | (high << 4)}


def _q6_k(blocks: Bytes) -> Arrays:
    halves = blocks[..., :128].reshape(*blocks.shape[:-1], 2, 1, 64)
    low = np.concatenate([halves & 15, halves >> 4], axis=-2).reshape(*blocks.shape[:-1], 256)
    codes = low | (_pairs_of_bits(blocks, 128) << 4)
    return {"scales": _half(blocks, 208), "sub_scales": blocks[..., 192:208].view(np.int8), "codes": codes}


def _iq4_xs(blocks: Bytes) -> Arrays:
    high = np.ascontiguousarray(blocks[..., 2:4]).view(np.uint16)
    high_scales = ((high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3).astype(np.uint8)
    low_scales = _shifted(blocks[..., 4:8], (0, 4), 15).swapaxes(-1, -2).reshape(*blocks.shape[:-1], 8)
    scales = (low_scales | (high_scales << 4)).view(np.int8) - np.int8(32)
    return {"scales": _half(blocks, 0), "sub_scales": scales, "codes": blocks[..., 8:]}


def _format(bits: int, group: int = 32, **keys: Any) -> GroupedFormat:
    return GroupedFormat(bits=bits, group=group, **keys)


def _super(bits: int, group: int, **keys: Any) -> GroupedFormat:
    return GroupedFormat(bits=bits, group=group, super_group=256, **keys)


BLOCKS = {
    "F32": Block(1, 4, _f32),
    "F16": Block(1, 2, _f16),
    "BF16": Block(1, 2, _bf16),
    "Q4_0": Block(32, 18, _q4_0, _format(4, zero=8), "halves_of_32"),
    "Q4_1": Block(32, 20, _q4_1, _format(4, offset="f16"), "halves_of_32"),
    "Q5_0": Block(32, 22, _q5_0, _format(5, zero=16)),
    "Q5_1": Block(32, 24, _q5_1, _format(5, offset="f16")),
    "Q8_0": Block(32, 34, _q8_0, _format(8, zero=128)),
    "Q2_K": Block(256, 84, _q2_k, _super(2, 16, offset="f16")),
    "Q3_K": Block(256, 110, _q3_k, _super(3, 16, zero=4, has_signed_scales=True)),
    "Q4_K": Block(256, 144, _q4_k, _super(4, 32, offset="f16"), "halves_of_64"),
    "Q5_K": Block(256, 176, _q5_k, _super(5, 32, offset="f16")),
    "Q6_K": Block(256, 210, _q6_k, _super(6, 16, zero=32, has_signed_scales=True)),
    "IQ4_NL": Block(32, 18, _q4_0, _format(4, table="iq4"), "halves_of_32"),
    "IQ4_XS": Block(256, 136, _iq4_xs, _super(4, 32, table="iq4", has_signed_scales=True), "halves_of_32"),
    "MXFP4": Block(32, 17, _mxfp4, _format(4, table="e2m1", scale="e8m0"), "halves_of_32"),
}
NAMES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}

"""Blocks of packed numbers: each type's size, and the numbers that it stands for, in float32.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h. In a block, `d` and `m` are factors and offsets
in half precision; a number is d * code + m, or what the type says. Numbers are exactly those of the `gguf` package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

IQ4_TABLE = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
E2M1_TABLE = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AT_ONCE = 1 << 16  # blocks of 32 unpacked at a time, so that temporaries stay in the cache


@dataclass(frozen=True, slots=True)
class Block:
    """A type: `size` numbers take `num_bytes` bytes; `unpack` maps [N, num_bytes] to [N, size]."""

    size: int
    num_bytes: int
    unpack: Callable[[Bytes], Floats]


def unpack(type_name: str, packed: Bytes, shape: tuple[int, ...]) -> Floats:
    """The numbers of a tensor of this shape, from all of its bytes."""
    block = BLOCKS[type_name]
    rows = packed.reshape(-1, block.num_bytes)
    numbers = np.empty((len(rows), block.size), np.float32)
    count = max(1, AT_ONCE * 32 // block.size)
    with np.errstate(invalid="ignore", over="ignore"):  # of a factor that is no number, which the caller refuses
        for begin in range(0, len(rows), count):
            numbers[begin : begin + count] = block.unpack(rows[begin : begin + count])
    return numbers.reshape(shape)


def name_of_type(kind: int) -> str:
    """The name of a type by its number in the file."""
    return NAMES.get(kind, f"number {kind}")


# -- parts of blocks


def _half(blocks: Bytes, at: int) -> Floats:
    """[N, 1] the half-precision number at a byte."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(blocks: Bytes, at: int, count: int) -> Bytes:
    """[N, 2 count] 4-bit codes: first the low halves of `count` bytes, then the high ones."""
    part = blocks[:, at : at + count]
    return np.concatenate([part & 15, part >> 4], axis=1)


def _bits(blocks: Bytes, at: int, count: int) -> Bytes:
    """[N, count] bits of consecutive bytes, lowest first."""
    return np.unpackbits(blocks[:, at : at + count // 8], axis=1, bitorder="little")


def _in_rows(groups: Floats) -> Floats:
    """[N, 256] the numbers of the groups of super-blocks [N, G, W]."""
    return groups.reshape(-1, 256)


def _shifted(part: Bytes, shifts: tuple[int, ...], mask: int) -> Bytes:
    """[N, S, W] the bytes [N, W] shifted right by each of the shifts, masked."""
    return (part[:, None, :] >> np.array(shifts, np.uint8)[:, None]) & np.uint8(mask)


# -- types without blocks


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


# -- blocks of 32


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks, 2, 16).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks, 4, 16).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks, 6, 16) | (_bits(blocks, 2, 32) << 4)
    return _half(blocks, 0) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks, 8, 16) | (_bits(blocks, 4, 32) << 4)
    return _half(blocks, 0) * codes.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:34].view(np.int8).astype(np.float32)


def _iq4_nl(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * IQ4_TABLE[_nibbles(blocks, 2, 16)]


def _mxfp4(blocks: Bytes) -> Floats:
    exponents = blocks[:, :1].astype(np.int32) - 127
    return np.ldexp(E2M1_TABLE[_nibbles(blocks, 1, 16)], exponents).astype(np.float32)


# -- super-blocks of 256, whose groups of 16 or 32 have scales and offsets of few bits


def _q2_k(blocks: Bytes) -> Floats:
    scales = blocks[:, :16]
    d, least = _half(blocks, 80), _half(blocks, 82)
    halves = [_shifted(blocks[:, 16 + 32 * half : 48 + 32 * half], (0, 2, 4, 6), 3) for half in (0, 1)]
    codes = np.concatenate(halves, axis=1).reshape(-1, 16, 16).astype(np.float32)
    factor, offset = d * (scales & 15).astype(np.float32), least * (scales >> 4).astype(np.float32)
    return _in_rows(factor[:, :, None] * codes - offset[:, :, None])


def _q3_k(blocks: Bytes) -> Floats:
    halves = [_shifted(blocks[:, 32 + 32 * half : 64 + 32 * half], (0, 2, 4, 6), 3) for half in (0, 1)]
    low = np.concatenate(halves, axis=1).reshape(-1, 256)
    high = _shifted(blocks[:, :32], tuple(range(8)), 1).reshape(-1, 256)
    codes = low.astype(np.float32) - 4 * (1 - high.astype(np.float32))
    packed = blocks[:, 96:108]
    low_scales = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high_scales = _shifted(packed[:, 8:], (0, 2, 4, 6), 3).reshape(-1, 16)
    scales = (low_scales | (high_scales << 4)).astype(np.float32) - 32
    factor = _half(blocks, 108) * scales
    return _in_rows(factor[:, :, None] * codes.reshape(-1, 16, 16))


def _scales_of_6_bits(packed: Bytes) -> tuple[Floats, Floats]:
    """([N, 8] scales, [N, 8] offsets) of Q4_K and Q5_K, from 12 bytes."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    offsets = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32), offsets.astype(np.float32)


def _of_groups(blocks: Bytes, codes: Floats) -> Floats:
    """[N, 256] numbers of Q4_K and Q5_K from their codes [N, 8, 32]."""
    scales, offsets = _scales_of_6_bits(blocks[:, 4:16])
    factor, offset = _half(blocks, 0) * scales, _half(blocks, 2) * offsets
    return _in_rows(factor[:, :, None] * codes - offset[:, :, None])


def _q4_k(blocks: Bytes) -> Floats:
    codes = _nibble_groups(blocks[:, 16:144])
    return _of_groups(blocks, codes.astype(np.float32))


def _q5_k(blocks: Bytes) -> Floats:
    high = _shifted(blocks[:, 16:48], tuple(range(8)), 1)
    return _of_groups(blocks, (_nibble_groups(blocks[:, 48:176]) | (high << 4)).astype(np.float32))


def _nibble_groups(part: Bytes) -> Bytes:
    """[N, 8, 32] codes: of each 32 bytes the low halves, then the high ones."""
    quarters = part.reshape(-1, 4, 1, 32)
    return np.concatenate([quarters & 15, quarters >> 4], axis=2).reshape(-1, 8, 32)


def _q6_k(blocks: Bytes) -> Floats:
    low = np.concatenate([part for half in (0, 1) for part in _low_of_6_bits(blocks, half)], axis=1)
    high = [_shifted(blocks[:, 128 + 32 * half : 160 + 32 * half], (0, 2, 4, 6), 3) for half in (0, 1)]
    codes = low | (np.concatenate(high, axis=1).reshape(-1, 256) << 4)
    factor = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _in_rows(factor[:, :, None] * (codes.astype(np.float32) - 32).reshape(-1, 16, 16))


def _low_of_6_bits(blocks: Bytes, half: int) -> tuple[Bytes, Bytes]:
    part = blocks[:, 64 * half : 64 * half + 64]
    return part & np.uint8(15), part >> np.uint8(4)


def _iq4_xs(blocks: Bytes) -> Floats:
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16)
    high_scales = (high >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    low_scales = _shifted(blocks[:, 4:8], (0, 4), 15).transpose(0, 2, 1).reshape(-1, 8)
    scales = (low_scales | (high_scales.astype(np.uint8) << 4)).astype(np.float32) - 32
    part = blocks[:, 8:136].reshape(-1, 8, 16)
    codes = IQ4_TABLE[np.concatenate([part & 15, part >> 4], axis=2)]
    return _in_rows((_half(blocks, 0) * scales)[:, :, None] * codes)


BLOCKS = {
    "F32": Block(1, 4, _f32),
    "F16": Block(1, 2, _f16),
    "BF16": Block(1, 2, _bf16),
    "Q4_0": Block(32, 18, _q4_0),
    "Q4_1": Block(32, 20, _q4_1),
    "Q5_0": Block(32, 22, _q5_0),
    "Q5_1": Block(32, 24, _q5_1),
    "Q8_0": Block(32, 34, _q8_0),
    "Q2_K": Block(256, 84, _q2_k),
    "Q3_K": Block(256, 110, _q3_k),
    "Q4_K": Block(256, 144, _q4_k),
    "Q5_K": Block(256, 176, _q5_k),
    "Q6_K": Block(256, 210, _q6_k),
    "IQ4_NL": Block(32, 18, _iq4_nl),
    "IQ4_XS": Block(256, 136, _iq4_xs),
    "MXFP4": Block(32, 17, _mxfp4),
}
NAMES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}

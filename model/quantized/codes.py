"""Packed codes and small floating-point numbers, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Codes = NDArray[np.int32]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def unpacked(words: NDArray[Any], bits: int) -> Codes:
    """[R, C] codes of `bits` from 32-bit words [R, W]: a stream of bits in each row, lowest first; C = 32 W / bits.

    Of W words with 3 bits a code, W must be a multiple of 3.
    """
    stream = words.view(np.uint32).astype(np.uint64)
    count = 32 * stream.shape[1] // bits
    starts = np.arange(count) * bits
    places, shifts = starts // 32, (starts % 32).astype(np.uint64)
    pairs = np.concatenate([stream, np.zeros((len(stream), 1), np.uint64)], axis=1)
    both = pairs[:, places] | (pairs[:, places + 1] << np.uint64(32))
    codes: Codes = ((both >> shifts) & np.uint64((1 << bits) - 1)).astype(np.int32)
    return codes


def e4m3(codes: Bytes) -> Floats:
    """8-bit floats without infinities: 1 sign, 4 exponent and 3 fraction bits; 0x7F and 0xFF are NaN."""
    return _E4M3[codes]


def e8m0(codes: Bytes) -> Floats:
    """Powers of two from 2^-127."""
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)


def by_group(scales: Floats, num_columns: int) -> Floats:
    """[N, K] of [N, G]: each scale for the K / G columns of its group. One scale or one column serves all."""
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), (1, num_columns))
    if scales.shape[1] in (1, num_columns):
        return scales
    return np.repeat(scales, -(-num_columns // scales.shape[1]), axis=1)[:, :num_columns]


def by_block(scales: Floats, shape: tuple[int, int], block: tuple[int, int]) -> Floats:
    """[N, K] of [ceil(N / n), ceil(K / k)]: each scale for its block of n x k; the last blocks may be cut."""
    rows = np.repeat(scales, block[0], axis=0)[: shape[0]]
    return np.repeat(rows, block[1], axis=1)[:, : shape[1]]


def _table_of_e4m3() -> Floats:
    codes = np.arange(256)
    exponents, fractions = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + fractions / 8, exponents - 7)
    numbers = np.where(exponents == 0, np.ldexp(fractions / 8, -6), normal)
    numbers[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes >= 128, -numbers, numbers).astype(np.float32)


_E4M3 = _table_of_e4m3()

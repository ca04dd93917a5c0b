"""A tile of an expert's weight from its codes: see `CodedMatrices` in `kernels/layout/experts.py`."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def coded_tile(
    codes, scales, zeros, offsets, table, zero, n, first, num_inner, codes_row, groups_row, is_output, like,
    GROUP: tl.constexpr, IS_PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows `n` [N] of a matrix, columns from `first` on, [N, K] in the type of `like`; numbers behind the last, too."""
    k = first + tl.arange(0, BLOCK_K)
    is_number = is_output[:, None] & (k < num_inner)[None, :]
    if IS_PAIRS:
        j = first // 2 + tl.arange(0, BLOCK_K // 2)
        place = codes + n[:, None] * codes_row + j[None, :]
        both = tl.load(place, mask=is_output[:, None] & (2 * j < num_inner)[None, :], other=0)
        found = tl.join(both & 15, both >> 4).reshape(BLOCK_N, BLOCK_K)
    else:
        found = tl.load(codes + n[:, None] * codes_row + k[None, :], mask=is_number, other=0)
    place = n[:, None] * groups_row + (k // GROUP)[None, :]
    numbers = found.to(tl.float32)
    if table is not None:
        numbers = tl.load(table + found.to(tl.int32))
    numbers -= zero
    if zeros is not None:
        numbers -= tl.load(zeros + place, mask=is_number, other=0).to(tl.float32)
    numbers *= tl.load(scales + place, mask=is_number, other=0.0).to(tl.float32)
    if offsets is not None:
        numbers += tl.load(offsets + place, mask=is_number, other=0.0)
    return numbers.to(like.dtype)

"""The attention prologue where the attention kernel does it itself: decode of few rows, one launch less a layer.

Its twin is `prologue_decode` in `kernels/reference/prologue_decode.py`. Shapes: a head of queries or a key in one row,
[M, D]; tables [P, D_rot / 2] f32, positions and slots [S] i64. Roundings are those of `attention_prologue.py`.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import triton
import triton.language as tl

from ..layout.layer_options import HeadNorms
from .attention_prologue import as_kept, row_sum, weighted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoldedPrologue:
    """A prologue that decode attention does itself, see `KernelSet.prologue_decode`."""

    norms: HeadNorms | None  # RMS norms of heads, before the rotation
    cos: Tensor | None
    sin: Tensor | None
    positions: Tensor
    slot_mapping: Tensor


def can_fold(norms: HeadNorms | None, query_factors: Tensor | None) -> bool:
    """Whether decode attention can do this prologue; the others are rare, and would cost registers."""
    if query_factors is not None:
        return False
    return norms is None or (norms.kind == "rms" and not norms.is_over_row and not norms.is_after_rope)


def kernel_arguments(folded: FoldedPrologue | None, dtype: torch.dtype) -> dict[str, object]:
    """What the kernel takes of a folded prologue."""
    if folded is None:
        names = ("q_norm", "k_norm", "cos", "sin", "positions", "slot_mapping", "eps", "cos_row", "sin_row")
        flags = {"IS_FOLDED": False, "IS_NORMED": False, "IS_ROUNDED": False, "HAS_HEAD_WEIGHTS": False, "HALF": 0}
        return dict.fromkeys(names) | flags
    norms, cos, sin = folded.norms, folded.cos, folded.sin
    q_norm, k_norm, eps = (None, None, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
    weight = k_norm if q_norm is None else q_norm
    return {
        "q_norm": q_norm,
        "k_norm": k_norm,
        "cos": cos,
        "sin": sin,
        "positions": folded.positions,
        "slot_mapping": folded.slot_mapping,
        "eps": eps,
        "cos_row": 0 if cos is None else cos.stride(0),
        "sin_row": 0 if sin is None else sin.stride(0),
        "IS_FOLDED": True,
        "IS_NORMED": norms is not None,
        "IS_ROUNDED": weight is not None and weight.dtype == dtype,
        "HAS_HEAD_WEIGHTS": weight is not None and weight.dim() == 2,
        "HALF": 0 if cos is None else cos.shape[1],
    }


@triton.jit
def rotation(cos, sin, position, d, cos_row, sin_row, HALF: tl.constexpr, BLOCK_D: tl.constexpr):
    """The factors [1, D] of a head's numbers `d` [1, D] and of their partners in the pairs that rotate."""
    cosines = tl.full([1, BLOCK_D], 1.0, tl.float32)
    sines = tl.zeros([1, BLOCK_D], tl.float32)
    if HALF > 0:
        is_turned = d < 2 * HALF
        cosines = tl.load(cos + position * cos_row + d % HALF, mask=is_turned, other=1.0)
        sines = tl.load(sin + position * sin_row + d % HALF, mask=is_turned, other=0.0)
        sines = tl.where(d < HALF, -sines, sines)
    return cosines, sines


@triton.jit
def turned_tile(
    place, head, d, is_element, weight, cosines, sines, eps,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, IS_NORMED: tl.constexpr, IS_ROUNDED: tl.constexpr,
    HAS_HEAD_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Heads [M, D] at `place` [M, 1], normed and rotated, in the memory's type; zero where not `is_element`.

    As `_turned_head`, but in one piece, as a matrix product takes it: partners are loaded once more instead of being
    moved between threads.
    """
    partner = d
    if HALF > 0:
        partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    x = tl.load(place + d, mask=is_element, other=0.0)
    y = tl.load(place + partner, mask=is_element, other=0.0)
    narrow: tl.constexpr = x.dtype
    if IS_NORMED:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(row_sum(wide * wide) / D + eps)
        x, y = wide * scale, y.to(tl.float32) * scale
        if weight is not None:
            weights = weight
            is_weight = d < D
            if HAS_HEAD_WEIGHTS:
                weights = weight + head * D
                is_weight = is_element
            x = weighted(x, weights + d, is_weight, narrow, IS_ROUNDED)
            y = weighted(y, weights + partner, is_weight, narrow, IS_ROUNDED)
        x, y = x.to(narrow), y.to(narrow)
    if HALF > 0:
        x = x.to(tl.float32) * cosines + y.to(tl.float32) * sines
    return x.to(narrow)


@triton.jit
def new_token(
    key, value, k_place, v_place, k_scale, v_scale, is_written, d, is_element, kc_d, vc_d,
    BLOCK_D: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    """Writes a head's new key and value [1, D] into the cache; returns both as they are there."""
    key = as_kept(key, k_scale, k_place.dtype.element_ty, IS_FP8)
    value = as_kept(value, v_scale, v_place.dtype.element_ty, IS_FP8)
    if is_written:
        tl.store(k_place + d * kc_d, key, mask=is_element)
        tl.store(v_place + d * vc_d, value, mask=is_element)
    return key, value

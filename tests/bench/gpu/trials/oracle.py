"""What the kernels of a layer compute, in float64 and by the definition; attention's is in `tests/kernels/paged.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[..., D] f64"""
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def gated(gate_up: Tensor) -> Tensor:
    """Of SiLU, [T, F] f64"""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate / (1 + (-gate).exp()) * up


def rope(heads: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """[T, H, D] f64; rows of the tables [P, D_rot / 2] are angles of the pairs (i, i + D_rot / 2)."""
    half = cos.shape[1]
    first, second, rest = heads.double().split((half, half, heads.shape[2] - 2 * half), dim=2)
    cosines, sines = (table[positions].double().unsqueeze(1) for table in (cos, sin))
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines, rest), dim=2)


def prologue(
    qkv: Tensor,
    num_groups: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D], keys and values [T, G, D], f64."""
    q, k, v = (part.double() for part in qkv.split((qkv.shape[1] - 2 * num_groups, num_groups, num_groups), dim=1))
    if norms is not None:
        q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
    return rope(q, cos, sin, positions), rope(k, cos, sin, positions), v

"""The cos and sin tables of rotary positions, one row per position, made once when a model is loaded."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .config import RopeConfig


def rope_tables(rope: RopeConfig, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, [num_positions, rope.dim / 2] each, f32, already times `rope.attention_factor`."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(rope)[None, :]  # [P, D_rot / 2]
    return (angles.cos() * rope.attention_factor).to(device), (angles.sin() * rope.attention_factor).to(device)


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Radians per position of each rotated pair, [dim / 2] f32, on the CPU.

    "dynamic" equals "default" up to the length the checkpoint states, which is the longest sequence served.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Short waves stay, long ones are stretched by `factor`, and those between are blended by how long they are."""
    wavelengths = 2 * math.pi / plain
    longest_kept = rope.original_max_position / rope.high_freq_factor
    shortest_stretched = rope.original_max_position / rope.low_freq_factor
    kept_share = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - kept_share) * plain / rope.factor + kept_share * plain
    stretched = torch.where(wavelengths > shortest_stretched, plain / rope.factor, plain)
    is_between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(is_between, blended, stretched)


def _yarn(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Pairs that turn often in the original context stay, those that turn rarely are stretched, with a ramp between."""

    def pair_that_turns(times: float) -> float:
        return rope.dim * math.log(rope.original_max_position / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    high = high if high != low else high + 0.001
    stretched_share = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * stretched_share + plain * (1 - stretched_share)

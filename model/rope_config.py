"""Rotary positions, read from a checkpoint's config.json in the form of transformers 4 and 5."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .config_keys import ConfigKeys
from .errors import quoted

MAX_POSITIONS = 2**31 - 1
MAX_THETA = 1e30  # rotary positions are computed in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions: `dim / 2` frequencies from `theta`, scaled by `kind`."""

    kind: str = "default"  # default | linear | dynamic | llama3 | yarn
    theta: float = 10_000.0
    dim: int  # rotated elements of a head, from its start; even
    factor: float = 1.0  # by which the context is stretched
    original_max_position: int  # context of the original training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp begins and ends at whole numbers
    attention_factor: float = 1.0  # multiplies cos and sin


def parse_rope(keys: ConfigKeys, head_dim: int, max_position: int) -> RopeConfig:
    """The rotary positions of a config.json, for heads of `head_dim` numbers."""
    name, scaling = _rope_values(keys)
    rope = ConfigKeys(scaling, f"{keys.source}: {name}")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "linear", "dynamic", "llama3", "yarn"):
        known = "default, linear, dynamic, llama3, yarn"
        rope.fail("rope_type", f"{quoted(kind)} is not supported; supported: {known}")
    # transformers rotates whole heads by the default kind, whatever the factor says
    share = (
        1.0 if kind == "default" else rope.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    )
    dim = int(head_dim * share) if share <= 1.0 else -1
    if dim % 2 or not 0 < dim <= head_dim:
        size = f"must give an even number of rotated elements up to head_dim = {head_dim}, not {quoted(share)}"
        rope.fail("partial_rotary_factor", size)
    original = _original_length(keys, rope, max_position) if kind in ("llama3", "yarn") else max_position
    needs_factor = kind in ("linear", "dynamic", "llama3") or (kind == "yarn" and original == max_position)
    factor = rope.number("factor", None if needs_factor else max_position / original)
    low_freq = rope.number("low_freq_factor", None if kind == "llama3" else 1.0)
    high_freq = rope.number("high_freq_factor", None if kind == "llama3" else 4.0)
    if not 0 < factor * original <= MAX_POSITIONS:
        length = f"must be above 0, and times {original} positions at most {MAX_POSITIONS}"
        rope.fail("factor", f"{length}, not {factor:g}")
    if not 0 < low_freq < high_freq:
        rope.fail("low_freq_factor", f"must be above 0 and below high_freq_factor = {high_freq:g}, not {low_freq:g}")
    theta = rope.number("rope_theta", keys.number("rope_theta", 10_000.0))
    if not 1.0 < theta <= MAX_THETA:
        rope.fail("rope_theta", f"must be above 1 and at most {MAX_THETA:g}, not {theta:g}")
    if kind == "dynamic" and dim < 4:
        rope.fail("rope_type", f"'dynamic' needs at least 4 rotated elements of a head, not {dim}")
    return RopeConfig(
        kind=kind,
        theta=theta,
        dim=dim,
        factor=factor if kind != "default" else 1.0,
        original_max_position=original,
        low_freq_factor=low_freq,
        high_freq_factor=high_freq,
        beta_fast=rope.number("beta_fast", 32.0) or 32.0,
        beta_slow=rope.number("beta_slow", 1.0) or 1.0,
        truncate=rope.flag("truncate", "truncate" not in scaling),
        attention_factor=_yarn_attention_factor(rope, factor) if kind == "yarn" else 1.0,
    )


def _original_length(keys: ConfigKeys, rope: ConfigKeys, max_position: int) -> int:
    """The context of the original training. As in transformers, the key beside the rotary parameters has priority."""
    is_beside = keys.values.get("original_max_position_embeddings") is not None
    return (keys if is_beside else rope).count("original_max_position_embeddings", max_position)


def _rope_values(keys: ConfigKeys) -> tuple[str, dict[str, Any]]:
    """The rotary parameters, and the key that holds them; as in transformers, the older key has priority."""
    name = "rope_scaling" if keys.values.get("rope_scaling") else "rope_parameters"
    scaling = keys.values.get(name) or {}
    if not isinstance(scaling, dict):
        keys.fail(name, f"must be an object, not {quoted(scaling)}")
    by_type = [scaling[kind] for kind in ("full_attention", "sliding_attention") if kind in scaling]
    if not by_type:
        return name, scaling
    if not all(isinstance(values, dict) and values == by_type[0] for values in by_type):
        keys.fail(name, "must be one object, or the same for each type of layer")
    return name, by_type[0]


def _yarn_attention_factor(rope: ConfigKeys, factor: float) -> float:
    """YaRN's factor of cos and sin, which keeps attention equally sharp over a longer context."""

    def sharpness(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = rope.number("mscale", 0.0, most=1e6), rope.number("mscale_all_dim", 0.0, most=1e6)
    default = sharpness(mscale) / sharpness(mscale_all_dim) if mscale and mscale_all_dim else sharpness(1.0)
    return rope.number("attention_factor", default, most=1e6)


def longest_sequence(rope: RopeConfig, max_position: int) -> int:
    """The longest sequence. YaRN checkpoints give the length before stretching (Qwen2.5) or after it."""
    return max(max_position, int(rope.factor * rope.original_max_position)) if rope.kind == "yarn" else max_position

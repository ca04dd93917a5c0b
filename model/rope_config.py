"""Rotary positions, read from a checkpoint's config.json in the form of transformers 4 and 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config_keys import ConfigKeys
from .errors import quoted

MAX_POSITIONS = 2**31 - 1
KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")  # that `parse_rope` reads
LAYER_TYPES = ("full_attention", "sliding_attention")
MAX_THETA = 1e30  # rotary positions are computed in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary positions: `dim / 2` frequencies from `theta`, scaled by `kind`."""

    kind: str = "default"  # one of `KINDS`, or proportional
    theta: float = 10_000.0
    dim: int  # rotated elements of a head, from its start; even
    num_turned: int = 0  # proportional: pairs that turn, the first ones; the others have the frequency 0
    factor: float = 1.0  # by which the context is stretched
    original_max_position: int  # context of the original training
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp begins and ends at whole numbers
    attention_factor: float = 1.0  # multiplies cos and sin
    short_factors: tuple[float, ...] = ()  # longrope: each pair's wavelength is stretched by its factor, ...
    long_factors: tuple[float, ...] = ()  # ... in sequences of more tokens than `original_max_position` by these


def parse_rope(
    keys: ConfigKeys,
    head_dim: int,
    max_position: int,
    *,
    theta: float = 10_000.0,
    share: float | None = None,
    layer_type: str | None = None,
) -> RopeConfig:
    """The rotary positions of a config.json, for heads of `head_dim` numbers.

    `theta` and `share` are the defaults of `rope_theta` and `partial_rotary_factor`; `share` None: as in transformers'
    Llama, the default kind rotates whole heads, whatever the file says. `layer_type`: the layers that they are of,
    where each type has its own.
    """
    rope = rope_keys(keys) if layer_type is None else rope_keys_by_type(keys, layer_type)
    scaling = rope.values
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kind = "longrope" if kind == "su" else kind  # its first name
    if kind not in KINDS:
        rope.fail("rope_type", f"{quoted(kind)} is not supported; supported: {', '.join(KINDS)}")
    whole = keys.number("partial_rotary_factor", 1.0 if share is None else share)
    share = 1.0 if kind == "default" and share is None else rope.number("partial_rotary_factor", whole)
    dim = int(head_dim * share) if share <= 1.0 else -1
    if dim % 2 or not 0 < dim <= head_dim:
        size = f"must give an even number of rotated elements up to head_dim = {head_dim}, not {quoted(share)}"
        rope.fail("partial_rotary_factor", size)
    has_original = kind in ("llama3", "yarn", "longrope")
    original = (
        _original_length(keys if layer_type is None else rope, rope, max_position) if has_original else max_position
    )
    needs_factor = kind in ("linear", "dynamic", "llama3") or (kind == "yarn" and original == max_position)
    factor = rope.number("factor", None if needs_factor else max_position / original)
    low_freq = rope.number("low_freq_factor", None if kind == "llama3" else 1.0)
    high_freq = rope.number("high_freq_factor", None if kind == "llama3" else 4.0)
    if not 0 < factor * original <= MAX_POSITIONS:
        length = f"must be above 0, and times {original} positions at most {MAX_POSITIONS}"
        rope.fail("factor", f"{length}, not {factor:g}")
    if not 0 < low_freq < high_freq:
        rope.fail("low_freq_factor", f"must be above 0 and below high_freq_factor = {high_freq:g}, not {low_freq:g}")
    theta = rope.number("rope_theta", keys.number("rope_theta", theta))
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
        attention_factor=_attention_factor(kind, rope, factor, original),
        short_factors=_factors(rope, "short_factor", dim) if kind == "longrope" else (),
        long_factors=_factors(rope, "long_factor", dim) if kind == "longrope" else (),
    )


def _factors(rope: ConfigKeys, key: str, dim: int) -> tuple[float, ...]:
    """A factor for each rotated pair."""
    factors: Any = rope.values.get(key)
    is_right = isinstance(factors, list) and len(factors) == dim // 2
    if not is_right or any(isinstance(f, bool) or not isinstance(f, int | float) or not 0 < f < 1e9 for f in factors):
        rope.fail(key, f"must be a list of {dim // 2} numbers above 0, one a rotated pair, not {quoted(factors)}")
    return tuple(map(float, factors))


def _original_length(keys: ConfigKeys, rope: ConfigKeys, max_position: int) -> int:
    """The context of the original training. As in transformers, the key beside the rotary parameters has priority."""
    is_beside = keys.values.get("original_max_position_embeddings") is not None
    return (keys if is_beside else rope).count("original_max_position_embeddings", max_position)


def rope_keys(keys: ConfigKeys) -> ConfigKeys:
    """The rotary parameters of all layers; as in transformers, the older key has priority."""
    name = "rope_scaling" if keys.values.get("rope_scaling") else "rope_parameters"
    parameters = _object(keys, name)
    if nested := [kind for kind in LAYER_TYPES if kind in parameters]:
        family = keys.values.get("model_type")
        keys.fail(name, f"has {nested[0]!r}, but all layers of a {family} model rotate alike: write what is in it here")
    return ConfigKeys(parameters, f"{keys.source}: {name}")


def rope_keys_by_type(keys: ConfigKeys, layer_type: str) -> ConfigKeys:
    """The rotary parameters of one type of layers, as transformers reads them.

    The older key changes those of "full_attention" only. What transformers would ignore, it is refused.
    """
    parameters, scaling = _object(keys, "rope_parameters"), _object(keys, "rope_scaling")
    if parameters and not any(kind in parameters for kind in LAYER_TYPES):
        keys.fail(
            "rope_parameters", f"must hold an object for each type of layer, {' and '.join(map(repr, LAYER_TYPES))}"
        )
    own = ConfigKeys(parameters, f"{keys.source}: rope_parameters")
    values, name = _object(own, layer_type), f"rope_parameters: {layer_type}"
    if layer_type == "full_attention" and scaling:
        if not parameters and scaling.get("type", "default") != "default" and "rope_type" not in scaling:
            keys.fail("rope_scaling", f"must name its kind as rope_type, not as type = {quoted(scaling['type'])}")
        values, name = {**values, **scaling}, "rope_scaling"
    values = {key: value for key, value in values.items() if key != "truncate"}
    if "truncate" in parameters:  # it is read beside the types
        values["truncate"] = parameters["truncate"]
    return ConfigKeys(values, f"{keys.source}: {name}")


def _object(keys: ConfigKeys, name: str) -> Mapping[str, Any]:
    """The object of a key; empty if it is absent or null."""
    value = keys.values.get(name) or {}
    if not isinstance(value, dict):
        keys.fail(name, f"must be an object, not {quoted(value)}")
    return value


def _attention_factor(kind: str, rope: ConfigKeys, factor: float, original: int) -> float:
    """The factor of cos and sin, which keeps attention equally sharp over a longer context."""
    if kind == "longrope":
        default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        return rope.number("attention_factor", default, most=1e6)
    if kind != "yarn":
        return 1.0

    def sharpness(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = rope.number("mscale", 0.0, most=1e6), rope.number("mscale_all_dim", 0.0, most=1e6)
    default = sharpness(mscale) / sharpness(mscale_all_dim) if mscale and mscale_all_dim else sharpness(1.0)
    return rope.number("attention_factor", default, most=1e6)


def longest_sequence(rope: RopeConfig, max_position: int) -> int:
    """The longest sequence. YaRN checkpoints give the length before stretching (Qwen2.5) or after it."""
    return max(max_position, int(rope.factor * rope.original_max_position)) if rope.kind == "yarn" else max_position

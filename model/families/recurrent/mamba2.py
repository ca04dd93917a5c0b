"""Mamba-2 layers: their sizes, and the names that their tensors have in all families."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from ...config_keys import ConfigKeys
from ...errors import quoted
from ...spec import DecoderSpec, NormSpec, RecurrentSpec
from ..names import (
    DECAY,
    MIX_CONV,
    MIX_GATE,
    MIX_NORM,
    MIX_OUTPUT,
    MIX_STEP,
    MIXED,
    SKIP,
    STEP_BIAS,
    Names,
    Rows,
    conv_rows,
    negative_exp,
    stacked,
)

OLDER_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}  # of layers


def mamba2(keys: ConfigKeys, hidden_size: int, norm: NormSpec) -> RecurrentSpec:
    """The layer of keys that begin with `mamba_`, as Bamba and Granite 4 have them."""
    if keys.values.get("hidden_act", "silu") != "silu":
        keys.refuse("hidden_act", "another activation than 'silu' is not supported beside Mamba-2 layers")
    heads, inner = keys.count("mamba_n_heads", 128), keys.count("mamba_expand", 2) * hidden_size
    size = keys.values.get("mamba_d_head")
    size = inner // heads if size in (None, "auto") else keys.count("mamba_d_head")
    if heads * size != inner:
        product = f"must be mamba_expand * hidden_size = {inner}, not {heads * size}"
        keys.fail("mamba_d_head", f"times mamba_n_heads = {heads} {product}")
    return layer(
        keys,
        norm,
        heads=heads,
        size=size,
        groups=("mamba_n_groups", keys.count("mamba_n_groups", 1)),
        key_dim=keys.count("mamba_d_state", 256),
        conv_width=keys.count("mamba_d_conv", 4, least=2),
        has_conv_bias=keys.flag("mamba_conv_bias", True),
        has_bias=keys.flag("mamba_proj_bias", False),
    )


def layer(
    keys: ConfigKeys, norm: NormSpec, *, heads: int, size: int, groups: tuple[str, int], **fields: Any
) -> RecurrentSpec:
    """A layer of `heads` heads of `size` numbers; `groups`: a key and its value. `fields`: of `RecurrentSpec`."""
    key, count = groups
    if heads % count:
        keys.fail(key, f"must divide the {heads} heads, but is {count}")
    return RecurrentSpec(
        kind="mamba2",
        num_key_heads=count,
        num_value_heads=heads,
        value_dim=size,
        norm=norm,
        norm_group=heads * size // count,
        step_limit=_step_limit(keys),
        **fields,
    )


def _step_limit(keys: ConfigKeys) -> tuple[float, float]:
    limits = keys.values.get("time_step_limit")
    if limits is None:
        return 0.0, inf
    pair: list[Any] = limits if isinstance(limits, list) and len(limits) == 2 else []
    stored: list[Any] = [one.get("__float__") if isinstance(one, dict) else one for one in pair]
    numbers: list[Any] = [inf if one in ("Infinity", "inf") else one for one in stored]
    if not numbers or any(isinstance(one, bool) or not isinstance(one, int | float) for one in numbers):
        keys.fail("time_step_limit", f"must be a list of two numbers, not {quoted(limits)}")
    least, most = float(numbers[0]), float(numbers[1])
    if not 0 <= least < most:
        keys.fail("time_step_limit", f"must rise from 0 or more, not {quoted(limits)}")
    return least, most


def recurrent_types(keys: ConfigKeys, key: str) -> ConfigKeys:
    """The keys with today's names of layer types in a list."""
    types = keys.values.get(key)
    if not isinstance(types, list):
        return keys
    newer = [OLDER_TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in types]
    return ConfigKeys({**keys.values, key: newer}, keys.source, keys.stored_names)


def in_layers(spec: DecoderSpec, types: list[str], net: RecurrentSpec) -> DecoderSpec:
    """The decoder with `net` as the mixer of its layers of type linear_attention. Equal layers stay one object."""
    made = {id(one): replace(one, mixer=net) for one in spec.layers}
    unique = {one: one for one in made.values()}
    layers = (
        unique[made[id(one)]] if kind == "linear_attention" else one
        for one, kind in zip(spec.layers, types, strict=True)
    )
    return replace(spec, layers=tuple(layers))


def mamba2_names(spec: DecoderSpec, stem: str) -> Names:
    """One matrix holds gates, what the convolution reads, and steps. `stem`: of the layer's mixer."""
    net = next(iter(spec.recurrent_layers.values()), None)
    if net is None:
        return {}
    gate, mixed, step = stacked(net.inner_size, net.conv_channels, net.num_value_heads)
    return {
        MIX_GATE: Rows(f"{stem}.in_proj", gate),
        MIXED: Rows(f"{stem}.in_proj", mixed),
        MIX_STEP: Rows(f"{stem}.in_proj", step),
        f"{MIX_CONV}.weight": conv_rows(net, f"{stem}.conv1d"),
        MIX_CONV: f"{stem}.conv1d",
        DECAY: Rows(f"{stem}.A_log", apply=negative_exp),
        STEP_BIAS: f"{stem}.dt_bias",
        SKIP: f"{stem}.D",
        MIX_NORM: f"{stem}.norm",
        MIX_OUTPUT: f"{stem}.out_proj",
    }

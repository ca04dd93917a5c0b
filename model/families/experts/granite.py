"""Granite 3 with experts, in its three forms: routed by the softmax of the chosen experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...config_keys import ConfigKeys
from ...rope_config import RopeConfig
from ...spec import DecoderSpec, RouterSpec
from ..building import Family, rope
from ..granite import granite_decoder, layer_thetas
from ..names import LAYER, ROUTER, SHARED_DOWN, SHARED_GATE, SHARED_UP, Names, split, stacked
from ..reading import Sizes, sizes, windows
from .mixtures import mixture, shared_feed, stacked_names, under_either_name


def granite_moe(keys: ConfigKeys) -> DecoderSpec:
    """Granite MoE: experts in every layer."""
    found = sizes(keys)
    return _decoder(keys, found, (rope(keys, found),), shared=0)


def granite_moe_shared(keys: ConfigKeys) -> DecoderSpec:
    """Granite MoE with a network for all tokens."""
    found = sizes(keys)
    return _decoder(keys, found, (rope(keys, found),), shared=_shared_size(keys))


def granite_moe_swa(keys: ConfigKeys) -> DecoderSpec:
    """As `granite_swa`, with windows and sinks, and experts."""
    found = sizes(keys)
    positions = rope(keys, found)
    thetas = layer_thetas(keys, found.num_layers, positions.theta)
    bases = list(dict.fromkeys(theta for theta in thetas if theta))
    return _decoder(
        keys,
        found,
        tuple(replace(positions, theta=theta) for theta in bases),
        shared=_shared_size(keys),
        windows=windows(keys, found.num_layers, 128, pattern=lambda layer: layer % 4 != 0),
        ropes=[bases.index(theta) if theta else None for theta in thetas],
        has_sinks=True,
    )


def _decoder(
    keys: ConfigKeys, found: Sizes, positions: tuple[RopeConfig, ...], *, shared: int, **changes: Any
) -> DecoderSpec:
    """`shared`: inner numbers of the network for all tokens; 0 = there is none. `changes`: of `layers_of`."""
    keys = under_either_name(keys, "num_experts", "num_local_experts")
    router = RouterSpec(when="after_top_k")
    moe = mixture(keys, router, num_experts=8, top_k=2, size="intermediate_size", shared=shared_feed(keys, shared))
    logits = 1 / keys.positive("logits_scaling", 1.0)
    return granite_decoder(keys, found, positions, logits=logits, inner=moe, **changes)


def _shared_size(keys: ConfigKeys) -> int:
    return keys.count("shared_intermediate_size", 0, least=0)


def names(spec: DecoderSpec) -> Names:
    """Experts are stacked, and gate and up are one matrix."""
    stacks = stacked_names(spec.mixtures[0], f"{BLOCK}.input_linear", f"{BLOCK}.output_linear")
    return {ROUTER: f"{BLOCK}.router.layer", **stacks, **_shared_names(spec)}


def swa_names(spec: DecoderSpec) -> Names:
    """As transformers calls them."""
    stacks = stacked_names(spec.mixtures[0], f"{BLOCK}.experts.gate_up_proj", f"{BLOCK}.experts.down_proj", suffix="")
    return {ROUTER: f"{BLOCK}.router", **stacks, **_shared_names(spec)}


def _shared_names(spec: DecoderSpec) -> Names:
    shared, name = spec.mixtures[0].shared, f"{LAYER}.shared_mlp"
    if shared is None:
        return {}
    rows = tuple(stacked(shared.intermediate_size, shared.intermediate_size))
    return {**split(f"{name}.input_linear", (SHARED_GATE, SHARED_UP), rows), SHARED_DOWN: f"{name}.output_linear"}


BLOCK = f"{LAYER}.block_sparse_moe"

FAMILIES = {
    "granitemoe": Family(spec=granite_moe, names=names),
    "granitemoe_swa": Family(spec=granite_moe_swa, names=swa_names),
    "granitemoeshared": Family(spec=granite_moe_shared, names=names),
}

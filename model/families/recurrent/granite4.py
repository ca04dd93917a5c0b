"""Granite 4: Granite with a feed for all tokens, with or without experts; its H models have Mamba-2 in most layers."""

from __future__ import annotations

from ...config_keys import ConfigKeys
from ...spec import DecoderSpec, FeedSpec, MoeSpec, RouterSpec
from ..building import Family, feed, rms_norm, rope
from ..experts.granite import names as granite_moe_names
from ..experts.mixtures import mixture, under_either_name
from ..granite import granite_decoder
from ..names import DOWN, GATE, LAYER, UP, Names, split, stacked
from ..reading import layer_types, renamed, sizes
from .mamba2 import in_layers, mamba2, mamba2_names, recurrent_types

TYPES = ("full_attention", "linear_attention")


def granite4(keys: ConfigKeys) -> DecoderSpec:
    """Granite 4: rotates only if `position_embedding_type` is "rope"."""
    stored = "layers_block_type" if keys.values.get("layer_types") is None else "layer_types"
    keys = recurrent_types(renamed(keys, {"layer_types": stored}), "layer_types")
    found = sizes(keys)
    types = layer_types(keys, found.num_layers, TYPES)
    if types is None or "full_attention" not in types:
        keys.refuse("layer_types", "no layer has attention, and a model of recurrent layers alone is not supported")
    rotates = keys.values.get("position_embedding_type") == "rope"
    spec = granite_decoder(
        keys,
        found,
        (rope(keys, found),) if rotates else (),
        logits=1 / keys.positive("logits_scaling", 1.0),
        inner=_feed(keys),
        ropes=[0 if rotates else None] * found.num_layers,
    )
    if "linear_attention" not in types:
        return spec
    return in_layers(spec, types, mamba2(keys, found.hidden_size, rms_norm(keys)))


def _feed(keys: ConfigKeys) -> FeedSpec | MoeSpec:
    shared = feed(keys, intermediate_size=keys.count("shared_intermediate_size", 1024))
    if not keys.count("num_local_experts", 8, least=0):
        return shared
    keys = under_either_name(keys, "num_experts", "num_local_experts")
    router = RouterSpec(when="after_top_k")
    return mixture(keys, router, num_experts=8, top_k=2, size="intermediate_size", shared=shared)


def names(spec: DecoderSpec) -> Names:
    """Gate and up are one matrix; experts are stacked."""
    mixer = mamba2_names(spec, f"{LAYER}.mamba")
    if spec.mixtures:
        return {**granite_moe_names(spec), **mixer}
    mlp, rows = f"{LAYER}.shared_mlp", stacked(spec.intermediate_size, spec.intermediate_size)
    return {**split(f"{mlp}.input_linear", (GATE, UP), tuple(rows)), DOWN: f"{mlp}.output_linear", **mixer}


FAMILIES = {"granitemoehybrid": Family(spec=granite4, names=names)}

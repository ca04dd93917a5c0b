"""Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE and FlexOlmo: routed by the softmax of all experts.

NOTE: Mixtral divides the chosen weights by their sum; the others do so only if `norm_topk_prob` is true.
"""

from __future__ import annotations

from ...config_keys import ConfigKeys
from ...spec import DecoderSpec, LayerSpec, MoeSpec, QkNorm, RouterSpec
from ..building import Family, biases, decoder, feed, layers_of, rms_norm, rope
from ..names import (
    EXPERT_DOWN,
    EXPERT_GATE,
    EXPERT_UP,
    LAYER,
    POST_FEED,
    POST_MIXER,
    ROUTER,
    SHARED,
    Names,
)
from ..reading import Sizes, refuse_true, sizes, windows
from .mixtures import in_some_layers, listed_layers, mixture, shared_feed, under_either_name


def mixtral(keys: ConfigKeys) -> DecoderSpec:
    """Mixtral: weights that add up to 1."""
    keys = under_either_name(keys, "num_experts", "num_local_experts")
    found, norm = sizes(keys, num_kv_heads=8, max_position=131_072), rms_norm(keys, default=1e-5)
    moe = mixture(keys, RouterSpec(norm_top_k=True), num_experts=8, top_k=2, size="intermediate_size")
    is_on = keys.values.get("sliding_window") is not None
    on = windows(keys, found.num_layers, 4096, is_on=is_on)
    layers = layers_of(found, norm, moe, windows=on)
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, theta=1e6),))


def mixtral_names(spec: DecoderSpec) -> Names:
    """w1 is the gate, w3 is up and w2 is down."""
    block = f"{LAYER}.block_sparse_moe"
    w1, w2, w3 = (f"{block}.experts.*.w{number}" for number in (1, 2, 3))
    return {ROUTER: f"{block}.gate", EXPERT_GATE: w1, EXPERT_DOWN: w2, EXPERT_UP: w3}


def qwen2_moe(keys: ConfigKeys) -> DecoderSpec:
    """Qwen2-MoE: biases of q, k and v; a network for all tokens, behind a gate."""
    keys = under_either_name(keys, "num_experts", "num_local_experts")
    found, norm = sizes(keys, num_kv_heads=16, max_position=32_768), rms_norm(keys)
    is_on, end = keys.flag("use_sliding_window", False), keys.count("max_window_layers", 28, least=0)
    on = windows(keys, found.num_layers, 4096, is_on=is_on, pattern=lambda layer: layer % 2 == 0 and layer < end)
    shared = shared_feed(keys, keys.count("shared_expert_intermediate_size", 5632))
    moe = mixture(keys, _router(keys), num_experts=60, top_k=4, inner=1408, shared=shared, has_shared_gate=True)
    layers = layers_of(found, norm, feed(keys, inner=5632), windows=on, has_qkv_bias=keys.flag("qkv_bias", True))
    return _qwen(keys, found, layers, moe)


def qwen2_moe_names(spec: DecoderSpec) -> Names:
    """The network for all tokens is called `shared_expert`."""
    return {stem: stem.replace("shared_experts", "shared_expert") for stem in SHARED}


def qwen3_moe(keys: ConfigKeys) -> DecoderSpec:
    """Qwen3-MoE: norms of q and k; a window, if it is switched on, in all layers."""
    keys = under_either_name(keys, "num_experts", "num_local_experts")
    found, norm = sizes(keys, num_kv_heads=4, max_position=32_768), rms_norm(keys)
    on = windows(keys, found.num_layers, 4096, is_on=keys.flag("use_sliding_window", False))
    moe = mixture(keys, _router(keys), num_experts=128, top_k=8, inner=768)
    qk_norm = QkNorm(norm=norm)
    layers = layers_of(found, norm, feed(keys, inner=6144), windows=on, qk_norm=qk_norm, **biases(keys))
    return _qwen(keys, found, layers, moe)


def _qwen(keys: ConfigKeys, found: Sizes, layers: list[LayerSpec], moe: MoeSpec) -> DecoderSpec:
    """Experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not list."""
    step, dense = keys.count("decoder_sparse_step", 1), listed_layers(keys, "mlp_only_layers", found.num_layers)
    layers = in_some_layers(layers, moe, lambda layer: layer not in dense and (layer + 1) % step == 0)
    return decoder(keys, found, layers, final_norm=rms_norm(keys), ropes=(rope(keys, found),))


def olmoe(keys: ConfigKeys) -> DecoderSpec:
    """OLMoE: norms over all heads of q, and over all of k."""
    refuse_true(keys, "clip_qkv")
    keys = under_either_name(keys, "num_experts", "num_local_experts")
    found, norm = sizes(keys, max_position=4096), rms_norm(keys, default=1e-5)
    moe = mixture(keys, _router(keys), num_experts=64, top_k=8, size="intermediate_size")
    layers = layers_of(found, norm, moe, qk_norm=QkNorm(norm=norm, over="row"), **biases(keys))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found),))


def flex_olmo(keys: ConfigKeys) -> DecoderSpec:
    """FlexOlmo: OLMo 2 with experts, so norms behind attention and experts instead of before them."""
    keys = under_either_name(keys, "num_experts", "num_local_experts")
    found, norm = sizes(keys, max_position=4096), rms_norm(keys, is_exact=True)
    moe = mixture(keys, _router(keys), num_experts=7, top_k=5, size="intermediate_size")
    around, qk_norm = {"post_mixer": norm, "post_feed": norm}, QkNorm(norm=norm, over="row")
    layers = layers_of(found, None, moe, around=around, qk_norm=qk_norm, **biases(keys))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, theta=5e5),))


def flex_olmo_names(spec: DecoderSpec) -> Names:
    """As in OLMo 2."""
    return {
        POST_MIXER: f"{LAYER}.post_attention_layernorm",
        POST_FEED: f"{LAYER}.post_feedforward_layernorm",
    }


def _router(keys: ConfigKeys) -> RouterSpec:
    return RouterSpec(norm_top_k=keys.flag("norm_topk_prob", False))


FAMILIES = {
    "flex_olmo": Family(spec=flex_olmo, names=flex_olmo_names),
    "mixtral": Family(spec=mixtral, names=mixtral_names),
    "olmoe": Family(spec=olmoe),
    "qwen2_moe": Family(spec=qwen2_moe, names=qwen2_moe_names),
    "qwen3_moe": Family(spec=qwen3_moe),
}

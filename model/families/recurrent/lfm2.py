"""LFM2: short convolutions between two gates, and attention with norms of queries and keys; LFM2-MoE has experts."""

from __future__ import annotations

from ...config_keys import ConfigKeys
from ...spec import DecoderSpec, FeedSpec, LayerSpec, Mixer, QkNorm, RecurrentSpec, RouterSpec
from ..building import Family, attention, decoder, rms_norm, rope
from ..experts.mixtures import in_some_layers, mixture
from ..names import (
    CHOICE_BIAS,
    DOWN,
    EXPERT_DOWN,
    EXPERT_GATE,
    EXPERT_UP,
    FINAL_NORM,
    GATE,
    K_NORM,
    LAYER,
    MIX_CONV,
    MIX_OUTPUT,
    MIXED,
    OUTPUT,
    PRE_FEED,
    PRE_MIXER,
    Q_NORM,
    ROUTER,
    UP,
    Names,
    conv_rows,
)
from ..reading import Sizes, layer_types, sizes

TYPES = ("full_attention", "conv")
CONV, FEED = f"{LAYER}.conv", f"{LAYER}.feed_forward"


def lfm2(keys: ConfigKeys) -> DecoderSpec:
    """LFM2: the size of the feed is adjusted, unless the file says not to."""
    if keys.values.get("block_ff_dim") is not None:
        keys = ConfigKeys({**keys.values, "intermediate_size": keys.values["block_ff_dim"]}, keys.source)
    inner = keys.count("intermediate_size", 12_288)
    if keys.flag("block_auto_adjust_ff_dim", True):
        multiple = keys.count("block_multiple_of", 256)
        inner = int(keys.positive("block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    found = sizes(keys, num_heads=32, num_kv_heads=8, max_position=128_000)
    return _decoder(keys, found, _layers(keys, found, FeedSpec(intermediate_size=inner)))


def lfm2_moe(keys: ConfigKeys) -> DecoderSpec:
    """LFM2-MoE: experts behind the first layers, routed by sigmoids."""
    found = sizes(keys, num_heads=32, num_kv_heads=8, max_position=128_000)
    router = RouterSpec(
        score="sigmoid",
        norm_top_k=keys.flag("norm_topk_prob", True),
        norm_eps=1e-6,
        scale=keys.positive("routed_scaling_factor", 1.0),
        has_choice_bias=keys.flag("use_expert_bias", True),
    )
    expert = FeedSpec(intermediate_size=keys.count("moe_intermediate_size", 1792))
    moe = mixture(keys, router, num_experts=32, top_k=4, expert=expert)
    num_dense = keys.count("num_dense_layers", 2, least=0)
    layers = _layers(keys, found, FeedSpec(intermediate_size=keys.count("intermediate_size", 7168)))
    return _decoder(keys, found, in_some_layers(layers, moe, lambda layer: layer >= num_dense))


def _layers(keys: ConfigKeys, found: Sizes, inner: FeedSpec) -> list[LayerSpec]:
    norm = rms_norm(keys, "norm_eps", 1e-5)
    types = layer_types(keys, found.num_layers, TYPES)
    if types is None:
        listed = keys.values.get("full_attn_idxs")
        types = [TYPES[listed is not None and layer not in listed] for layer in range(found.num_layers)]
    conv = RecurrentSpec(
        kind="short_conv",
        value_dim=found.hidden_size,
        conv_width=keys.count("conv_L_cache", 3, least=2),
        has_conv_bias=keys.flag("conv_bias", False),
        has_bias=keys.flag("conv_bias", False),
    )
    mixers: dict[str, Mixer] = {"full_attention": attention(found, qk_norm=QkNorm(norm=norm)), "conv": conv}
    return [LayerSpec(mixer=mixers[kind], feed=inner, pre_mixer=norm, pre_feed=norm) for kind in types]


def _decoder(keys: ConfigKeys, found: Sizes, layers: list[LayerSpec]) -> DecoderSpec:
    is_tied = keys.flag("tie_embedding", True)
    positions = (rope(keys, found, theta=1e6),)
    norm = rms_norm(keys, "norm_eps", 1e-5)
    return decoder(keys, found, layers, final_norm=norm, ropes=positions, is_tied=is_tied)


def names(spec: DecoderSpec) -> Names:
    """The names of LFM2's own code."""
    found: dict[str, object] = {
        PRE_MIXER: f"{LAYER}.operator_norm",
        PRE_FEED: f"{LAYER}.ffn_norm",
        FINAL_NORM: "model.embedding_norm",
        OUTPUT: f"{LAYER}.self_attn.out_proj",
        Q_NORM: f"{LAYER}.self_attn.q_layernorm",
        K_NORM: f"{LAYER}.self_attn.k_layernorm",
        **{stem: f"{FEED}.{name}" for stem, name in zip((GATE, DOWN, UP), ("w1", "w2", "w3"), strict=True)},
        MIXED: f"{CONV}.in_proj",
        MIX_CONV: f"{CONV}.conv",
        MIX_OUTPUT: f"{CONV}.out_proj",
    }
    for conv in list(spec.recurrent_layers.values())[:1]:
        found[f"{MIX_CONV}.weight"] = conv_rows(conv, f"{CONV}.conv")
    return found  # type: ignore[return-value]


def moe_names(spec: DecoderSpec) -> Names:
    """As `names`, with experts of w1, w2 and w3."""
    w1, w2, w3 = (f"{FEED}.experts.*.w{number}" for number in (1, 2, 3))
    experts = {ROUTER: f"{FEED}.gate", CHOICE_BIAS: f"{FEED}.expert_bias"}
    return {**names(spec), **experts, EXPERT_GATE: w1, EXPERT_DOWN: w2, EXPERT_UP: w3}


FAMILIES = {"lfm2": Family(spec=lfm2, names=names), "lfm2_moe": Family(spec=lfm2_moe, names=moe_names)}

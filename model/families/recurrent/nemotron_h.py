"""Nemotron-H: each layer is one of Mamba-2, attention without rotary positions, a feed by the square of ReLU, experts.

NOTE: the published code limits steps by `time_step_limit`; transformers' class limits those of prompts, and not those
of answers, by `time_step_min`. Here it is the former.
"""

from __future__ import annotations

from ...config_keys import ConfigKeys
from ...errors import quoted
from ...spec import Activation, DecoderSpec, FeedSpec, LayerSpec, RouterSpec
from ..building import Family, activation_of, attention, decoder, rms_norm
from ..experts.mixtures import mixture, under_either_name
from ..names import (
    CHOICE_BIAS,
    DOWN,
    EMBEDDING,
    EXPERT_DOWN,
    EXPERT_UP,
    FINAL_NORM,
    OUTPUT,
    PRE_FEED,
    PRE_MIXER,
    ROUTER,
    SHARED_DOWN,
    SHARED_UP,
    UP,
    K,
    Names,
    Q,
    V,
)
from ..reading import sizes
from .mamba2 import layer, mamba2_names, recurrent_types

TYPES = ("linear_attention", "full_attention", "mlp", "moe")
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
OLDER_KEYS = {"n_groups": "mamba_n_groups", "conv_kernel": "mamba_d_conv", "use_conv_bias": "mamba_conv_bias"}
LAYER = "backbone.layers.*"


def nemotron_h(keys: ConfigKeys) -> DecoderSpec:
    """Nemotron-H: `layers_block_type`, or `hybrid_override_pattern` in letters, says what each layer is."""
    types = _types(keys)
    keys = ConfigKeys({**keys.values, "num_hidden_layers": len(types)}, keys.source, keys.stored_names)
    for name, older in OLDER_KEYS.items():
        if keys.values.get(older) is not None:
            keys = ConfigKeys({**keys.values, name: keys.values[older]}, keys.source, keys.stored_names)
    found = sizes(keys, num_heads=32, num_kv_heads=8, head_dim=128, max_position=4096)
    if keys.values.get("mamba_hidden_act", "silu") != "silu":
        keys.refuse("mamba_hidden_act", "another activation than 'silu' is not supported in Mamba-2 layers")
    norm = rms_norm(keys, "layer_norm_epsilon", 1e-5, is_exact=True)
    heads = keys.count("mamba_num_heads", 128)
    net = layer(
        keys,
        norm,
        heads=heads,
        size=keys.count("mamba_head_dim", 64),
        groups=("n_groups", keys.count("n_groups", 8)),
        key_dim=keys.count("ssm_state_size", 128),
        conv_width=keys.count("conv_kernel", 4, least=2),
        has_conv_bias=keys.flag("use_conv_bias", True),
        has_bias=keys.flag("use_bias", False),
    )
    parts = {
        "linear_attention": LayerSpec(mixer=net, feed=None, pre_mixer=norm, pre_feed=None),
        "full_attention": LayerSpec(mixer=attention(found, rope=None), feed=None, pre_mixer=norm, pre_feed=None),
        "mlp": LayerSpec(mixer=None, feed=_feed(keys, "intermediate_size", 21_504), pre_mixer=None, pre_feed=norm),
    }
    if "moe" in types:
        parts["moe"] = _experts(keys, parts["mlp"])
    return decoder(keys, found, [parts[kind] for kind in types], final_norm=norm)


def _types(keys: ConfigKeys) -> list[str]:
    name = "layers_block_type" if keys.values.get("layers_block_type") is not None else "layer_types"
    types = recurrent_types(keys, name).values.get(name)
    pattern = keys.values.get("hybrid_override_pattern")
    if types is None and isinstance(pattern, str):
        name, types = "hybrid_override_pattern", [LETTERS.get(letter, letter) for letter in pattern]
    types = ["linear_attention", "moe", "full_attention", "mlp"] if types is None else types
    if not isinstance(types, list) or not types or any(kind not in TYPES for kind in types):
        keys.fail(name, f"must say of each layer which it is of {', '.join(TYPES)}, not {quoted(types)}")
    return types


def _feed(keys: ConfigKeys, size: str, default: int) -> FeedSpec:
    activation: Activation = activation_of(keys, "mlp_hidden_act", "relu2")
    return FeedSpec(
        intermediate_size=keys.count(size, default),
        is_gated=False,
        activation=activation,
        has_bias=keys.flag("mlp_bias", False),
    )


def _experts(keys: ConfigKeys, mlp: LayerSpec) -> LayerSpec:
    """A layer of experts without gates, routed by sigmoids within groups, and a feed for all tokens."""
    if keys.values.get("moe_latent_size") is not None:
        keys.refuse("moe_latent_size", "experts of compressed tokens are not supported")
    keys = under_either_name(keys, "num_experts", "n_routed_experts", "num_local_experts")
    router = RouterSpec(
        score="sigmoid",
        norm_top_k=keys.flag("norm_topk_prob", True),
        norm_eps=1e-20,
        scale=keys.positive("routed_scaling_factor", 1.0),
        has_choice_bias=True,
        groups=keys.count("n_group", 1),
        groups_kept=keys.count("topk_group", 1),
        group_score="top2",
    )
    moe = mixture(
        keys,
        router,
        num_experts=8,
        top_k=2,
        expert=_feed(keys, "moe_intermediate_size", 7688),
        shared=_feed(keys, "moe_shared_expert_intermediate_size", 7688),
    )
    return LayerSpec(mixer=None, feed=moe, pre_mixer=None, pre_feed=mlp.pre_feed)


def names(spec: DecoderSpec) -> Names:
    """What a layer is, is called `mixer`, with one norm before it."""
    mixer = f"{LAYER}.mixer"
    return {
        EMBEDDING: "backbone.embeddings",
        FINAL_NORM: "backbone.norm_f",
        PRE_MIXER: f"{LAYER}.norm",
        PRE_FEED: f"{LAYER}.norm",
        **{stem: f"{mixer}.{name}_proj" for stem, name in zip((Q, K, V, OUTPUT), "qkvo", strict=True)},
        UP: f"{mixer}.up_proj",
        DOWN: f"{mixer}.down_proj",
        ROUTER: f"{mixer}.gate",
        CHOICE_BIAS: f"{mixer}.gate.e_score_correction_bias",
        EXPERT_UP: f"{mixer}.experts.*.up_proj",
        EXPERT_DOWN: f"{mixer}.experts.*.down_proj",
        SHARED_UP: f"{mixer}.shared_experts.up_proj",
        SHARED_DOWN: f"{mixer}.shared_experts.down_proj",
        **mamba2_names(spec, mixer),
    }


FAMILIES = {"nemotron_h": Family(spec=nemotron_h, names=names, prefix="backbone")}

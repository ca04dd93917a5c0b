"""GLM-4.5 and what routes as DeepSeek V3 does, without its latents: Dots 1, Solar Open; and Ernie 4.5 with experts.

Experts are chosen by sigmoid and a bias, within the best groups of experts by the sum of their best two. Weights are
the sigmoids without the bias; the scale multiplies them whether or not they are divided by their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...config_keys import ConfigKeys
from ...spec import DecoderSpec, MoeSpec, QkNorm, RouterSpec
from ..building import Family, biases, decoder, feed, layers_of, rms_norm, rope
from ..names import CHOICE_BIAS, LAYER, Names, Rows, interleaved
from ..reading import sizes, windows
from .mixtures import in_some_layers, mixture, shared_feed, under_either_name


def glm4_moe(keys: ConfigKeys) -> DecoderSpec:
    """GLM-4.5 to 4.7: half of a head rotates, in halves; norms of q and k in the large ones."""
    found, norm = sizes(keys, num_kv_heads=8, max_position=131_072), rms_norm(keys, default=1e-5)
    qk_norm = QkNorm(norm=norm) if keys.flag("use_qk_norm", False) else None
    has_bias = keys.flag("attention_bias", False)
    moe = deepseek_mixture(keys, norm_top_k=True, num_shared=1, num_experts=128, top_k=8, inner=1408)
    layers = layers_of(found, norm, feed(keys, inner=10_944), qk_norm=qk_norm, has_qkv_bias=has_bias)
    layers = in_some_layers(layers, moe, behind(keys, 1))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, share=0.5),))


def dots1(keys: ConfigKeys) -> DecoderSpec:
    """Dots 1: norms of q and k, windows from a layer on."""
    found, norm = sizes(keys), rms_norm(keys)
    on = windows(keys, found.num_layers, 4096, first=keys.count("max_window_layers", 62, least=0))
    moe = deepseek_mixture(keys, norm_top_k=False, num_shared=None, num_experts=None, top_k=None, inner=1408)
    dense = feed(keys, inner=10_944)
    layers = layers_of(found, norm, dense, windows=on, qk_norm=QkNorm(norm=norm), **biases(keys))
    layers = in_some_layers(layers, moe, behind(keys, 0))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found),))


def solar_open(keys: ConfigKeys) -> DecoderSpec:
    """Solar Open: experts in all layers."""
    found, norm = sizes(keys, num_kv_heads=8, head_dim=128, max_position=131_072), rms_norm(keys, default=1e-5)
    moe = deepseek_mixture(keys, norm_top_k=True, num_shared=1, num_experts=128, top_k=8, inner=1280)
    layers = layers_of(found, norm, moe, has_qkv_bias=keys.flag("attention_bias", False))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, theta=1e6),))


def ernie4_5_moe(keys: ConfigKeys) -> DecoderSpec:
    """Ernie 4.5: softmax, and a bias that chooses; neighbours rotate together."""
    names = {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"}
    for name, stored in names.items():
        keys = under_either_name(keys, name, stored)
    found, norm = sizes(keys, num_kv_heads=4, max_position=131_072), rms_norm(keys, default=1e-5)
    has_bias, expert = keys.flag("use_bias", False), feed(keys, size="moe_intermediate_size", inner=1536)
    router = RouterSpec(norm_top_k=True, norm_min=keys.number("moe_norm_min", 1e-12), has_choice_bias=True)
    shared = shared_feed(keys, expert.intermediate_size * keys.count("moe_num_shared_experts", 2, least=0))
    shared = None if shared is None else replace(shared, has_bias=has_bias)
    moe = mixture(keys, router, num_experts=64, top_k=6, expert=expert, shared=shared)
    first, step = keys.count("moe_layer_start_index", 1, least=0), keys.count("moe_layer_interval", 1)
    last = keys.count("moe_layer_end_index", 27, least=-1)
    last = found.num_layers - 1 if last == -1 else last
    layers = layers_of(found, norm, feed(keys, inner=12_288, has_bias=has_bias), **biases(keys, "use_bias"))
    layers = in_some_layers(layers, moe, lambda layer: first <= layer <= last and (layer + 1) % step == 0)
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, theta=5e5),), is_tied=True)


def ernie_names(spec: DecoderSpec) -> Names:
    """Rows of neighbours; the bias is a row of its own module."""
    bias = Rows(f"{LAYER}.mlp.moe_statics.e_score_correction_bias", shape=(1, spec.mixtures[0].num_experts))
    return {**interleaved(spec.attention, spec.ropes[0].dim), **({CHOICE_BIAS: bias} if spec.mixtures else {})}


def deepseek_mixture(
    keys: ConfigKeys,
    *,
    norm_top_k: bool,
    num_shared: int | None,
    num_experts: int | None,
    top_k: int | None,
    inner: int,
    scale: float = 1.0,
    groups: int = 1,
    groups_kept: int = 1,
) -> MoeSpec:
    """Experts as DeepSeek V3 routes to them. The arguments are defaults; None: the key has to be there."""
    keys = under_either_name(keys, "num_experts", "n_routed_experts", "num_local_experts")
    router = RouterSpec(
        score="sigmoid",
        norm_top_k=keys.flag("norm_topk_prob", norm_top_k),
        norm_eps=1e-20,
        scale=keys.number("routed_scaling_factor", scale),
        has_choice_bias=True,
        groups=keys.count("n_group", groups),
        groups_kept=keys.count("topk_group", groups_kept),
        group_score="top2",
    )
    expert = feed(keys, size="moe_intermediate_size", inner=inner)
    shared = shared_feed(keys, expert.intermediate_size * keys.count("n_shared_experts", num_shared))
    return mixture(keys, router, num_experts=num_experts, top_k=top_k, expert=expert, shared=shared)


def behind(keys: ConfigKeys, default: int) -> Callable[[int], bool]:
    """Whether a layer has experts: the first `first_k_dense_replace` have none."""
    first = keys.count("first_k_dense_replace", default, least=0)
    return lambda layer: layer >= first


FAMILIES = {
    "dots1": Family(spec=dots1),
    "ernie4_5_moe": Family(spec=ernie4_5_moe, names=ernie_names),
    "glm4_moe": Family(spec=glm4_moe, has_guessing_layers=True),
    "solar_open": Family(spec=solar_open),
}

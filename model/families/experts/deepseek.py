"""DeepSeek V2 and V3, and GLM-4.7 Flash: experts behind attention over latents.

The first layers have a dense feed. Files of V3 have layers behind the last, to guess further tokens; they are not used.
"""

from __future__ import annotations

from dataclasses import replace

from ...config_keys import ConfigKeys
from ...spec import DecoderSpec, LayerSpec, MoeSpec, RouterSpec
from ..building import Family, decoder, feed, rms_norm
from ..latents import latent_attention, latent_sizes, neighbours
from ..reading import layer_types, refuse_other
from .glm import behind, deepseek_mixture
from .mixtures import in_some_layers, mixture, shared_feed, under_either_name


def deepseek_v2(keys: ConfigKeys) -> DecoderSpec:
    """DeepSeek V2: softmax, whose weights are scaled and never divided by their sum; neighbours rotate."""
    refuse_other(keys, norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1)
    found, norm = latent_sizes(keys, max_position=2048), rms_norm(keys)
    mixer, rope = latent_attention(keys, found, q_rank=1536)
    has_bias = keys.flag("mlp_bias", False)
    layer = LayerSpec(mixer=mixer, feed=feed(keys, inner=11_008, has_bias=has_bias), pre_mixer=norm, pre_feed=norm)
    layers = in_some_layers([layer] * found.num_layers, _softmax_mixture(keys, has_bias), behind(keys, 0))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope,))


def _softmax_mixture(keys: ConfigKeys, has_bias: bool) -> MoeSpec:
    """The experts of V2. `has_bias`: of the shared network."""
    keys = under_either_name(keys, "num_experts", "n_routed_experts")
    method = keys.values.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        keys.fail("topk_method", f"{method!r} is not supported; supported: greedy, group_limited_greedy")
    router = RouterSpec(scale=keys.number("routed_scaling_factor", 1.0))
    if method != "greedy":
        router = replace(router, groups=keys.count("n_group"), groups_kept=keys.count("topk_group"))
    expert = feed(keys, size="moe_intermediate_size", inner=1407)
    shared = shared_feed(keys, expert.intermediate_size * keys.count("n_shared_experts", 2, least=0))
    shared = None if shared is None else replace(shared, has_bias=has_bias)
    return mixture(keys, router, num_experts=64, top_k=None, expert=expert, shared=shared)


def deepseek_v3(keys: ConfigKeys) -> DecoderSpec:
    """DeepSeek V3 and R1: sigmoid, and a bias that chooses; neighbours rotate."""
    refuse_other(keys, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, rope_interleave=True)
    found, norm = latent_sizes(keys, max_position=4096), rms_norm(keys)
    mixer, rope = latent_attention(keys, found, q_rank=1536)
    moe = deepseek_mixture(
        keys, norm_top_k=True, num_shared=1, num_experts=256, top_k=8, inner=2048, scale=2.5, groups=8, groups_kept=4
    )
    layer = LayerSpec(mixer=mixer, feed=feed(keys, inner=18_432), pre_mixer=norm, pre_feed=norm)
    layers = in_some_layers([layer] * found.num_layers, moe, behind(keys, 3))
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope,))


def glm4_moe_lite(keys: ConfigKeys) -> DecoderSpec:
    """GLM-4.7 Flash: DeepSeek V3 in other sizes, where a key may list which layers have experts."""
    refuse_other(keys, first_k_dense_replace=1, rope_interleave=True)
    found, norm = latent_sizes(keys, max_position=202_752), rms_norm(keys, default=1e-5)
    mixer, rope = latent_attention(keys, found, q_rank=768, nope_dim=192, value_dim=256)
    moe = deepseek_mixture(keys, norm_top_k=True, num_shared=1, num_experts=64, top_k=4, inner=1536, scale=1.8)
    layer = LayerSpec(mixer=mixer, feed=feed(keys, inner=10_240), pre_mixer=norm, pre_feed=norm)
    kinds = layer_types(keys, found.num_layers, ("dense", "sparse"), "mlp_layer_types")
    kinds = kinds or ["dense", *["sparse"] * (found.num_layers - 1)]
    layers = in_some_layers([layer] * found.num_layers, moe, lambda index: kinds[index] == "sparse")
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope,))


FAMILIES = {
    "deepseek_v2": Family(spec=deepseek_v2, names=neighbours),
    "deepseek_v3": Family(spec=deepseek_v3, names=neighbours, has_guessing_layers=True),
    "glm4_moe_lite": Family(spec=glm4_moe_lite, names=neighbours, has_guessing_layers=True),
}

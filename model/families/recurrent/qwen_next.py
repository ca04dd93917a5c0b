"""Qwen3-Next and Qwen3.5/3.6: three layers with a gated delta net to one with attention, whose output has a gate.

All norms are stored as w - 1 but that of the delta net's output. A quarter of each head rotates. The text half of the
models that also read images is served; their further tokens at once (`mtp`) are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...config_keys import ConfigKeys
from ...spec import (
    AttentionSpec,
    DecoderSpec,
    FeedSpec,
    LayerSpec,
    MoeSpec,
    NormSpec,
    QkNorm,
    RecurrentSpec,
    RouterSpec,
)
from ..building import Family, attention, biases, decoder, feed, rms_norm, rope
from ..experts.mixtures import listed_layers, mixture, shared_feed, stacked_names, under_either_name
from ..names import (
    DECAY,
    LAYER,
    MIX_CONV,
    MIX_GATE,
    MIX_NORM,
    MIX_OUTPUT,
    MIX_RATE,
    MIX_STEP,
    MIXED,
    OUTPUT_GATE,
    SHARED,
    STEP_BIAS,
    Names,
    Q,
    Rows,
    conv_rows,
    negative_exp,
)
from ..reading import Sizes, layer_types, sizes

NET = f"{LAYER}.linear_attn"
TYPES = ("full_attention", "linear_attention")


def qwen3_5(keys: ConfigKeys) -> DecoderSpec:
    """Qwen3.5 and 3.6, dense."""
    found, inner = _sizes(keys, num_kv_heads=4), feed(keys)
    return _decoder(keys, found, [inner] * found.num_layers)


def qwen3_5_moe(keys: ConfigKeys) -> DecoderSpec:
    """Qwen3.5 and 3.6 with experts, whose weights always add up to 1."""
    found = _sizes(keys, num_kv_heads=2)
    moe = _mixture(keys, RouterSpec(norm_top_k=True), num_experts=256, top_k=8)
    return _decoder(keys, found, [moe] * found.num_layers)


def qwen3_next(keys: ConfigKeys) -> DecoderSpec:
    """Qwen3-Next: the weights of experts add up to 1, unless `norm_topk_prob` is false."""
    found, every = _sizes(keys, num_kv_heads=2), keys.count("decoder_sparse_step", 1)
    dense, router = (
        listed_layers(keys, "mlp_only_layers", found.num_layers),
        RouterSpec(norm_top_k=keys.flag("norm_topk_prob", True)),
    )
    has_any = under_either_name(keys, "num_experts", "num_local_experts").count("num_experts", 512, least=0) > 0
    has = [has_any and (layer + 1) % every == 0 and layer not in dense for layer in range(found.num_layers)]
    moe = _mixture(keys, router, num_experts=512, top_k=10) if any(has) else None
    inner = None if all(has) else feed(keys, inner=5632)
    return _decoder(keys, found, [one for one in (moe if does else inner for does in has) if one is not None])


def _mixture(keys: ConfigKeys, router: RouterSpec, num_experts: int, top_k: int) -> MoeSpec:
    keys = under_either_name(keys, "num_experts", "num_local_experts")
    shared = shared_feed(keys, keys.count("shared_expert_intermediate_size", 512, least=0))
    has_gate = shared is not None
    return mixture(
        keys, router, num_experts=num_experts, top_k=top_k, inner=512, shared=shared, has_shared_gate=has_gate
    )


def _sizes(keys: ConfigKeys, num_kv_heads: int) -> Sizes:
    return sizes(keys, num_heads=16, num_kv_heads=num_kv_heads, head_dim=256, max_position=32_768)


def _decoder(keys: ConfigKeys, found: Sizes, feeds: Sequence[FeedSpec | MoeSpec]) -> DecoderSpec:
    """`feeds`: of each layer."""
    if keys.values.get("hidden_act", "silu") != "silu":
        keys.refuse("hidden_act", "another activation than 'silu' is not supported beside a gated delta net")
    types = layer_types(keys, found.num_layers, TYPES)
    if types is None:
        every = keys.count("full_attention_interval", 4)
        types = [TYPES[(layer + 1) % every > 0] for layer in range(found.num_layers)]
    norm = rms_norm(keys, weight="one_plus", is_exact=True)
    attends = attention(found, has_output_gate=True, qk_norm=QkNorm(norm=norm), **biases(keys))
    layers = _layers(types, attends, _net(keys), feeds, pre_mixer=norm, pre_feed=norm)
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, share=0.25),))


def _layers(
    types: Iterable[str],
    attends: AttentionSpec,
    net: RecurrentSpec,
    feeds: Iterable[FeedSpec | MoeSpec],
    **norms: NormSpec,
) -> list[LayerSpec]:
    mixers = {"full_attention": attends, "linear_attention": net}
    return [
        LayerSpec(mixer=mixers[kind], feed=inner, **norms)  # type: ignore[arg-type]
        for kind, inner in zip(types, feeds, strict=True)
    ]


def _net(keys: ConfigKeys) -> RecurrentSpec:
    """The gated delta net."""
    num_keys, num_values = keys.count("linear_num_key_heads", 16), keys.count("linear_num_value_heads", 32)
    if num_values % num_keys:
        keys.fail("linear_num_key_heads", f"must divide linear_num_value_heads ({num_values}), but is {num_keys}")
    return RecurrentSpec(
        kind="gdn",
        num_key_heads=num_keys,
        num_value_heads=num_values,
        key_dim=keys.count("linear_key_head_dim", 128),
        value_dim=keys.count("linear_value_head_dim", 128),
        conv_width=keys.count("linear_conv_kernel_dim", 4, least=2),
        norm=rms_norm(keys),
    )


# -- where the tensors lie


def qwen3_5_names(spec: DecoderSpec) -> Names:
    """A matrix each for what the convolution reads, gate, rates and steps."""
    projections = {MIXED: "qkv", MIX_GATE: "z", MIX_RATE: "b", MIX_STEP: "a"}
    return {**_names(spec), **{stem: f"{NET}.in_proj_{name}" for stem, name in projections.items()}}


def qwen3_5_moe_names(spec: DecoderSpec) -> Names:
    """As `qwen3_5_names`; experts are stacked."""
    experts = f"{LAYER}.mlp.experts"
    stacks = stacked_names(spec.mixtures[0], f"{experts}.gate_up_proj", f"{experts}.down_proj", suffix="")
    return {**qwen3_5_names(spec), **stacks}


def qwen3_next_names(spec: DecoderSpec) -> Names:
    """One matrix holds for each key head its query, its key, then values and gates of its value heads."""
    net = _net_of(spec)
    if net is None:
        return _names(spec)
    keys, ratio = net.num_key_heads, net.num_value_heads // net.num_key_heads
    inner = ratio * net.value_dim
    head = np.arange(keys * 2 * (net.key_dim + inner)).reshape(keys, -1)
    q, k, v, z = np.split(head, np.cumsum([net.key_dim, net.key_dim, inner]), 1)
    mixed = np.concatenate([part.reshape(-1) for part in (q, k, v)])
    rate, step = np.split(np.arange(2 * net.num_value_heads).reshape(keys, -1), 2, 1)
    return {
        **_names(spec),
        MIXED: Rows(f"{NET}.in_proj_qkvz", mixed),
        MIX_GATE: Rows(f"{NET}.in_proj_qkvz", z.reshape(-1)),
        MIX_RATE: Rows(f"{NET}.in_proj_ba", rate.reshape(-1)),
        MIX_STEP: Rows(f"{NET}.in_proj_ba", step.reshape(-1)),
    }


def _names(spec: DecoderSpec) -> dict[str, str | Rows]:
    """Queries and gates are one matrix, by heads."""
    names: dict[str, str | Rows] = {stem: stem.replace("shared_experts", "shared_expert") for stem in SHARED}
    if spec.attentions:
        rows = np.arange(2 * spec.num_heads * spec.head_dim).reshape(spec.num_heads, 2, spec.head_dim)
        names |= {Q: Rows(Q, rows[:, 0].reshape(-1)), OUTPUT_GATE: Rows(Q, rows[:, 1].reshape(-1))}
    net = _net_of(spec)
    if net is None:
        return names
    return {
        **names,
        f"{MIX_CONV}.weight": conv_rows(net, f"{NET}.conv1d"),
        DECAY: Rows(f"{NET}.A_log", apply=negative_exp),
        STEP_BIAS: f"{NET}.dt_bias",
        MIX_NORM: f"{NET}.norm",
        MIX_OUTPUT: f"{NET}.out_proj",
    }


def _net_of(spec: DecoderSpec) -> RecurrentSpec | None:
    return next(iter(spec.recurrent_layers.values()), None)


FAMILIES = {
    "qwen3_5_moe_text": Family(spec=qwen3_5_moe, names=qwen3_5_moe_names),
    "qwen3_5_text": Family(spec=qwen3_5, names=qwen3_5_names),
    "qwen3_next": Family(spec=qwen3_next, names=qwen3_next_names),
}

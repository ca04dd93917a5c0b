"""Qwen3-Next and Qwen3.5/3.6: three layers with a gated delta net to one with attention, whose output has a gate.

All norms are stored as w - 1 but that of the delta net's output. A quarter of each head rotates. The text half of the
models that also read images is served; their further tokens at once (`mtp`) are not used.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..config_keys import ConfigKeys
from ..spec import AttentionSpec, DecoderSpec, FeedSpec, LayerSpec, QkNorm, RecurrentSpec
from .building import Family, attention, biases, decoder, feed, rms_norm, rope
from .names import (
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
    STEP_BIAS,
    Names,
    Q,
    Rows,
    conv_rows,
    negative_exp,
)
from .reading import Sizes, layer_types, sizes

NET = f"{LAYER}.linear_attn"
TYPES = ("full_attention", "linear_attention")


def qwen3_5(keys: ConfigKeys) -> DecoderSpec:
    """Qwen3.5 and 3.6, dense."""
    return _decoder(keys, _sizes(keys, num_kv_heads=4))


def qwen3_next(keys: ConfigKeys) -> DecoderSpec:
    """Qwen3-Next, of which layers without experts only."""
    found = _sizes(keys, num_kv_heads=2)
    dense, every = keys.values.get("mlp_only_layers") or [], keys.count("decoder_sparse_step", 1)
    has_experts = keys.count("num_experts", 512, least=0) > 0
    if has_experts and any((layer + 1) % every == 0 and layer not in dense for layer in range(found.num_layers)):
        keys.refuse("num_experts", "experts beside recurrent layers are not supported; 0 would be")
    return _decoder(keys, found)


def _sizes(keys: ConfigKeys, num_kv_heads: int) -> Sizes:
    return sizes(keys, num_heads=16, num_kv_heads=num_kv_heads, head_dim=256, max_position=32_768)


def _decoder(keys: ConfigKeys, found: Sizes) -> DecoderSpec:
    inner = feed(keys)
    if inner.activation != "silu":
        keys.refuse("hidden_act", "another activation than 'silu' is not supported beside a gated delta net")
    types = layer_types(keys, found.num_layers, TYPES)
    if types is None:
        every = keys.count("full_attention_interval", 4)
        types = [TYPES[(layer + 1) % every > 0] for layer in range(found.num_layers)]
    norm = rms_norm(keys, weight="one_plus", is_exact=True)
    attends = attention(found, has_output_gate=True, qk_norm=QkNorm(norm=norm), **biases(keys))
    layers = _layers(types, attends, _net(keys), inner, pre_mixer=norm, pre_feed=norm)
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found, share=0.25),))


def _layers(
    types: Iterable[str], attends: AttentionSpec, net: RecurrentSpec, inner: FeedSpec, **norms: object
) -> list[LayerSpec]:
    mixers = {"full_attention": attends, "linear_attention": net}
    return [LayerSpec(mixer=mixers[kind], feed=inner, **norms) for kind in types]  # type: ignore[arg-type]


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
    names: dict[str, str | Rows] = {}
    if spec.attentions:
        rows = np.arange(2 * spec.num_heads * spec.head_dim).reshape(spec.num_heads, 2, spec.head_dim)
        names = {Q: Rows(Q, rows[:, 0].reshape(-1)), OUTPUT_GATE: Rows(Q, rows[:, 1].reshape(-1))}
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
    "qwen3_5_text": Family(spec=qwen3_5, names=qwen3_5_names),
    "qwen3_next": Family(spec=qwen3_next, names=qwen3_next_names),
}

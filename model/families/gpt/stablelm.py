"""StableLM, StarCoder 2, Nemotron and Persimmon: Llama's blocks with LayerNorm, three of them without a gate."""

from __future__ import annotations

from ...config_keys import ConfigKeys
from ...spec import DecoderSpec, LayerSpec, QkNorm
from ..building import Family, attention, decoder, feed, layer_norm, rope
from ..names import DOWN, FINAL_NORM, K_NORM, LAYER, OUTPUT, Q_NORM, UP, K, Names, Q, Rows, V, fused_qkv, split
from ..reading import sizes, windows


def stablelm(keys: ConfigKeys) -> DecoderSpec:
    """StableLM: a quarter of each head rotates; optionally parallel, and a norm for each head of q and k."""
    found, norm = sizes(keys, num_kv_heads=32, max_position=4096), layer_norm(keys)
    is_parallel = keys.flag("use_parallel_residual", False)
    qk_norm = QkNorm(norm=layer_norm(keys, has_bias=False), has_weight_per_head=True)
    mixer = attention(
        found,
        has_qkv_bias=keys.flag("use_qkv_bias", False),
        qk_norm=qk_norm if keys.flag("qk_layernorm", False) else None,
    )
    layer = LayerSpec(
        mixer=mixer,
        feed=feed(keys),
        pre_mixer=norm,
        pre_feed=None if is_parallel else norm,
        is_parallel=is_parallel,
    )
    ropes = (rope(keys, found, share=0.25),)
    return decoder(keys, found, [layer] * found.num_layers, final_norm=norm, ropes=ropes)


def starcoder2(keys: ConfigKeys) -> DecoderSpec:
    """StarCoder 2: biases everywhere, a window if the file has one."""
    found, norm = sizes(keys, num_kv_heads=2, max_position=4096), layer_norm(keys, "norm_epsilon")
    has_bias, has_window = keys.flag("use_bias", True), keys.values.get("sliding_window") is not None
    inner = feed(keys, activation="gelu_pytorch_tanh", is_gated=False, has_bias=has_bias)
    layers = (
        LayerSpec(
            mixer=attention(found, window=window, has_qkv_bias=has_bias, has_output_bias=has_bias),
            feed=inner,
            pre_mixer=norm,
            pre_feed=norm,
        )
        for window in windows(keys, found.num_layers, 4096, is_on=has_window)
    )
    return decoder(keys, found, layers, final_norm=norm, ropes=(rope(keys, found),), is_tied=True)


def nemotron(keys: ConfigKeys) -> DecoderSpec:
    """Nemotron: norms stored as w - 1, squared ReLU; half of each head rotates."""
    found, norm = sizes(keys, max_position=4096), layer_norm(keys, "norm_eps", weight="one_plus")
    has_bias = keys.flag("attention_bias", False)
    layer = LayerSpec(
        mixer=attention(found, has_qkv_bias=has_bias, has_output_bias=has_bias),
        feed=feed(keys, activation="relu2", is_gated=False, has_bias=keys.flag("mlp_bias", False)),
        pre_mixer=norm,
        pre_feed=norm,
    )
    ropes = (rope(keys, found, share=0.5),)
    return decoder(keys, found, [layer] * found.num_layers, final_norm=norm, ropes=ropes)


def persimmon(keys: ConfigKeys) -> DecoderSpec:
    """Persimmon: squared ReLU, a norm of q and k; half of each head rotates."""
    found, norm = sizes(keys, max_position=16_384), layer_norm(keys)
    qk_norm = QkNorm(norm=norm) if keys.flag("qk_layernorm", True) else None
    layer = LayerSpec(
        mixer=attention(found, has_qkv_bias=True, has_output_bias=True, qk_norm=qk_norm),
        feed=feed(keys, activation="relu2", is_gated=False, has_bias=True),
        pre_mixer=norm,
        pre_feed=norm,
    )
    ropes = (rope(keys, found, share=0.5),)
    return decoder(keys, found, [layer] * found.num_layers, final_norm=norm, ropes=ropes)


def stablelm_names(spec: DecoderSpec) -> Names:
    """Llama's names, but each head's norm is a tensor of its own."""
    if spec.attention.qk_norm is None:
        return {}
    counts = {Q_NORM: ("q", spec.num_heads), K_NORM: ("k", spec.num_kv_heads)}
    head = slice(0, spec.head_dim)
    return {
        stem: tuple(Rows(f"{LAYER}.self_attn.{name}_layernorm.norms.{index}", head) for index in range(count))
        for stem, (name, count) in counts.items()
    }


def starcoder2_names(spec: DecoderSpec) -> Names:
    """Llama's names, but for the feed."""
    return {UP: f"{LAYER}.mlp.c_fc", DOWN: f"{LAYER}.mlp.c_proj"}


def persimmon_names(spec: DecoderSpec) -> Names:
    """Fused rows by head."""
    return {
        **split(f"{LAYER}.self_attn.query_key_value", (Q, K, V), fused_qkv(spec.attention, is_by_group=True)),
        OUTPUT: f"{LAYER}.self_attn.dense",
        Q_NORM: f"{LAYER}.self_attn.q_layernorm",
        K_NORM: f"{LAYER}.self_attn.k_layernorm",
        UP: f"{LAYER}.mlp.dense_h_to_4h",
        DOWN: f"{LAYER}.mlp.dense_4h_to_h",
        FINAL_NORM: "model.final_layernorm",
    }


FAMILIES = {
    "stablelm": Family(spec=stablelm, names=stablelm_names),
    "starcoder2": Family(spec=starcoder2, names=starcoder2_names),
    "nemotron": Family(spec=nemotron),
    "persimmon": Family(spec=persimmon, names=persimmon_names),
}

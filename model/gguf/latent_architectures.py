"""The architectures of GGUF files with latents (DeepSeek V2, V3, GLM-4.7 Flash) and of layers of two sizes (Gemma 4).

A file of latents holds, for each head, what makes keys of them (transposed) and what makes values, instead of the one
matrix `kv_b_proj`; older files hold that. A file of Gemma 4 tells which part of a head rotates by factors that stop the
frequencies of the others.
"""

from __future__ import annotations

from .expert_architectures import EXPERT_NAMES, experts
from .keys import Config, Keys

KEYS_UP, VALUES_UP = "attn_k_b", "attn_v_b"  # [heads, rank, rows] and [heads, rows, rank]
BARE = ("layer_output_scale", "ffn_gate_inp.scale", "ffn_down_exps.scale")  # elsewhere without a suffix
LATENT_NAMES = {
    **EXPERT_NAMES,
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    KEYS_UP: "self_attn.k_b_proj",
    VALUES_UP: "self_attn.v_b_proj",
}
GEMMA4_NAMES = {
    **EXPERT_NAMES,
    "layer_output_scale": "layer_scalar",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
NO_FACTOR = 1e20  # a frequency that is divided by more does not turn


def deepseek2(keys: Keys, rope: Config) -> Config:
    """V3 if experts are chosen by sigmoids, else V2. `rope`: the rotation of `architectures.rope_of`.

    Of a file with both ranks of latents the heads of keys and values are counted as one. Older files do not say how
    experts are chosen; V3 alone has a bias for it.
    """
    rotated = keys.need("rope.dimension_count")
    key = keys.get("attention.key_length_mla") or keys.need("attention.key_length")
    value = keys.get("attention.value_length_mla") or keys.need("attention.value_length")
    config: Config = {
        "num_key_value_heads": keys.need("attention.head_count"),
        "head_dim": rotated,
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "kv_lora_rank": keys.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_parameters": _rope(keys, rope),
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "n_shared_experts": keys.get("expert_shared_count", 0),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "n_group": keys.get("expert_group_count", 1) or 1,
        "topk_group": keys.get("expert_group_used_count", 1) or 1,
    }
    has_bias = any(".exp_probs_b" in name for name in keys.tensors)
    if keys.get("expert_gating_func", 2 if has_bias else 1) == 2:
        return {**config, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return {**config, "topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy"}


def _rope(keys: Keys, rope: Config) -> Config:
    """All of the rotated part rotates. The file holds a tenth of the sharpness of scores."""
    found = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    sharpness = round(10 * keys.number("rope.scaling.yarn_log_multiplier", 0.0), 6)
    return {**found, "mscale": sharpness, "mscale_all_dim": sharpness} if sharpness else found


def gemma4(keys: Keys) -> Config:
    """Layers without a window have heads of their own size, and perhaps no projection for values."""
    windows = [bool(kind) for kind in keys.need("attention.sliding_window_pattern")]
    heads, inner = keys.need("attention.head_count_kv"), keys.need("feed_forward_length")
    heads = heads if isinstance(heads, list) else [heads] * len(windows)
    inner = inner if isinstance(inner, list) else [inner]
    if not len(windows) == len(heads) == keys.need("block_count"):
        raise ValueError(f"{keys.name}.block_count: {len(windows)} windows and {len(heads)} numbers of heads")
    full = [layer for layer, has_window in enumerate(windows) if not has_window]
    size, of_windows = keys.need("attention.key_length"), keys.need("attention.key_length_swa")
    config: Config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": of_windows,
        "num_key_value_heads": next((heads[i] for i, has_window in enumerate(windows) if has_window), heads[0]),
        "per_layer_config": {str(layer): {"head_dim": size, "num_key_value_heads": heads[layer]} for layer in full},
        "layer_types": ["sliding_attention" if has_window else "full_attention" for has_window in windows],
        "sliding_window": keys.need("attention.sliding_window"),
        "attention_k_eq_v": bool(full) and f"blk.{full[0]}.attn_v.weight" not in keys.tensors,
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", 0),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] == 2 * inner[0],
        "hidden_size_per_layer_input": keys.get("embedding_length_per_layer_input", 0),
        "rope_parameters": {"full_attention": _stopped(keys), "sliding_attention": _of_windows(keys, of_windows)},
    }
    cap = keys.get("final_logit_softcapping")
    config |= {} if cap is None else {"final_logit_softcapping": float(cap)}
    if not keys.get("expert_count", 0):
        return config
    found = experts(keys)
    return {
        **config,
        "enable_moe_block": True,
        "num_experts": found["num_experts"],
        "top_k_experts": found["num_experts_per_tok"],
        "moe_intermediate_size": found["moe_intermediate_size"],
    }


def _stopped(keys: Keys) -> Config:
    """The rotation without a window, of which a part stands still."""
    if (factors := keys.factors.get("rope_freqs")) is None:
        raise ValueError("tensor rope_freqs.weight is missing, which says what part of a head rotates")
    share = float((factors < NO_FACTOR).mean())
    theta = keys.number("rope.freq_base", 1e6)
    return {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": share}


def _of_windows(keys: Keys, size: int) -> Config:
    rotated = keys.get("rope.dimension_count_swa", size)
    part = {} if rotated == size else {"partial_rotary_factor": rotated / size}
    return {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", 1e4), **part}

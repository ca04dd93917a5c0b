"""The architectures of GGUF files with experts: Mixtral, Qwen-MoE, OLMoE, gpt-oss, Granite MoE, GLM-4.5, Dots, Ernie.

A file stacks the experts of a layer in three tensors, [E, rows, columns]; each expert's part has its canonical name.
Whether chosen weights are divided by their sum is in few files: llama.cpp knows it by the architecture.
"""

from __future__ import annotations

from .keys import Config, Keys

EXPERT_NAMES = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_gate_up_exps": "mlp.experts.*.gate_up_proj",  # the rows of both, one behind the other
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "attn_sinks": "self_attn.sinks",
}
BARE = ("exp_probs_b", "attn_sinks")  # whose names have no .weight or .bias behind them elsewhere
MIXTRAL_NAMES = EXPERT_NAMES | {"ffn_gate_inp": "block_sparse_moe.gate"}
GRANITE_NAMES = EXPERT_NAMES | {"ffn_gate_inp": "block_sparse_moe.router.layer"}
GPT_OSS_NAMES = EXPERT_NAMES | {"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm"}
GLM_NAMES = EXPERT_NAMES | {"post_attention_norm": "post_attention_layernorm"}


def experts(keys: Keys) -> Config:
    """How many there are; of the other sizes what the file has."""
    found = {
        "num_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.get("expert_shared_feed_forward_length"),
    }
    return {"hidden_act": "silu", **{name: value for name, value in found.items() if value is not None}}


def mixtral(keys: Keys) -> Config:
    """Llama's architecture, if it has experts."""
    return {
        **experts(keys),
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "sliding_window": None,
    }


def qwen2_moe(keys: Keys) -> Config:
    """Weights as they are, unless the file says otherwise."""
    return {**experts(keys), "norm_topk_prob": bool(keys.get("expert_weights_norm", False)), "qkv_bias": True}


def qwen3_moe(keys: Keys) -> Config:
    """Weights that add up to 1, unless the file says otherwise."""
    return {**experts(keys), "norm_topk_prob": bool(keys.get("expert_weights_norm", True))}


def olmoe(keys: Keys) -> Config:
    """As `qwen2_moe`."""
    return {**experts(keys), "norm_topk_prob": bool(keys.get("expert_weights_norm", False))}


def gpt_oss(keys: Keys) -> Config:
    """Every other layer has the window, from the first on."""
    found = experts(keys)
    return {
        **found,
        "intermediate_size": found.get("moe_intermediate_size") or keys.need("feed_forward_length"),
        "sliding_window": keys.get("attention.sliding_window", 128),
    }


def granite_moe(keys: Keys) -> Config:
    """With a network for all tokens, or without it (0)."""
    return {**experts(keys), "shared_intermediate_size": keys.get("expert_shared_feed_forward_length", 0)}


def glm4_moe(keys: Keys) -> Config:
    """Chosen by sigmoid and bias."""
    return {
        **experts(keys),
        "n_shared_experts": keys.get("expert_shared_count", 1),
        "first_k_dense_replace": keys.get("leading_dense_block_count", 1),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", True)),
        "n_group": keys.get("expert_group_count", 1) or 1,
        "topk_group": keys.get("expert_group_used_count", 1) or 1,
    }


def dots1(keys: Keys) -> Config:
    """As `glm4_moe`, without windows."""
    return {**glm4_moe(keys), "sliding_window": None}


def ernie_moe(keys: Keys) -> Config:
    """Ernie 4.5. The size that the file gives of the shared network is not that of its tensors."""
    shared = keys.get("expert_shared_count", 0)
    return {
        **experts(keys),
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": keys.get("leading_dense_block_count", 0),
        "moe_layer_interval": keys.get("interleave_moe_layer_step", 1),
        "moe_layer_end_index": -1,
        "use_bias": "blk.0.attn_q.bias" in keys.tensors,
        "attention_bias": False,
    }

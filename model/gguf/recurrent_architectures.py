"""The architectures of GGUF files with recurrent layers: LFM2, Granite 4 H, Bamba, Nemotron-H, Qwen3-Next and Qwen3.5.

Which layers are recurrent is told by heads of keys that are 0, or by an interval. Most tensors of recurrent layers have
their canonical names here (`families/names.py`), as a file holds them in that form: decays instead of their logarithms,
convolutions without an axis of 1, queries, keys and values of all heads one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .expert_architectures import EXPERT_NAMES, experts
from .keys import Config, Keys

Index = NDArray[np.int64]
FLAT = ("ssm_a", "ssm_d", "ssm_norm", "exp_probs_b", "attn_q_norm", "attn_k_norm")  # perhaps with an axis of groups
BARE = ("ssm_a", "ssm_d", "ssm_dt")  # whose canonical names have no suffix

RECURRENT_NAMES = {
    "attn_qkv": "recurrent.in_proj",
    "attn_gate": "recurrent.gate_proj",
    "ssm_alpha": "recurrent.step_proj",
    "ssm_beta": "recurrent.rate_proj",
    "ssm_conv1d": "recurrent.conv",
    "ssm_a": "recurrent.decay",
    "ssm_dt": "recurrent.step_offset",
    "ssm_d": "recurrent.skip",
    "ssm_norm": "recurrent.norm",
    "ssm_out": "recurrent.out_proj",
    "shortconv.in_proj": "recurrent.in_proj",
    "shortconv.conv": "recurrent.conv",
    "shortconv.out_proj": "recurrent.out_proj",
}
QWEN_NAMES = {
    **EXPERT_NAMES,
    **RECURRENT_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "ssm_in": "linear_attn.in_proj_qkvz",  # of older files
    "ssm_ba": "linear_attn.in_proj_ba",
}
LFM2_NAMES = {
    **EXPERT_NAMES,
    **RECURRENT_NAMES,
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b": "feed_forward.expert_bias",
}
GRANITE_H_NAMES = {
    **EXPERT_NAMES,
    **RECURRENT_NAMES,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ssm_in": "mamba.in_proj",
}
NEMOTRON_H_NAMES = {
    **EXPERT_NAMES,
    **RECURRENT_NAMES,
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "attn_norm": "backbone.layers.{}.norm",
    **{f"attn_{name}": f"backbone.layers.{{}}.mixer.{name[0]}_proj" for name in ("q", "k", "v", "output")},
    "ffn_up": "backbone.layers.{}.mixer.up_proj",
    "ffn_down": "backbone.layers.{}.mixer.down_proj",
    "ffn_gate_inp": "backbone.layers.{}.mixer.gate",
    "exp_probs_b": "backbone.layers.{}.mixer.gate.e_score_correction_bias",
    "ssm_in": "backbone.layers.{}.mixer.in_proj",
}


class Order(NamedTuple):
    """The rows and columns of a stored matrix in the order of a Hugging Face file; None: as they are."""

    rows: Index | None = None
    columns: Index | None = None


def lfm2(keys: Keys) -> Config:
    """Short convolutions where no head has keys."""
    types = _types(keys, "conv")
    first = types.index("conv") if "conv" in types else 0
    return {
        "layer_types": types,
        "conv_L_cache": keys.need("shortconv.l_cache"),
        "conv_bias": f"blk.{first}.shortconv.in_proj.bias" in keys.tensors,
        "block_auto_adjust_ff_dim": False,
        "tie_embedding": "output.weight" not in keys.tensors,
    }


def lfm2_moe(keys: Keys) -> Config:
    """Experts behind the first layers."""
    return {
        **lfm2(keys),
        **experts(keys),
        "num_dense_layers": keys.get("leading_dense_block_count", 0),
        "use_expert_bias": any(".exp_probs_b" in name for name in keys.tensors),
    }


def granite_hybrid(keys: Keys) -> Config:
    """Granite 4 H, which has no positions; and Bamba, whose feed is as one that Granite's experts share."""
    found = experts(keys) if keys.get("expert_count") else {"num_local_experts": 0}
    inner = keys.get("expert_shared_feed_forward_length") or keys.need("feed_forward_length")
    return {
        **found,
        **_mamba2(keys, "mamba_"),
        "layer_types": _types(keys, "linear_attention"),
        "shared_intermediate_size": inner,
        "position_embedding_type": "rope" if keys.get("rope.scaling.finetuned", False) else "nope",
    }


def nemotron_h(keys: Keys) -> Config:
    """Each layer is one of attention, a feed or experts, and Mamba-2."""
    attends, inner = _per_layer(keys, "attention.head_count_kv"), _per_layer(keys, "feed_forward_length")
    feed = "moe" if keys.get("expert_count") else "mlp"
    kinds = zip(attends, inner, strict=True)
    found = _mamba2(keys, "")
    config: Config = {
        "layers_block_type": [
            "full_attention" if heads else feed if size else "linear_attention" for heads, size in kinds
        ],
        "mamba_num_heads": found["n_heads"],
        "mamba_head_dim": found["d_head"],
        "n_groups": found["n_groups"],
        "ssm_state_size": found["d_state"],
        "conv_kernel": found["d_conv"],
        "use_conv_bias": found["conv_bias"],
        "use_bias": found["proj_bias"],
        "mlp_hidden_act": "relu2",
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in keys.tensors),
    }
    if feed == "mlp":
        return config
    return {
        **config,
        "n_routed_experts": keys.need("expert_count"),
        "num_experts_per_tok": keys.need("expert_used_count"),
        "moe_intermediate_size": keys.need("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.need("expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(keys.get("expert_weights_norm", True)),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "n_group": keys.get("expert_group_count", 1) or 1,
        "topk_group": keys.get("expert_group_used_count", 1) or 1,
        **({} if (latent := keys.get("moe_latent_size")) is None else {"moe_latent_size": latent}),
    }


def qwen_next(keys: Keys) -> Config:
    """A gated delta net in all layers but each n-th."""
    heads = keys.need("ssm.time_step_rank")
    return {
        "hidden_act": "silu",
        "linear_conv_kernel_dim": keys.need("ssm.conv_kernel"),
        "linear_key_head_dim": keys.need("ssm.state_size"),
        "linear_value_head_dim": keys.need("ssm.inner_size") // heads,
        "linear_num_key_heads": keys.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "full_attention_interval": keys.get("full_attention_interval", 4),
    }


def qwen_next_moe(keys: Keys) -> Config:
    """The same with experts, whose weights add up to 1."""
    return {**qwen_next(keys), **experts(keys), "norm_topk_prob": bool(keys.get("expert_weights_norm", True))}


def tiled_values(keys: Keys) -> Mapping[str, Order]:
    """Of Qwen3.5, whose heads of values are stored by their number within a head of keys first: 0 of each, 1 of each.

    In Hugging Face's order those of one head of keys lie together.
    """
    found = qwen_next(keys)
    num_keys, num_values = found["linear_num_key_heads"], found["linear_num_value_heads"]
    if num_keys < 1 or num_values % num_keys:
        raise ValueError(f"{keys.name}.ssm.group_count = {num_keys}: must divide ssm.time_step_rank = {num_values}")
    if num_values == num_keys:
        return {}
    heads = np.arange(num_values).reshape(-1, num_keys).T.reshape(-1)
    size, before = found["linear_value_head_dim"], 2 * num_keys * found["linear_key_head_dim"]
    values = (heads[:, None] * size + np.arange(size)).reshape(-1)
    mixed = np.concatenate([np.arange(before), before + values])
    return {
        "attn_qkv": Order(mixed),
        "ssm_conv1d": Order(mixed),
        "attn_gate": Order(values),
        **{name: Order(heads) for name in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")},
        "ssm_out": Order(columns=values),
    }


def _mamba2(keys: Keys, prefix: str) -> Config:
    """The sizes of Mamba-2 layers, under names that begin with `prefix`."""
    heads, inner = keys.need("ssm.time_step_rank"), keys.need("ssm.inner_size")
    found = {
        "n_heads": heads,
        "d_head": inner // heads,
        "n_groups": keys.need("ssm.group_count"),
        "d_state": keys.need("ssm.state_size"),
        "d_conv": keys.need("ssm.conv_kernel"),
        "expand": inner // keys.need("embedding_length"),
        "conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.tensors),
        "proj_bias": any(name.endswith("ssm_in.bias") for name in keys.tensors),
    }
    return {prefix + name: value for name, value in found.items()}


def _types(keys: Keys, other: str) -> list[str]:
    """The type of each layer: attention where heads have keys."""
    return ["full_attention" if heads else other for heads in _per_layer(keys, "attention.head_count_kv")]


def _per_layer(keys: Keys, key: str) -> list[int]:
    """The value of each layer, of those that generate; a single number is of all."""
    count = keys.need("block_count") - keys.get("nextn_predict_layers", 0)
    value = keys.need(key)
    values = value if isinstance(value, list) else [value] * count
    if len(values) < count:
        raise ValueError(f"{keys.name}.{key} holds {len(values)} numbers for {count} layers")
    return values[:count]

"""Tiny GGUF files of models with latents, and of layers of two sizes: see `made_recurrent.py`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.families.row import Row, layer_types, row
from tests.model.gguf.made_recurrent import ENDINGS, PARTS, Numbers, names_of, write_both

YARN = {
    **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64},
    **{"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.7},
}
LATENT: dict[str, Any] = {
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 12},
    **{"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_shared_experts": 2, "routed_scaling_factor": 1.5},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_routed_experts": 8},
}
SIX: dict[str, Any] = {
    **{"num_hidden_layers": 6, "head_dim": 8, "sliding_window": 16, "layer_types": layer_types("ssfssf")},
    "per_layer_config": {
        2: {"head_dim": 16, "num_key_value_heads": 1},
        5: {"head_dim": 16, "num_key_value_heads": 1},
    },
}
INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
DENSE: dict[str, Any] = {
    **{**SIX, "attention_k_eq_v": True},
    **{"hidden_size_per_layer_input": 0, "final_logit_softcapping": 8.0},
}
MADE: dict[str, Row] = {
    "deepseek2": row("deepseek2", "deepseek_v2", topk_method="greedy", rope_parameters=YARN, **LATENT),
    "deepseek2-groups": row(
        "deepseek2-groups",
        "deepseek_v2",
        **{"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        **{**LATENT, "q_lora_rank": None},
    ),
    "deepseek2-v3": row(
        "deepseek2-v3", "deepseek_v3", **{"n_group": 4, "topk_group": 2, "norm_topk_prob": True}, **LATENT
    ),
    "gemma4": row("gemma4", "gemma4_text", num_kv_shared_layers=3, use_double_wide_mlp=True, **SIX, **INPUTS),
    "gemma4-dense": row("gemma4-dense", "gemma4_text", **DENSE),
    "gemma4-experts": row(
        "gemma4-experts",
        "gemma4_text",
        **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 16},
        **DENSE,
    ),
}


def write_gguf(name: str, root: Path, packed: str = "F32") -> tuple[Path, Path]:
    """As `made_recurrent.write_gguf`, of a row of `MADE` here."""
    return write_both(name, MADE[name], root, packed, _converted, _write_keys)


def _converted(architecture: str, tensors: dict[str, Numbers], config: Any) -> Iterator[tuple[str, Numbers]]:
    names = names_of(architecture, config)
    experts: dict[str, dict[int, Numbers]] = defaultdict(dict)  # name of a stack -> expert -> its part
    for stored, numbers in tensors.items():
        layer = re.search(r"layers\.(\d+)\.", stored)
        prefix = f"blk.{layer[1]}." if layer else ""
        if match := re.fullmatch(r".*\.experts\.(\d+)\.(\w+)\.weight", stored):
            experts[f"{prefix}ffn_{PARTS[match[2]]}_exps.weight"][int(match[1])] = numbers
        elif stored.endswith("kv_b_proj.weight"):
            nope, heads = config.qk_nope_head_dim, config.num_attention_heads
            keys, values = np.split(numbers.reshape(heads, -1, numbers.shape[1]), [nope], axis=1)
            yield f"{prefix}attn_k_b.weight", keys.swapaxes(1, 2)
            yield f"{prefix}attn_v_b.weight", values
        elif stored.endswith("router.scale"):
            yield f"{prefix}ffn_gate_inp.scale", numbers
        elif stored.endswith("per_expert_scale"):
            yield f"{prefix}ffn_down_exps.scale", numbers
        else:
            yield _name(stored, names), numbers
    for written, parts in experts.items():
        yield written, np.stack([parts[expert] for expert in range(len(parts))])
    if architecture == "gemma4":
        half = 8
        turned = int(_full_rope(config)["partial_rotary_factor"] * half)
        yield "rope_freqs.weight", np.array([1.0] * turned + [1e30] * (half - turned))


def _name(stored: str, names: Any) -> str:
    end = next((end for end in ENDINGS if stored.endswith(end)), "")
    stored = stored.removesuffix(end) + ENDINGS[end] if end else stored
    if stored.endswith("layer_scalar") or re.search(r"experts\.\w+$", stored):
        stored += ".weight"
    written: str | None = names.get_name(stored, try_suffixes=(".weight", ".bias"))
    assert written is not None, f"no name for {stored}"
    return written


def _full_rope(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = config.rope_parameters["full_attention"]
    return found


def _write_keys(writer: Any, architecture: str, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    (_write_gemma4 if architecture == "gemma4" else _write_deepseek)(writer, config)


def _write_deepseek(writer: Any, config: Any) -> None:
    rope = config.rope_parameters
    writer.add_head_count_kv(1)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    if getattr(config, "n_group", None):
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    is_v3 = config.model_type == "deepseek_v3"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if is_v3 else gguf.ExpertGatingFuncType.SOFTMAX)
    if is_v3:
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _write_gemma4(writer: Any, config: Any) -> None:
    has_window = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window(config.sliding_window)
    writer.add_sliding_window_pattern(has_window)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_key_length_swa(8)
    writer.add_value_length_swa(8)
    writer.add_head_count_kv([2 if window else 1 for window in has_window])
    inner, first = config.intermediate_size, config.num_hidden_layers - config.num_kv_shared_layers
    is_double = config.use_double_wide_mlp
    writer.add_feed_forward_length(
        [inner * (1 + (layer >= first)) for layer in range(len(has_window))] if is_double else inner
    )
    writer.add_rope_dimension_count(16)
    writer.add_rope_dimension_count_swa(8)
    writer.add_rope_freq_base(_full_rope(config)["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)

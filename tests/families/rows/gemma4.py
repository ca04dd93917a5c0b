"""Gemma 4: layers of two sizes, caches that layers share, keys that are values, experts beside a feed."""

from __future__ import annotations

from typing import Any

from tests.families.row import ABSENT, layer_types, row

SIX: dict[str, Any] = {
    "num_hidden_layers": 6,
    "head_dim": 8,
    "sliding_window": 16,
    "layer_types": layer_types("ssfssf"),
    "embed_std": 0.08,
}
INPUTS: dict[str, Any] = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
SHARED: dict[str, Any] = {**SIX, **INPUTS, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
LARGE: dict[str, Any] = {
    **SIX,
    "attention_k_eq_v": True,
    "per_layer_config": {2: {"head_dim": 16, "num_key_value_heads": 1}, 5: {"head_dim": 16, "num_key_value_heads": 1}},
}
DENSE: dict[str, Any] = {**LARGE, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 8.0}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 16,
}
PUBLISHED: dict[str, Any] = {"per_layer_config": ABSENT, "global_head_dim": 16, "num_global_key_value_heads": 1}

ROWS = (
    row("gemma4-text", "gemma4_text", per_layer_config={2: {"head_dim": 16}, 5: {"head_dim": 16}}, **SHARED),
    row("gemma4-one-size", "gemma4_text", per_layer_config={}, **SHARED),
    row("gemma4-dense", "gemma4_text", file=PUBLISHED, **DENSE),
    row("gemma4-experts", "gemma4_text", **EXPERTS),
    row("gemma4-biases", "gemma4_text", attention_bias=True, tie_word_embeddings=False, **DENSE),
    row("gemma4-unified-text", "gemma4_unified_text", final_logit_softcapping=8.0, **LARGE),
)

"""Llama, Mistral, Qwen2 and Qwen3, and what differs from them in biases, windows, multipliers or positions."""

from __future__ import annotations

from typing import Any

from tests.families.row import ABSENT, FALLBACK, layer_types, row

LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LINEAR: dict[str, Any] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
TEMPERED: dict[str, Any] = {
    **YARN,
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
PLAIN_LINEAR = {"rope_type": "linear", "factor": 4.0}

LLAMA = (
    row("llama", "llama"),
    row("llama-tied", "llama", num_key_value_heads=4, tie_word_embeddings=True),
    row("llama-biases", "llama", attention_bias=True, mlp_bias=True),
    row("llama-head-dim", "llama", head_dim=16, num_key_value_heads=1),
    row("llama-llama3", "llama", rope_parameters=LLAMA3),
    row("llama-linear", "llama", rope_parameters=LINEAR),
    row("llama-yarn", "llama", rope_parameters=YARN),
    row(
        "llama-transformers-4",
        "llama",
        seed=1,
        rope_parameters=LINEAR,
        file={"rope_parameters": ABSENT, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    ),
    row("llama-theta", "llama", rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    row("arcee", "arcee", head_dim=8),
    row("arcee-biases", "arcee", seed=1, head_dim=8, attention_bias=True, mlp_bias=True, rope_parameters=YARN),
    row("seed-oss", "seed_oss", head_dim=12),
    row("seed-oss-output-bias", "seed_oss", head_dim=8, attention_out_bias=True, mlp_bias=True),
    row("internlm3", "internlm3", head_dim=8),
    row("internlm3-biases", "internlm3", head_dim=12, attention_bias=True, mlp_bias=True),
    row("exaone", "exaone", head_dim=8, rope_parameters=LLAMA3),
    row(
        "cwm",
        "cwm",
        head_dim=8,
        num_hidden_layers=4,
        sliding_window=16,
        layer_types=layer_types("fssf"),
        rope_parameters=LLAMA3,
    ),
    row("iquestcoder", "iquestcoder", head_dim=8),
    row("bitnet", "bitnet", by=FALLBACK),
    row("diffllama", "diffllama", head_dim=8, by=FALLBACK),
)

MISTRAL = (
    row("mistral-window", "mistral", head_dim=12, sliding_window=16),
    row("mistral-full", "mistral", head_dim=8, sliding_window=None),
    row("ministral", "ministral", num_hidden_layers=4, head_dim=8, sliding_window=16, layer_types=layer_types("fsfs")),
    row("ministral-all-windows", "ministral", head_dim=12, sliding_window=12),
    row("ministral3", "ministral3", head_dim=8, rope_parameters=TEMPERED),
    row(
        "ministral3-window",
        "ministral3",
        head_dim=12,
        sliding_window=16,
        rope_parameters={**TEMPERED, "llama_4_scaling_beta": 0.9},
    ),
)

QWEN = (
    row("qwen2", "qwen2"),
    row(
        "qwen2-windows",
        "qwen2",
        num_hidden_layers=4,
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=2,
        tie_word_embeddings=True,
    ),
    row("qwen3", "qwen3", seed=1, head_dim=12, tie_word_embeddings=True),
    row(
        "qwen3-windows",
        "qwen3",
        seed=1,
        num_hidden_layers=4,
        head_dim=8,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=16,
        layer_types=layer_types("sfsf"),
    ),
)

MULTIPLIED = (
    row(
        "granite",
        "granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=4.0,
    ),
    row(
        "granite-biases",
        "granite",
        tie_word_embeddings=True,
        attention_bias=True,
        mlp_bias=True,
        embedding_multiplier=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.5,
        logits_scaling=0.5,
    ),
    row(
        "granite-swa",
        "granite_swa",
        seed=1,
        num_hidden_layers=4,
        sliding_window=16,
        layer_types=layer_types("fsfs"),
        layer_rope_theta=[500.0, 1e4, 500.0, 1e4],
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=4.0,
    ),
    row(
        "granite4-dense",
        "granitemoehybrid",
        seed=1,
        num_local_experts=0,
        mamba_n_heads=4,
        shared_intermediate_size=40,
        layer_types=layer_types("fff"),
        position_embedding_type="rope",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
        logits_scaling=4.0,
    ),
    row(
        "granite4-dense-no-rotary",
        "granitemoehybrid",
        seed=2,
        gain=3,
        num_local_experts=0,
        mamba_n_heads=4,
        shared_intermediate_size=40,
        layer_types=layer_types("fff"),
        attention_bias=True,
        embedding_multiplier=2.0,
        attention_multiplier=0.4,
    ),
    row(
        "hyperclovax",
        "hyperclovax",
        head_dim=8,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=4.0,
    ),
    row(
        "hyperclovax-no-post-norm",
        "hyperclovax",
        head_dim=8,
        use_post_norm=False,
        embedding_multiplier=2.0,
        residual_multiplier=0.4,
        attention_multiplier=0.3,
    ),
)

UNROTATED = (
    row("smollm3", "smollm3", num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]),
    row(
        "smollm3-interval",
        "smollm3",
        num_hidden_layers=5,
        no_rope_layer_interval=2,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=False,
        rope_parameters=YARN,
    ),
    row(
        "smollm3-windows",
        "smollm3",
        num_hidden_layers=4,
        no_rope_layers=[1, 1, 0, 0],
        use_sliding_window=True,
        sliding_window=16,
        layer_types=layer_types("sfsf"),
    ),
)

ROWS = (*LLAMA, *MISTRAL, *QWEN, *MULTIPLIED, *UNROTATED)

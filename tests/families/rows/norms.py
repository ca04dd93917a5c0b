"""Families whose norms differ from Llama's: their kind, their place, their number, or what they norm."""

from __future__ import annotations

from typing import Any

from tests.families.row import ABSENT, FALLBACK, layer_types, row
from tests.families.rows.served import LINEAR, LLAMA3, YARN

DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
TWO_ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {**LINEAR, "rope_theta": 1e6, "factor": 8.0},
}
CAPPED: dict[str, Any] = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.5}
GEMMA2: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "sliding_window": 16,
    "query_pre_attn_scalar": 20,
}
GEMMA3: dict[str, Any] = {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 20}

GEMMA = (
    row("gemma", "gemma", head_dim=12, num_key_value_heads=1, embed_std=0.08),
    row("gemma-untied", "gemma", head_dim=8, attention_bias=True, tie_word_embeddings=False, embed_std=0.08),
    row("gemma2", "gemma2", seed=2, embed_std=0.08, **GEMMA2, **CAPPED),
    row(
        "gemma2-no-caps", "gemma2", embed_std=0.08, **GEMMA2, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    row("gemma2-biases", "gemma2", embed_std=0.08, **GEMMA2, **CAPPED, attention_bias=True, tie_word_embeddings=False),
    row(
        "gemma3",
        "gemma3_text",
        seed=4,
        embed_std=0.024,
        **GEMMA3,
        num_hidden_layers=4,
        layer_types=layer_types("sfsf"),
        rope_parameters=TWO_ROPES,
    ),
    row(
        "gemma3-pattern",
        "gemma3_text",
        seed=1,
        embed_std=0.08,
        **GEMMA3,
        num_hidden_layers=12,
        rope_parameters=TWO_ROPES,
    ),
    row(
        "gemma3-transformers-4",
        "gemma3_text",
        seed=3,
        gain=3,
        embed_std=0.04,
        **GEMMA3,
        num_hidden_layers=4,
        layer_types=layer_types("sfsf"),
        rope_parameters=TWO_ROPES,
        file={
            "rope_parameters": ABSENT,
            "layer_types": ABSENT,
            "_sliding_window_pattern": ABSENT,
            "sliding_window_pattern": 2,
            "rope_theta": 1e6,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    row(
        "gemma3-caps",
        "gemma3_text",
        seed=6,
        embed_std=0.08,
        **GEMMA3,
        **CAPPED,
        num_hidden_layers=4,
        layer_types=layer_types("sfsf"),
        tie_word_embeddings=False,
    ),
    row("vaultgemma", "vaultgemma", embed_std=0.08, **GEMMA2, **CAPPED),
)

OLMO = (
    row("olmo", "olmo"),
    row("olmo-clipped", "olmo", clip_qkv=1.5, by=FALLBACK),
    row("olmo2", "olmo2", seed=2),
    row(
        "olmo2-no-group",
        "olmo2",
        seed=2,
        gain=3,
        embed_std=0.6,
        num_key_value_heads=4,
        attention_bias=True,
        rope_parameters=YARN,
    ),
    row(
        "olmo3",
        "olmo3",
        num_hidden_layers=4,
        sliding_window=16,
        layer_types=layer_types("sfsf"),
        rope_parameters={"sliding_attention": DEFAULT, "full_attention": YARN},
    ),
    row(
        "olmo3-transformers-4",
        "olmo3",
        num_hidden_layers=4,
        sliding_window=16,
        rope_parameters={
            "sliding_attention": {**DEFAULT, "rope_theta": 5e5},
            "full_attention": {**YARN, "rope_theta": 5e5},
        },
        file={
            "rope_parameters": ABSENT,
            "layer_types": ABSENT,
            "rope_theta": 5e5,
            "rope_scaling": {key: value for key, value in YARN.items() if key != "rope_theta"},
        },
    ),
    row("olmo3-pattern", "olmo3", num_hidden_layers=8, sliding_window=12),
)

AFTER = (
    row(
        "exaone4",
        "exaone4",
        num_hidden_layers=4,
        sliding_window=16,
        layer_types=layer_types("sfsf"),
        rope_parameters=LLAMA3,
    ),
    row("exaone4-pattern", "exaone4", num_hidden_layers=8, sliding_window=12, sliding_window_pattern=4),
    row(
        "exaone4-full",
        "exaone4",
        seed=2,
        gain=3,
        embed_std=0.15,
        sliding_window=None,
        layer_types=layer_types("fff"),
        tie_word_embeddings=True,
    ),
    row("glm4", "glm4", head_dim=8, attention_bias=True),
    row(
        "glm4-no-bias",
        "glm4",
        head_dim=16,
        attention_bias=False,
        rope_parameters={**DEFAULT, "partial_rotary_factor": 0.25},
    ),
    row("glm", "glm", head_dim=8),
    row(
        "glm-transformers-4",
        "glm",
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        file={"rope_parameters": ABSENT, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    row(
        "glm-whole-rotary",
        "glm",
        head_dim=12,
        attention_bias=False,
        rope_parameters={**DEFAULT, "partial_rotary_factor": 1.0},
    ),
)

ODD = (
    row("cohere", "cohere", logit_scale=0.25),
    row("cohere-qk-norm", "cohere", use_qk_norm=True, attention_bias=True, logit_scale=0.5),
    row(
        "cohere2",
        "cohere2",
        num_hidden_layers=4,
        head_dim=8,
        sliding_window=16,
        layer_types=layer_types("sfsf"),
        logit_scale=0.25,
    ),
    row(
        "cohere2-transformers-4",
        "cohere2",
        num_hidden_layers=4,
        sliding_window=16,
        layer_types=layer_types("sfsf"),
        rope_parameters={**DEFAULT, "rope_theta": 500.0},
        file={
            "rope_parameters": ABSENT,
            "layer_types": ABSENT,
            "head_dim": ABSENT,
            "sliding_window_pattern": 2,
            "rope_theta": 500.0,
        },
    ),
    row("cohere2-pattern", "cohere2", num_hidden_layers=8, head_dim=12, sliding_window=12, attention_bias=True),
    row("helium", "helium", head_dim=8),
    row(
        "helium-biases",
        "helium",
        head_dim=8,
        num_key_value_heads=4,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    ),
    row("ernie4-5", "ernie4_5", head_dim=8),
    row("ernie4-5-biases", "ernie4_5", head_dim=12, use_bias=True, tie_word_embeddings=False),
    row("hunyuan", "hunyuan_v1_dense", head_dim=8),
    row("hunyuan-biases", "hunyuan_v1_dense", head_dim=12, attention_bias=True, tie_word_embeddings=True),
    row("apertus", "apertus", seed=3, gain=3, embed_std=0.6, rope_parameters=LLAMA3),
    row(
        "apertus-biases",
        "apertus",
        seed=3,
        gain=4,
        attention_bias=True,
        tie_word_embeddings=True,
        rope_parameters=DEFAULT,
    ),
    row("apertus-1.5", "apertus1p5_text", seed=4, rope_parameters=LLAMA3),
    row("nanochat", "nanochat", seed=8, final_logit_softcapping=2.5),
    row("nanochat-group", "nanochat", seed=5, num_key_value_heads=1, attention_bias=True),
)

ROWS = (*GEMMA, *OLMO, *AFTER, *ODD)

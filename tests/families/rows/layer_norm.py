"""Families with LayerNorm: GPT-2's descendants, parallel blocks, learned positions, alibi."""

from __future__ import annotations

from typing import Any

from tests.families.row import ABSENT, FALLBACK, NEITHER, OWN, row
from tests.families.rows.served import LINEAR

GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
ROTATED: dict[str, Any] = {**GPT, "n_head": 2, "rotary_dim": 8}
RW: dict[str, Any] = {  # eager attention in transformers adds alibi twice
    "alibi": True,
    "multi_query": False,
    "parallel_attn": False,
    "bias": True,
    "by": OWN,
    "attention": "sdpa",
}


def partial(share: float, **others: Any) -> dict[str, Any]:
    """Rotary parameters that turn a share of each head."""
    return {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share, **others}


def longrope(num: int, original: int, **others: Any) -> dict[str, Any]:
    """Rotary parameters with two lists of factors, between which a sequence changes at `original` tokens."""
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * index for index in range(num)],
        "long_factor": [1.5 + 1.5 * index for index in range(num)],
        "original_max_position_embeddings": original,
        **others,
    }


PHI = (
    row("phi", "phi", seed=3, gain=3, num_key_value_heads=4),
    row(
        "phi-qk-norm",
        "phi",
        seed=3,
        gain=3,
        qk_layernorm=True,
        hidden_act="gelu",
        rope_parameters=partial(0.5),
    ),
    row("phi3", "phi3"),
    row("phi3-window", "phi3", sliding_window=16, num_key_value_heads=4),
    row("phi3-partial", "phi3", hidden_size=64, tie_word_embeddings=True, rope_parameters=partial(0.75)),
    row(
        "phi3-longrope",
        "phi3",
        by=OWN,
        original_max_position_embeddings=64,
        rope_parameters=longrope(4, 64),
    ),
    row(
        "phi4-mini",
        "phi3",
        by=OWN,
        hidden_size=64,
        tie_word_embeddings=True,
        original_max_position_embeddings=64,
        rope_parameters=longrope(6, 64, partial_rotary_factor=0.75),
    ),
    row(
        "phi3-transformers-4",
        "phi3",
        by=OWN,
        original_max_position_embeddings=64,
        rope_parameters=longrope(4, 64),
        file={
            "rope_parameters": ABSENT,
            "rope_theta": 1e4,
            "rope_scaling": {
                "type": "longrope",
                **{key: longrope(4, 64)[key] for key in ("short_factor", "long_factor")},
            },
        },
    ),
    row(
        "phi-transformers-4",
        "phi",
        rope_parameters=partial(0.5, rope_theta=500.0),
        file={"rope_parameters": ABSENT, "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    row("phi3-longrope-short", "phi3", original_max_position_embeddings=256, rope_parameters=longrope(4, 256)),
    row(
        "phi3-longrope-edge",
        "phi3",
        by=OWN,
        lengths=(63, 64, 65),
        num_key_value_heads=4,
        original_max_position_embeddings=64,
        rope_parameters=longrope(4, 64),
    ),
)

GPT2 = (
    row("gpt2", "gpt2", **GPT),
    row("gpt2-inner", "gpt2", **GPT, n_inner=40, activation_function="relu"),
    row("gpt2-no-scale", "gpt2", **GPT, scale_attn_weights=False),
    row("gpt2-by-layer", "gpt2", seed=3, **GPT, scale_attn_by_inverse_layer_idx=True),
    row("starcoder", "gpt_bigcode", seed=3, **GPT),
    row("starcoder-heads", "gpt_bigcode", seed=2, **GPT, multi_query=False, n_inner=48),
    row("starcoder2", "starcoder2"),
    row("starcoder2-window", "starcoder2", sliding_window=16, use_bias=False, tie_word_embeddings=False),
    row("opt", "opt", ffn_dim=48, word_embed_proj_dim=32, num_hidden_layers=3),
    row(
        "opt-no-bias",
        "opt",
        ffn_dim=48,
        word_embed_proj_dim=32,
        enable_bias=False,
        layer_norm_elementwise_affine=False,
        activation_function="gelu",
    ),
    row("opt-post-norm", "opt", ffn_dim=48, word_embed_proj_dim=32, do_layer_norm_before=False, by=FALLBACK),
    row(
        "opt-350m",
        "opt",
        seed=5,
        gain=0.6,
        embed_std=0.9,
        ffn_dim=48,
        word_embed_proj_dim=16,
        do_layer_norm_before=False,
        by=FALLBACK,
    ),
    row("biogpt", "biogpt", seed=3, gain=3, embed_std=0.09),
    row(
        "xglm",
        "xglm",
        by=NEITHER,
        seed=1,
        gain=3,
        embed_std=0.15,
        d_model=32,
        ffn_dim=48,
        num_layers=3,
        attention_heads=4,
    ),
)

PARALLEL = (
    row("gptj", "gptj", seed=3, **ROTATED),
    row("gptj-tied", "gptj", seed=5, **{**GPT, "rotary_dim": 4}, n_inner=40, tie_word_embeddings=True),
    row("codegen", "codegen", seed=4, n_ctx=256, **{**GPT, "rotary_dim": 4}),
    row("gpt-neox", "gpt_neox", seed=2, num_attention_heads=2),
    row("gpt-neox-serial", "gpt_neox", use_parallel_residual=False, rope_parameters=partial(1.0)),
    row(
        "gpt-neox-no-bias",
        "gpt_neox",
        seed=1,
        attention_bias=False,
        tie_word_embeddings=True,
        hidden_act="gelu_new",
        rope_parameters=partial(0.5),
    ),
    row(
        "gpt-neox-transformers-4",
        "gpt_neox",
        seed=1,
        rope_parameters=partial(0.5, rope_theta=100.0),
        file={"rope_parameters": ABSENT, "rotary_pct": 0.5, "rotary_emb_base": 100},
    ),
    row(
        "gpt-neox-linear",
        "gpt_neox",
        seed=1,
        num_attention_heads=2,
        rope_parameters={**LINEAR, "partial_rotary_factor": 0.25},
    ),
    row("gpt-neox-japanese", "gpt_neox_japanese", by=OWN, intermediate_multiple_size=2),
    row("falcon-7b", "falcon", by=OWN, seed=2, num_kv_heads=1),
    row("falcon-7b-bias", "falcon", by=OWN, bias=True, num_kv_heads=1, tie_word_embeddings=False),
    row("falcon-40b", "falcon", by=OWN, new_decoder_architecture=True, num_kv_heads=2),
    row("falcon-11b", "falcon", by=OWN, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
    row("falcon-rw", "falcon", **RW, seed=7, embed_std=0.09),
    row("falcon-rw-16-heads", "falcon", **RW, hidden_size=64, num_attention_heads=16),
    row("falcon-serial", "falcon", by=OWN, seed=3, multi_query=False, parallel_attn=False, num_kv_heads=4),
    row("stablelm", "stablelm", hidden_size=64),
    row(
        "stablelm-parallel",
        "stablelm",
        seed=1,
        use_parallel_residual=True,
        use_qkv_bias=True,
        rope_parameters=partial(0.5),
    ),
    row(
        "stablelm-transformers-4",
        "stablelm",
        hidden_size=64,
        rope_parameters=partial(0.25, rope_theta=500.0),
        file={"rope_parameters": ABSENT, "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    ),
    row(
        "stablelm-qk-norm",
        "stablelm",
        seed=1,
        use_parallel_residual=True,
        qk_layernorm=True,
        rope_parameters=partial(0.5),
    ),
    row("nemotron", "nemotron", head_dim=8),
    row(
        "nemotron-transformers-4",
        "nemotron",
        hidden_size=64,
        rope_parameters=partial(0.25, rope_theta=500.0),
        file={"rope_parameters": ABSENT, "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    ),
    row(
        "nemotron-biases", "nemotron", seed=1, head_dim=12, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    row("persimmon", "persimmon", seed=3, embed_std=0.9),
    row(
        "persimmon-transformers-4",
        "persimmon",
        seed=4,
        hidden_size=64,
        rope_parameters=partial(0.25, rope_theta=500.0),
        file={"rope_parameters": ABSENT, "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    ),
    row("persimmon-no-norm", "persimmon", seed=1, qk_layernorm=False, rope_parameters=partial(0.25)),
    row("jais2", "jais2", head_dim=8, by=FALLBACK),
)

ALIBI = (
    row("bloom", "bloom", seed=5, gain=3, hidden_size=32, n_layer=3, n_head=4, by=OWN),
    row("bloom-6-heads", "bloom", seed=3, hidden_size=48, n_layer=3, n_head=6, by=OWN),
    row(
        "bloom-post-norm-residual",
        "bloom",
        hidden_size=32,
        n_layer=3,
        n_head=4,
        apply_residual_connection_post_layernorm=True,
        by=NEITHER,
    ),
    row("mpt", "mpt", seed=1, d_model=32, n_heads=4, n_layers=3, max_seq_len=256, by=OWN),
    row("mpt-6-heads", "mpt", gain=3, d_model=48, n_heads=6, n_layers=3, max_seq_len=256, by=OWN),
)

ROWS = (*PHI, *GPT2, *PARALLEL, *ALIBI)

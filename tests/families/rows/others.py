"""Types that attend in a way of their own, are no decoders alone, or have a text half inside another model."""

from __future__ import annotations

from typing import Any

from tests.families.row import FALLBACK, NEITHER, OWN, layer_types, row

ENCODER: dict[str, Any] = {"is_decoder": True, "by": NEITHER}
DECODING: dict[str, Any] = {"is_decoder": True, "by": FALLBACK}  # with attention by transformers' interface
SEQ2SEQ: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "by": NEITHER,
}

TEXT = (
    row(
        "gemma3n-text",
        "gemma3n_text",
        num_hidden_layers=6,
        head_dim=8,
        sliding_window=16,
        layer_types=layer_types("sfsfsf"),
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
        laurel_rank=4,
        intermediate_size=[48] * 6,
        activation_sparsity_pattern=[0.5] * 2 + [0.0] * 4,
        by=FALLBACK,
        embed_std=0.08,
    ),
    row(
        "modernbert-decoder",
        "modernbert-decoder",
        num_hidden_layers=4,
        local_attention=16,
        layer_types=layer_types("fsfs"),
        by=FALLBACK,
    ),
    row(
        "gpt-neo",
        "gpt_neo",
        hidden_size=32,
        num_layers=4,
        num_heads=4,
        window_size=16,
        attention_types=[[["global", "local"], 2]],
        by=OWN,
    ),
    row("openai-gpt", "openai-gpt", n_embd=32, n_layer=3, n_head=4, by=NEITHER),
    row("ctrl", "ctrl", seed=5, gain=4, n_embd=32, n_layer=3, n_head=4, dff=48, by=FALLBACK),
    row("hrm-text", "hrm_text", head_dim=8, num_layers_per_stack=2, num_hidden_layers=16, by=FALLBACK),
    row("cpmant", "cpmant", num_hidden_layers=2, dim_head=8, dim_ff=48, prompt_types=4, prompt_length=4, by=NEITHER),
    row("zaya", "zaya", head_dim=8, num_experts=4, moe_intermediate_size=16, router_hidden_size=16, by=NEITHER),
    row(
        "cohere-compass",
        "cohere_compass_text",
        head_dim=8,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
        logit_scale=0.25,
        by=FALLBACK,
    ),
)

ENCODERS = (
    row("bert", "bert", **DECODING),
    row("bert-generation", "bert-generation", **DECODING),
    row("roberta", "roberta", **DECODING),
    row("electra", "electra", embedding_size=32, **DECODING),
    row("rembert", "rembert", input_embedding_size=16, output_embedding_size=32, **ENCODER),
    row("roformer", "roformer", embedding_size=32, **ENCODER),
    row("megatron-bert", "megatron-bert", **ENCODER),
    row("xlm-roberta", "xlm-roberta", **DECODING),
    row("camembert", "camembert", **DECODING),
    row("data2vec-text", "data2vec-text", **DECODING),
    row("ernie", "ernie", **DECODING),
    row("big-bird", "big_bird", attention_type="original_full", **ENCODER),
    row("xlnet", "xlnet", d_model=32, n_layer=2, n_head=4, d_inner=48, by=NEITHER),
    row("xlm", "xlm", emb_dim=32, n_layers=2, n_heads=4, causal=True, by=NEITHER),
    row(
        "reformer",
        "reformer",
        is_decoder=True,
        attn_layers=["local", "local"],
        attention_head_size=8,
        feed_forward_size=48,
        axial_pos_embds=False,
        local_attn_chunk_length=16,
        by=NEITHER,
    ),
)

HALVES = (
    row("bart", "bart", **SEQ2SEQ),
    row("mbart", "mbart", **SEQ2SEQ),
    row("marian", "marian", **SEQ2SEQ),
    row("pegasus", "pegasus", **SEQ2SEQ),
    row("blenderbot", "blenderbot", **SEQ2SEQ),
    row("blenderbot-small", "blenderbot-small", **SEQ2SEQ),
    row("plbart", "plbart", **SEQ2SEQ),
    row("mvp", "mvp", **SEQ2SEQ),
    row("trocr", "trocr", d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48, by=NEITHER),
)

ROWS = (*TEXT, *ENCODERS, *HALVES)

"""Maps checkpoint tensor names to the library's tensor numbers."""

from __future__ import annotations

# suffix of a layer's tensor -> `TensorKind` of source/weights/model.h
LAYER_KINDS = {
    "input_layernorm.weight": 3,
    "post_attention_layernorm.weight": 4,
    "self_attn.q_norm.weight": 5,
    "self_attn.k_norm.weight": 6,
    "self_attn.q_proj.weight": 7,
    "self_attn.k_proj.weight": 8,
    "self_attn.v_proj.weight": 9,
    "self_attn.o_proj.weight": 10,
    "mlp.gate_proj.weight": 11,
    "mlp.up_proj.weight": 12,
    "mlp.down_proj.weight": 13,
    "self_attn.q_proj.bias": 14,
    "self_attn.k_proj.bias": 15,
    "self_attn.v_proj.bias": 16,
    "self_attn.o_proj.bias": 17,
    "mlp.gate_proj.bias": 18,
    "mlp.up_proj.bias": 19,
    "mlp.down_proj.bias": 20,
    "post_mixer_layernorm.weight": 21,
    "post_feed_layernorm.weight": 22,
    "input_layernorm.bias": 23,
    "post_attention_layernorm.bias": 24,
    "post_mixer_layernorm.bias": 25,
    "post_feed_layernorm.bias": 26,
    "self_attn.q_norm.bias": 27,
    "self_attn.k_norm.bias": 28,
    "self_attn.sinks": 29,
    "mlp.act_alpha": 30,
}
MODEL_KINDS = {
    "model.embed_tokens.weight": 0,
    "lm_head.weight": 1,
    "model.norm.weight": 2,
    "model.embed_positions.weight": 31,
    "model.embed_layernorm.weight": 32,
    "model.embed_layernorm.bias": 33,
    "model.norm.bias": 34,
    "lm_head.bias": 35,
}


def place(name: str) -> tuple[int, int]:
    """(layer, kind) of a tensor; the layer is 0 for a tensor of the model."""
    if is_of_model(name):
        return 0, MODEL_KINDS[name]
    index, _, suffix = name.removeprefix("model.layers.").partition(".")
    return int(index), LAYER_KINDS[suffix]


def is_of_model(name: str) -> bool:
    """Whether the tensor belongs to no layer."""
    return name in MODEL_KINDS


def is_matrix(name: str, is_tied: bool) -> bool:
    """Whether the tensor is multiplied in a product; the embedding is if it is the head (`is_tied`)."""
    return (
        name.endswith("_proj.weight") or name == "lm_head.weight" or (is_tied and name == "model.embed_tokens.weight")
    )

"""Maps checkpoint tensor names to the library's tensor numbers."""

from __future__ import annotations

from collections.abc import Iterator

from .shape import NativeLayer, NativeShape

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
    "mlp.gate.weight": 36,
    "mlp.gate.bias": 37,
    "mlp.gate.e_score_correction_bias": 38,
    "mlp.shared_expert_gate.weight": 39,
    "output_scale": 63,
    "per_layer.gate_proj.weight": 64,
    "per_layer.up_proj.weight": 65,
    "per_layer.norm.weight": 66,
    "self_attn.q_a_layernorm.weight": 5,
    "self_attn.kv_a_layernorm.weight": 6,
    "self_attn.q_a_proj.weight": 67,
    "self_attn.kv_a_proj_with_mqa.weight": 68,
    "self_attn.q_b_proj.weight": 69,
    "self_attn.kv_b_proj.weight": 70,
    "self_attn.q_a_proj.bias": 71,
    "self_attn.kv_a_proj_with_mqa.bias": 72,
    "mlp.gate_norm.weight": 73,
    "mlp.expert_scale": 74,
    "pre_experts_layernorm.weight": 75,
    "post_experts_layernorm.weight": 76,
    "post_dense_layernorm.weight": 77,
    "mlp.shared_experts.gate_proj.weight": 11,  # the network that all tokens take, under another name
    "mlp.shared_experts.up_proj.weight": 12,
    "mlp.shared_experts.down_proj.weight": 13,
    "mlp.shared_experts.gate_proj.bias": 18,
    "mlp.shared_experts.up_proj.bias": 19,
    "mlp.shared_experts.down_proj.bias": 20,
}
_MIXER_MATRICES = (
    "self_attn.gate_proj",
    *(f"recurrent.{name}" for name in ("gate_proj", "in_proj", "step_proj", "rate_proj", "out_proj")),
)
LAYER_KINDS |= {f"{name}.weight": 80 + i for i, name in enumerate(_MIXER_MATRICES)}
LAYER_KINDS |= {f"{name}.bias": 86 + i for i, name in enumerate(_MIXER_MATRICES)}
_VECTORS = ("conv.weight", "conv.bias", "decay", "step_offset", "skip", "norm.weight")
LAYER_KINDS |= {f"recurrent.{name}": 92 + i for i, name in enumerate(_VECTORS)}
# behind "mlp.experts.E."
EXPERT_KINDS = {
    "gate_proj.weight": 40,
    "up_proj.weight": 41,
    "down_proj.weight": 42,
    "gate_proj.bias": 43,
    "up_proj.bias": 44,
    "down_proj.bias": 45,
}
_EXPERTS = "mlp.experts."
LAYER_INPUT = "per_layer."  # begins the names of a layer's tensors for its own input
MODEL_KINDS = {
    "model.embed_tokens.weight": 0,
    "lm_head.weight": 1,
    "model.norm.weight": 2,
    "model.embed_positions.weight": 31,
    "model.embed_layernorm.weight": 32,
    "model.embed_layernorm.bias": 33,
    "model.norm.bias": 34,
    "lm_head.bias": 35,
    "model.per_layer.embed_tokens.weight": 60,
    "model.per_layer.projection.weight": 61,
    "model.per_layer.norm.weight": 62,
}


def place(name: str) -> tuple[int, int, int]:
    """(layer, kind, expert) of a tensor; layer and expert are 0 for a tensor that is of none."""
    if is_of_model(name):
        return 0, MODEL_KINDS[name], 0
    index, _, suffix = name.removeprefix("model.layers.").partition(".")
    if not suffix.startswith(_EXPERTS):
        return int(index), LAYER_KINDS[suffix], 0
    expert, _, suffix = suffix.removeprefix(_EXPERTS).partition(".")
    return int(index), EXPERT_KINDS[suffix], int(expert)


def is_of_expert(name: str) -> bool:
    """Whether the tensor belongs to an expert."""
    return f".{_EXPERTS}" in name


def matrices_of(shape: NativeShape, index: int) -> Iterator[tuple[str, ...]]:
    """The matrices of a layer: those of each product together, in the order of their rows."""
    layer, prefix = shape.layers[index], f"model.layers.{index}."

    def network(name: str, is_gated: bool) -> Iterator[tuple[str, ...]]:
        parts = ("gate", "up") if is_gated else ("up",)
        yield tuple(f"{prefix}{name}.{part}_proj.weight" for part in parts)
        yield (f"{prefix}{name}.down_proj.weight",)

    if layer.recurrent is not None:
        yield tuple(f"{prefix}recurrent.{part}_proj.weight" for part in layer.recurrent.matrices)
        yield (f"{prefix}recurrent.out_proj.weight",)
    elif layer.has_mixer:
        for parts in _projections(layer):
            yield tuple(f"{prefix}self_attn.{part}.weight" for part in parts)
        yield (f"{prefix}self_attn.o_proj.weight",)
    if layer.intermediate_size:
        yield from network("mlp.shared_experts" if layer.is_shared else "mlp", layer.is_gated)
    if layer.experts is not None:
        for expert in range(layer.experts.num_experts):
            yield from network(f"{_EXPERTS}{expert}", layer.experts.is_gated)
    if shape.layer_inputs is not None:
        yield from ((f"{prefix}{LAYER_INPUT}{part}_proj.weight",) for part in ("gate", "up"))


def _projections(layer: NativeLayer) -> Iterator[tuple[str, ...]]:
    """Those of a layer's attention before its output, by product."""
    latents = layer.latents
    if latents is None:
        parts = "q" if layer.kv_of is not None else "qk" if layer.is_k_v else "qkv"
        gate = ("gate",) if layer.has_output_gate else ()
        yield tuple(f"{part}_proj" for part in (*parts, *gate))
    elif latents.q_rank is None:
        yield "q_proj", "kv_a_proj_with_mqa"
    else:
        yield "q_a_proj", "kv_a_proj_with_mqa"
        yield ("q_b_proj",)


def is_of_model(name: str) -> bool:
    """Whether the tensor belongs to no layer."""
    return name in MODEL_KINDS


def is_matrix(name: str, is_tied: bool) -> bool:
    """Whether the tensor is multiplied in a product; the embedding is if it is the head (`is_tied`).

    Not what makes keys and values of latents, which stays in the model's dtype.
    """
    if name.endswith(".kv_b_proj.weight"):
        return False
    is_projection = name.endswith(("_proj.weight", "_proj_with_mqa.weight"))
    return is_projection or name == "lm_head.weight" or (is_tied and name == "model.embed_tokens.weight")

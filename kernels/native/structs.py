"""A decoder's shape as the C structs of the library."""

from __future__ import annotations

import ctypes

from .library import (
    ExpertsStruct,
    LatentsStruct,
    LayerInputsStruct,
    LayerStruct,
    NormStruct,
    RecurrentStruct,
    ShapeStruct,
)
from .shape import (
    Activation,
    NativeExperts,
    NativeHeads,
    NativeLatents,
    NativeLayer,
    NativeLayerInputs,
    NativeNorm,
    NativeRecurrent,
    NativeShape,
    NormKind,
    RecurrentKind,
)

# `NormKind`, `RecurrentKind` and `ActivationKind` of source/weights/shape.h
_NORM_KINDS: dict[NormKind, int] = {"rms": 1, "layer": 2}
_RECURRENT_KINDS: dict[RecurrentKind, int] = {"gdn": 1, "mamba2": 2, "short_conv": 3}
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu_clamped")


def of_shape(shape: NativeShape) -> ShapeStruct:
    """The sizes that all layers share; without the types of numbers."""
    return ShapeStruct(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_learned_positions=shape.num_learned_positions,
        position_offset=shape.position_offset,
        has_head=shape.has_head,
        is_tied=shape.is_tied,
        has_head_bias=shape.has_head_bias,
        embedding_scale=shape.embedding_scale,
        head_scale=shape.head_scale,
        head_soft_cap=shape.head_soft_cap or 0.0,
        embedding_norm=_norm(shape.embedding_norm),
        layer_inputs=_layer_inputs(shape.layer_inputs),
        final_norm=_norm(shape.final_norm),
    )


def of_layers(shape: NativeShape) -> ctypes.Array[LayerStruct]:
    """The layers, in order."""
    return (LayerStruct * shape.num_layers)(*(_layer(layer, shape.heads_of(layer)) for layer in shape.layers))


def _layer(layer: NativeLayer, heads: NativeHeads) -> LayerStruct:
    temper, temper_length = layer.query_temper or (0.0, 0)
    qk_norm = layer.qk_norm
    # 0: the library computes the usual scale, in float32
    scale = 0.0 if layer.attention_scale in (None, heads.head_dim**-0.5) else layer.attention_scale
    return LayerStruct(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        window=layer.window or 0,
        intermediate_size=layer.intermediate_size,
        temper_length=temper_length,
        temper=temper,
        attention_scale=scale,
        soft_cap=layer.soft_cap or 0.0,
        residual_scale=layer.residual_scale,
        alpha=layer.clamp[0],
        limit=layer.clamp[1],
        rope=-1 if layer.rope is None else layer.rope,
        activation=_ACTIVATIONS.index(layer.activation),
        is_gated=layer.is_gated,
        is_parallel=layer.is_parallel,
        is_reader=layer.kv_of is not None,
        is_k_v=layer.is_k_v,
        has_output_scale=layer.has_output_scale,
        is_qk_norm_over_row=qk_norm is not None and qk_norm.is_over_row,
        is_qk_norm_after_rope=qk_norm is not None and qk_norm.is_after_rope,
        has_weight_per_head=qk_norm is not None and qk_norm.has_weight_per_head,
        has_mixer=layer.has_mixer,
        has_output_gate=layer.has_output_gate,
        pre_mixer=_norm(layer.pre_mixer),
        post_mixer=_norm(layer.post_mixer),
        pre_feed=_norm(layer.pre_feed),
        post_feed=_norm(layer.post_feed),
        qk_norm=_norm(None if qk_norm is None else qk_norm.norm),
        v_norm=_norm(layer.v_norm),
        experts=of_experts(layer.experts),
        latents=_latents(layer.latents),
        recurrent=_recurrent(layer.recurrent),
    )


def of_experts(experts: NativeExperts | None) -> ExpertsStruct:
    """Zeros where there are none."""
    if experts is None:
        return ExpertsStruct()
    return ExpertsStruct(
        num_experts=experts.num_experts,
        top_k=experts.top_k,
        intermediate_size=experts.intermediate_size,
        num_groups=experts.num_groups,
        num_groups_kept=experts.num_groups_kept,
        norm_eps=experts.norm_eps,
        norm_min=experts.norm_min,
        scale=experts.scale,
        alpha=experts.clamp[0],
        limit=experts.clamp[1],
        activation=_ACTIVATIONS.index(experts.activation),
        is_gated=experts.is_gated,
        is_sigmoid=experts.score == "sigmoid",
        is_softmax_of_chosen=experts.is_softmax_of_chosen,
        divides_by_sum=experts.divides_by_sum,
        sums_two_of_group=experts.group_score == "top2",
        scales_input=experts.scales_input,
        has_shared_gate=experts.has_shared_gate,
        router_norm=_norm(experts.router_norm),
        own_norms=_norm(experts.own_norms),
    )


def _latents(latents: NativeLatents | None) -> LatentsStruct:
    """Zeros where there are none."""
    if latents is None:
        return LatentsStruct()
    sizes = latents.nope_dim, latents.rope_dim, latents.value_dim
    return LatentsStruct(latents.kv_rank, latents.q_rank or 0, *sizes)


def _layer_inputs(inputs: NativeLayerInputs | None) -> LayerInputsStruct:
    """Zeros where there are none."""
    if inputs is None:
        return LayerInputsStruct()
    return LayerInputsStruct(
        rows=inputs.rows,
        width=inputs.width,
        scale=inputs.scale,
        projection_scale=inputs.projection_scale,
        activation=_ACTIVATIONS.index(inputs.activation),
        norm=_norm(inputs.norm),
    )


def _recurrent(recurrent: NativeRecurrent | None) -> RecurrentStruct:
    """Zeros where there is none."""
    if recurrent is None:
        return RecurrentStruct()
    return RecurrentStruct(
        num_key_heads=recurrent.num_key_heads,
        num_value_heads=recurrent.num_value_heads,
        key_dim=recurrent.key_dim,
        value_dim=recurrent.value_dim,
        conv_width=recurrent.conv_width,
        norm_group=recurrent.norm_group or 0,
        step_min=recurrent.step_limit[0],
        step_max=recurrent.step_limit[1],
        kind=_RECURRENT_KINDS[recurrent.kind],
        norm=_norm(recurrent.norm),
    )


def _norm(norm: NativeNorm | None) -> NormStruct:
    """Zeros where there is no norm."""
    return NormStruct() if norm is None else NormStruct(_NORM_KINDS[norm.kind], norm.eps, norm.is_exact)

"""A decoder's shape as the C structs of the library.

A field of a struct is the attribute of the same name, converted as its type or `_NUMBERS` says; 0 is for what there is
none of. So a new field is written in `source/weights/shape.h`, in its struct in `library.py` and in `shape.py`. What
has another name or meaning there is given here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeVar

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

_Struct = TypeVar("_Struct", bound=ctypes.Structure)

NUMBER_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "int4": 4}  # `DataType` of source/weights/model.h

# `NormKind`, `RecurrentKind` and `ActivationKind` of source/weights/shape.h
_NORM_KINDS: dict[NormKind, int] = {"rms": 1, "layer": 2}
_RECURRENT_KINDS: dict[RecurrentKind, int] = {"gdn": 1, "mamba2": 2, "short_conv": 3}
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu_clamped")


def of_shape(shape: NativeShape, **types: int) -> ShapeStruct:
    """The sizes that all layers share, and the types of numbers: `dtype`, `linears`, `head`, `cache`, `group_size`."""
    return _filled(ShapeStruct, shape, **types)


def of_layers(shape: NativeShape) -> ctypes.Array[LayerStruct]:
    """The layers, in order."""
    return (LayerStruct * shape.num_layers)(*(_layer(layer, shape.heads_of(layer)) for layer in shape.layers))


def _layer(layer: NativeLayer, heads: NativeHeads) -> LayerStruct:
    temper, temper_length = layer.query_temper or (0.0, 0)
    qk_norm = layer.qk_norm
    # 0: the library computes the usual scale, in float32
    scale = 0.0 if layer.attention_scale in (None, heads.head_dim**-0.5) else layer.attention_scale
    return _filled(
        LayerStruct,
        layer,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        temper_length=temper_length,
        temper=temper,
        attention_scale=scale,
        alpha=layer.clamp[0],
        limit=layer.clamp[1],
        rope=-1 if layer.rope is None else layer.rope,
        is_reader=layer.kv_of is not None,
        is_qk_norm_over_row=qk_norm is not None and qk_norm.is_over_row,
        is_qk_norm_after_rope=qk_norm is not None and qk_norm.is_after_rope,
        has_weight_per_head=qk_norm is not None and qk_norm.has_weight_per_head,
        qk_norm=_norm(None if qk_norm is None else qk_norm.norm),
    )


def of_experts(experts: NativeExperts | None) -> ExpertsStruct:
    """Zeros where there are none."""
    if experts is None:
        return ExpertsStruct()
    return _filled(
        ExpertsStruct,
        experts,
        alpha=experts.clamp[0],
        limit=experts.clamp[1],
        is_sigmoid=experts.score == "sigmoid",
        sums_two_of_group=experts.group_score == "top2",
    )


def _latents(latents: NativeLatents | None) -> LatentsStruct:
    return LatentsStruct() if latents is None else _filled(LatentsStruct, latents)


def _layer_inputs(inputs: NativeLayerInputs | None) -> LayerInputsStruct:
    return LayerInputsStruct() if inputs is None else _filled(LayerInputsStruct, inputs)


def _recurrent(recurrent: NativeRecurrent | None) -> RecurrentStruct:
    if recurrent is None:
        return RecurrentStruct()
    step_min, step_max = recurrent.step_limit
    kind = _RECURRENT_KINDS[recurrent.kind]
    return _filled(RecurrentStruct, recurrent, step_min=step_min, step_max=step_max, kind=kind)


def _norm(norm: NativeNorm | None) -> NormStruct:
    return NormStruct() if norm is None else _filled(NormStruct, norm, kind=_NORM_KINDS[norm.kind])


_STRUCTS: dict[Any, Callable[[Any], ctypes.Structure]] = {
    NormStruct: _norm,
    ExpertsStruct: of_experts,
    LatentsStruct: _latents,
    LayerInputsStruct: _layer_inputs,
    RecurrentStruct: _recurrent,
}
_NUMBERS: dict[str, Callable[[Any], int]] = {"activation": _ACTIVATIONS.index}


def _filled(struct: type[_Struct], source: object, **given: Any) -> _Struct:
    """A struct whose fields are `given`, or the attributes of `source` by the same name."""
    for name, kind, *_ in struct._fields_:
        if name not in given:
            value = getattr(source, name)
            convert = _STRUCTS.get(kind) or _NUMBERS.get(name)
            given[name] = convert(value) if convert else 0 if value is None else value
    return struct(**given)

"""Weights in groups of codes: which the library takes, and how they go into it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..layout.grouped_codes import GroupedCodes, GroupedFormat
from . import library, tensors
from .shape import NativeLayer, NativeShape

# `CodeTable`, `NumberKind` and `CodePacking` of source/grouped
_TABLES = {"affine": 0, "iq4": 1, "e2m1": 2, "nf4": 3}
_NUMBERS = {None: 0, "f16": 1, "bf16": 2, "f32": 3, "e8m0": 4}
_PACKINGS = {"bytes": 0, "pairs": 1, "halves_of_32": 2, "halves_of_64": 3}
_SUPER = 256  # columns of a super
_PANEL = 32  # rows of a panel
_FIRST_OF_PRODUCT = (
    ("k_proj", "q_proj"),
    ("v_proj", "q_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "q_proj"),
    ("kv_a_proj_with_mqa", "q_proj"),
)
_ROW = 1 << 30  # columns of a group that is a row, however long


def why_not(form: GroupedFormat, num_columns: int) -> str | None:
    """Why the library does not multiply matrices of this format; None: it does."""
    form.check()
    is_whole = form.group >= num_columns or form.group % _SUPER == 0
    if form.group not in (16, 32, 64, 128) and not is_whole:
        return f"groups of {form.group} columns: must be 16, 32, 64, 128, a multiple of {_SUPER}, or a row"
    if form.super_group not in (None, _SUPER) or (form.super_group and form.group >= _SUPER):
        return f"scales for {form.super_group} columns: must be for {_SUPER}"
    if form.table == "nf4" and (form.offset or form.has_zeros or form.zero):
        return "nf4 with zeros or offsets"
    if form.has_zeros and (form.table == "e2m1" or form.super_group):
        return f"zeros of groups with {'two levels of scales' if form.super_group else form.table}"
    return None


def takes_groups_of(group_size: int) -> bool:
    """Whether groups of a quantized row may have so many columns."""
    return group_size in (16, 32, 64, 128)


def own_formats(shape: NativeShape, group_size: int) -> dict[str, GroupedFormat]:
    """Formats of the matrices that `set_tensor` quantizes for the setting int4; the head gets int8."""
    int4 = GroupedFormat(bits=4, group=group_size, zero=8, scale="bf16")
    products = (product for layer in range(shape.num_layers) for product in tensors.matrices_of(shape, layer))
    formats = {name: int4 for product in products for name in product}
    head = "model.embed_tokens.weight" if shape.is_tied else "lm_head.weight"
    return formats | {head: GroupedFormat(bits=8, group=group_size, zero=128, scale="bf16")}


def packable(
    shape: NativeShape,
    formats: Mapping[str, GroupedFormat],
    factors: Mapping[str, float] | None = None,
    columns: Mapping[str, NDArray[np.int32]] | None = None,
) -> dict[str, GroupedFormat]:
    """Those of the formats that the library keeps; the others' matrices are to be set in the model's dtype.

    q, k and v of a layer are one product, and so are gate and up: all of them must have formats, gate and up the same,
    and all the same factor of their scales (`factors`; 1 where it is absent) and order of columns (`columns`; in order
    where it is absent). Where the formats of q, k and v differ, each must be whole panels of rows.
    """
    factors, columns = factors or {}, columns or {}
    kept = {
        name: form
        for name, form in formats.items()
        if tensors.is_matrix(name, True) and why_not(form, num_columns(shape, name)) is None
    }
    for layer in range(shape.num_layers):
        are_whole = _are_whole_panels(shape, shape.layers[layer])
        for together in tensors.matrices_of(shape, layer):
            may_differ = are_whole and together[0].endswith(("q_proj.weight", "q_a_proj.weight"))
            found = {kept.get(name) for name in together}
            num_factors = len({factors.get(name, 1.0) for name in together})
            num_orders = len({None if name not in columns else columns[name].tobytes() for name in together})
            if None in found or (len(found) > 1 and not may_differ) or num_factors > 1 or num_orders > 1:
                for name in together:
                    kept.pop(name, None)
    return kept


def _are_whole_panels(shape: NativeShape, layer: NativeLayer) -> bool:
    """Whether the rows of queries, keys and values, or latents, begin with panels."""
    heads, latents = shape.heads_of(layer), layer.latents
    if latents is not None:
        queries = latents.q_rank or heads.num_heads * (latents.nope_dim + latents.rope_dim)
        return queries % _PANEL == 0
    return heads.head_dim * heads.num_heads % _PANEL == heads.head_dim * heads.num_kv_heads % _PANEL == 0


def product_of(name: str) -> str:
    """The product that a matrix is in, by the name of one of its matrices: q for q, k and v, and up for gate and up."""
    if f".{tensors.LAYER_INPUT}" in name:
        return name
    for part in ("gate", "step", "rate"):
        name = name.replace(f"recurrent.{part}_proj", "recurrent.in_proj")
    name = name.replace("self_attn.gate_proj", "self_attn.q_proj")
    for part, first in _FIRST_OF_PRODUCT:
        name = name.replace(part, first)
    return name


def num_columns(shape: NativeShape, name: str) -> int:
    """Columns of a matrix."""
    if tensors.is_of_model(name):
        return shape.hidden_size
    layer = shape.layers[tensors.place(name)[0]]
    if name.endswith("o_proj.weight"):
        heads, latents = shape.heads_of(layer), layer.latents
        return heads.num_heads * (latents.value_dim if latents else heads.head_dim)
    if layer.latents and name.endswith(("q_b_proj.weight", "kv_b_proj.weight")):
        return layer.latents.kv_rank if name.endswith("kv_b_proj.weight") else layer.latents.q_rank or 0
    if name.endswith("recurrent.out_proj.weight"):
        assert layer.recurrent is not None
        return layer.recurrent.inner_size
    if name.endswith(f"{tensors.LAYER_INPUT}up_proj.weight"):
        assert shape.layer_inputs is not None
        return shape.layer_inputs.width
    if not name.endswith("down_proj.weight"):
        return shape.hidden_size
    if tensors.is_of_expert(name):
        assert layer.experts is not None
        return layer.experts.intermediate_size
    return layer.intermediate_size


def set_formats(found: ctypes.CDLL, model: int, shape: NativeShape, formats: Mapping[str, GroupedFormat]) -> None:
    """Tells a new model the formats of its matrices. Raises ValueError for those that `packable` would not keep."""
    structs = (library.FormatStruct * len(formats))()
    for one, (name, form) in zip(structs, formats.items(), strict=True):
        if problem := why_not(form, num_columns(shape, name)):
            raise ValueError(f"tensor {name}: {problem}")
        one.layer, one.kind, one.expert = tensors.place(name)
        is_row = form.group >= num_columns(shape, name) and form.super_group is None
        one.bits, one.group, one.zero = form.bits, _ROW if is_row else form.group, form.zero
        one.table, one.scale, one.offset = _TABLES[form.table], _NUMBERS[form.scale], _NUMBERS[form.offset]
        one.has_zeros, one.is_two_level = form.has_zeros, form.super_group is not None
        one.has_signed_scales = form.has_signed_scales
    if found.millrace_set_formats(model, len(formats), structs):
        raise ValueError("formats: those of q, k and v, or of gate and up, do not fit one product; see `packable`")


def set_columns(found: ctypes.CDLL, model: int, name: str, columns: NDArray[np.int32]) -> None:
    """Tells the order of a matrix's columns. Raises MemoryError."""
    if found.millrace_set_columns(model, *tensors.place(name), columns.ctypes.data):
        raise MemoryError(f"tensor {name}: no memory for the order of {len(columns)} columns")


def set_rows(found: ctypes.CDLL, model: int, name: str, first_row: int, codes: GroupedCodes) -> int:
    """The library's answer: 0 if the rows are packed."""
    layer, kind, expert = tensors.place(name)

    def address(array: Any) -> int | None:
        return None if array is None else int(array.ctypes.data)

    rows = library.RowsStruct(
        layer=layer,
        expert=expert,
        kind=kind,
        packing=_PACKINGS[codes.packing],
        first_row=first_row,
        num_rows=codes.num_rows,
        codes=address(codes.codes),
        scales=address(codes.scales),
        offsets=address(codes.offsets),
        sub_scales=address(codes.sub_scales),
        sub_offsets=address(codes.sub_offsets),
        zeros=address(codes.zeros),
        factor=codes.factor,
    )
    return int(found.millrace_set_rows(model, ctypes.byref(rows)))

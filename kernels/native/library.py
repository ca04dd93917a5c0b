"""The C interface of the native library, as ctypes has it: structs, and the functions of source/step/api.cpp."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from typing import Any

MAX_KINDS = 8  # of cache blocks; as in source/step/step.h


class NormStruct(Structure):
    """`NormShape` of source/weights/shape.h."""

    _fields_ = [("kind", c_int32), ("eps", c_float), ("is_exact", c_int32)]


class ExpertsStruct(Structure):
    """`ExpertsShape` of source/weights/shape.h."""

    _fields_ = [
        *((name, c_int64) for name in ("num_experts", "top_k", "intermediate_size", "num_groups", "num_groups_kept")),
        *((name, c_float) for name in ("norm_eps", "norm_min", "scale", "alpha", "limit")),
        *((name, c_int32) for name in ("activation", "is_gated", "is_sigmoid", "is_softmax_of_chosen")),
        *((name, c_int32) for name in ("divides_by_sum", "sums_two_of_group", "scales_input", "has_shared_gate")),
        *((name, NormStruct) for name in ("router_norm", "own_norms")),
    ]


class RecurrentStruct(Structure):
    """`RecurrentShape` of source/weights/shape.h."""

    _fields_ = [
        *((name, c_int64) for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim")),
        *((name, c_int64) for name in ("conv_width", "norm_group")),
        *((name, c_float) for name in ("step_min", "step_max")),
        ("kind", c_int32),
        ("norm", NormStruct),
    ]


class LayerInputsStruct(Structure):
    """`LayerInputsShape` of source/weights/shape.h."""

    _fields_ = [
        *((name, c_int64) for name in ("rows", "width")),
        *((name, c_float) for name in ("scale", "projection_scale")),
        ("activation", c_int32),
        ("norm", NormStruct),
    ]


class LatentsStruct(Structure):
    """`LatentShape` of source/weights/shape.h."""

    _fields_ = [*((name, c_int64) for name in ("kv_rank", "q_rank", "nope_dim", "rope_dim", "value_dim"))]


class LayerStruct(Structure):
    """`LayerShape` of source/weights/shape.h."""

    _fields_ = [
        *((name, c_int64) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, c_int64) for name in ("window", "intermediate_size", "temper_length")),
        *((name, c_float) for name in ("temper", "attention_scale", "soft_cap", "residual_scale", "alpha", "limit")),
        *((name, c_int32) for name in ("rope", "activation", "is_gated", "is_parallel")),
        *((name, c_int32) for name in ("is_reader", "is_k_v", "has_output_scale")),
        *((name, c_int32) for name in ("is_qk_norm_over_row", "is_qk_norm_after_rope", "has_weight_per_head")),
        *((name, c_int32) for name in ("has_mixer", "has_output_gate")),
        *((name, NormStruct) for name in ("pre_mixer", "post_mixer", "pre_feed", "post_feed", "qk_norm", "v_norm")),
        ("experts", ExpertsStruct),
        ("latents", LatentsStruct),
        ("recurrent", RecurrentStruct),
    ]


class ShapeStruct(Structure):
    """`Shape` of source/weights/shape.h."""

    _fields_ = [
        *((name, c_int64) for name in ("vocab_size", "hidden_size", "num_layers")),
        *((name, c_int64) for name in ("num_learned_positions", "position_offset")),
        *((name, c_int32) for name in ("dtype", "linears", "head", "cache", "group_size")),
        *((name, c_int32) for name in ("has_head", "is_tied", "has_head_bias")),
        *((name, c_float) for name in ("embedding_scale", "head_scale", "head_soft_cap")),
        *((name, NormStruct) for name in ("embedding_norm", "final_norm")),
        ("layer_inputs", LayerInputsStruct),
    ]


class TensorStruct(Structure):
    """`Tensor` of source/weights/model.h."""

    _fields_ = [
        ("layer", c_int64),
        *((name, c_int32) for name in ("kind", "type")),
        ("data", c_void_p),
        *((name, c_int64) for name in ("map_bytes", "first_row", "num_rows", "expert")),
    ]


class FormatStruct(Structure):
    """`TensorFormat` of source/weights/model.h."""

    _fields_ = [
        *((name, c_int64) for name in ("layer", "expert")),
        *((name, c_int32) for name in ("kind", "bits", "group", "table", "scale", "offset", "zero")),
        *((name, c_int32) for name in ("has_zeros", "is_two_level", "has_signed_scales")),
    ]


class RowsStruct(Structure):
    """`GroupedRows` of source/grouped/pack_rows.h."""

    _fields_ = [
        *((name, c_int64) for name in ("layer", "expert")),
        *((name, c_int32) for name in ("kind", "packing")),
        *((name, c_int64) for name in ("first_row", "num_rows")),
        *((name, c_void_p) for name in ("codes", "scales", "offsets", "sub_scales", "sub_offsets", "zeros")),
        ("factor", c_float),
    ]


class LoraSliceStruct(Structure):
    """`LoraSource` of source/lora/adapter.h."""

    _fields_ = [
        ("layer", c_int64),
        *((name, c_int32) for name in ("target", "is_unused")),
        *((name, c_int64) for name in ("first_row", "num_rows", "rank")),
        *((name, c_void_p) for name in ("a", "b")),
    ]


class CacheKindStruct(Structure):
    """`CacheKind` of source/step/step.h."""

    _fields_ = [
        *((name, c_int64) for name in ("num_blocks", "blocks_per_slab", "window")),
        *((name, c_int64) for name in ("num_kv_heads", "head_dim", "value_dim")),
    ]


class CacheSlabsStruct(Structure):
    """`CacheSlabs` of source/step/step.h."""

    _fields_ = [
        ("memory", c_void_p),
        *((name, c_int64) for name in ("slab_bytes", "block_size", "num_kinds")),
        *((name, c_void_p) for name in ("kinds", "layer_kinds", "places", "states")),
        *((name, c_int64) for name in ("state_stride", "num_states")),
    ]


class StepInputsStruct(Structure):
    """`StepInputs` of source/step/step.h."""

    _fields_ = [
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "table_width", "num_logits")),
        *((name, c_void_p) for name in ("input_ids", "positions")),
        *((name, c_void_p * MAX_KINDS) for name in ("slot_mapping", "block_tables")),
        *((name, c_void_p) for name in ("query_starts", "lengths", "logits_rows", "cache")),
        *((name, c_void_p) for name in ("hidden", "logits", "argmax", "is_broken", "adapters", "slots")),
    ]


class DecodeSlots(Structure):
    """`DecodeSlots` of source/step/step.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("slots", "starts", "last_tokens", "num_known")),
        ("tables", c_void_p * MAX_KINDS),
        *((name, c_int64) for name in ("num_slots", "blocks_per_slot")),
        *((name, c_void_p) for name in ("cache", "rope_offsets", "adapters")),
    ]


class SlotSampling(Structure):
    """`SlotSampling` of source/sampling/sampling.h."""

    _fields_ = [*((name, c_void_p) for name in ("is_random", "draws", "seeds", "num_prompt"))]


class SamplingRows(Structure):
    """`SamplingRows` of source/sampling/sampling.h."""

    _fields_ = [
        ("logits", c_void_p),
        *((name, c_int64) for name in ("num_rows", "vocab_size")),
        *((name, c_void_p) for name in ("slots", "positions", "masks")),
        ("num_words", c_int64),
        *((name, c_void_p) for name in ("mask_rows", "token_ids", "is_broken")),
    ]


_MODEL = c_void_p  # made by `millrace_model_new`
_ADAPTER = c_void_p  # made by `millrace_adapter_new`
_MATRIX = (c_int64, c_int32, c_int64)  # layer, kind and expert: see `tensors.place`

# name -> (result, arguments)
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "is_supported": (c_int32, ()),
    "model_new": (_MODEL, (POINTER(ShapeStruct), POINTER(LayerStruct), c_int32, c_void_p, c_int32, c_int64)),
    "model_delete": (None, (_MODEL,)),
    # sizes of structs
    "shape_bytes": (c_int64, ()),
    "layer_shape_bytes": (c_int64, ()),
    "experts_shape_bytes": (c_int64, ()),
    "recurrent_shape_bytes": (c_int64, ()),
    "rows_bytes": (c_int64, ()),
    "format_bytes": (c_int64, ()),
    "draw_fields": (c_char_p, ()),
    # weights and tables
    "set_positions": (c_int32, (_MODEL, c_int64, c_int64, c_void_p, c_void_p, c_void_p)),
    "set_tensors": (c_int32, (_MODEL, POINTER(TensorStruct), c_int64, POINTER(c_int64))),
    "set_formats": (c_int32, (_MODEL, c_int64, POINTER(FormatStruct))),
    "set_columns": (c_int32, (_MODEL, *_MATRIX, c_void_p)),
    "set_rows": (c_int32, (_MODEL, POINTER(RowsStruct))),
    "encode_bf16_12bit": (c_int32, (_MODEL,)),
    "get_matrix": (c_int32, (_MODEL, *_MATRIX, c_void_p)),
    "product": (c_int32, (_MODEL, *_MATRIX, c_void_p, c_int64, c_void_p)),
    "weights_bytes": (c_int64, (_MODEL,)),
    "token_weights_bytes": (c_int64, (_MODEL,)),
    "can_screen": (c_int32, (_MODEL,)),
    "screen_bytes": (c_int64, (_MODEL,)),
    "state_bytes": (c_int64, (_MODEL,)),
    # adapters
    "reserve_adapters": (c_int32, (_MODEL, c_int64, c_int64)),
    "adapter_new": (_ADAPTER, (_MODEL, c_int32, c_int64, POINTER(LoraSliceStruct))),
    "adapter_delete": (None, (_ADAPTER,)),
    "adapter_bytes": (c_int64, (_ADAPTER,)),
    "use_adapter": (None, (_MODEL, c_int64, _ADAPTER)),
    # steps
    "step_bytes": (c_int64, (_MODEL, c_int64, c_int64)),
    "step": (c_int32, (_MODEL, POINTER(StepInputsStruct))),
    "decode": (c_int32, (_MODEL, POINTER(DecodeSlots), c_int64, c_void_p, c_void_p, c_void_p)),
    "norm": (None, (_MODEL, c_void_p, c_int64, c_void_p)),
    "head": (c_int32, (_MODEL, c_void_p, c_int64, c_void_p)),
    "route": (None, (POINTER(ExpertsStruct), c_void_p, c_void_p, c_int64, c_void_p, c_void_p)),
    "sample": (c_int32, (_MODEL, POINTER(SlotSampling), POINTER(SamplingRows))),
    # steps one after another
    "step_thread_id": (c_int32, (_MODEL,)),
    "begin": (c_int32, (_MODEL, c_int64, POINTER(DecodeSlots), POINTER(SlotSampling), c_int64)),
    "follow": (c_int32, (_MODEL, c_int64, POINTER(DecodeSlots), POINTER(SlotSampling), c_int64)),
    "wait": (c_int32, (_MODEL, c_int64, c_int64, c_void_p, c_void_p)),
    "drain": (None, (_MODEL,)),
    # threads and times
    "count_thread_times": (None, (_MODEL, c_void_p)),
    "limit_threads": (None, (_MODEL, c_int32, c_int32)),
    "time_phases": (None, (_MODEL, c_void_p)),
    # what the last step did
    "screen_candidates": (c_int64, (_MODEL,)),
    "screen_refined": (c_int64, (_MODEL,)),
    "is_split_by_rows": (c_int32, (_MODEL,)),
    "is_split": (c_int32, (_MODEL,)),
    "num_layers_before_split": (c_int32, (_MODEL,)),
    "is_streaming": (c_int32, (_MODEL,)),
    "kv_prefetched_bytes": (c_int64, (_MODEL,)),
    # for tests
    "use_plain_kernels": (None, (c_int32,)),
    "assume_split": (None, (_MODEL, c_int32)),
    "assume_retained": (None, (_MODEL, c_int64)),
    "set_join_delay": (None, (_MODEL, c_int32)),
}


def declare_functions(library: ctypes.CDLL) -> None:
    """Gives the functions of a library, `millrace_` before their names, the types of their arguments and results."""
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, f"millrace_{name}")
        function.restype, function.argtypes = result, arguments

"""ctypes bindings of the native library's C interface (source/step/api.cpp).

Each call releases the GIL, except `millrace_follow`: the event loop calls it, and it takes less time than reacquiring
the GIL.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_void_p
from functools import cache

from ..layout.sampling_fields import DRAWS
from . import build, machine
from .errors import NativeUnavailableError

ENVIRONMENT = "MILLRACE_INSTRUCTION_SET"  # forces an instruction set, for tests
MAX_KINDS = 8  # of cache blocks; as in source/step/step.h
EMULATED = {"avx512_bf16_emulated": "avx512", "amx_emulated": "avx512_bf16"}  # what each needs; for tests


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


def choose_instruction_set(requested: str | None = None) -> str:
    """The requested instruction set, by argument or environment, or the best that the machine has.

    Raises NativeUnavailableError if the machine lacks the requested one, or all of them.
    """
    requested = requested_instruction_set(requested)
    available = machine.instruction_sets()
    if requested is not None and EMULATED.get(requested) in available:
        return requested
    if requested is not None and requested not in available:
        raise NativeUnavailableError(f"instruction set {requested}: this machine has {', '.join(available) or 'none'}")
    if not available:
        raise NativeUnavailableError("the native step needs AVX2 and FMA, or AVX-512, on Linux")
    return requested or available[0]


def requested_instruction_set(requested: str | None) -> str | None:
    """The requested instruction set, by argument or environment; None if there is none."""
    return requested or os.environ.get(ENVIRONMENT) or None


def load_best(requested: str | None = None) -> tuple[str, ctypes.CDLL]:
    """The instruction set of `choose_instruction_set` and its library. Raises NativeUnavailableError.

    Falls back to the next best instruction set if none is requested and the compiler is too old for the best.
    """
    chosen = choose_instruction_set(requested)
    failures = []
    for name in (chosen,) if requested_instruction_set(requested) else machine.instruction_sets():
        found = _load_once(name)
        if not isinstance(found, NativeUnavailableError):
            return name, found
        failures.append(found)
    raise failures[0]


@cache
def _load_once(instruction_set: str) -> ctypes.CDLL | NativeUnavailableError:
    """The library, or why there is none. Cached, so that a failing compiler runs once and not once per model."""
    try:
        return load(instruction_set)
    except NativeUnavailableError as error:
        return error


@cache
def load(instruction_set: str) -> ctypes.CDLL:
    """The library with its functions' types. Raises NativeUnavailableError if it is neither found nor built."""
    try:
        path = str(build.library_path(instruction_set))
        library = ctypes.CDLL(path)
        setattr(library, "millrace_follow", ctypes.PyDLL(path).millrace_follow)  # noqa: B010
    except (build.BuildError, OSError) as error:
        raise NativeUnavailableError(f"native library ({instruction_set}) not available: {error}") from None
    model = c_void_p
    library.millrace_is_supported.restype = c_int32
    library.millrace_model_new.restype = model
    library.millrace_model_new.argtypes = [
        POINTER(ShapeStruct),
        POINTER(LayerStruct),
        c_int32,
        c_void_p,
        c_int32,
        c_int64,
    ]
    library.millrace_shape_bytes.restype = library.millrace_layer_shape_bytes.restype = c_int64
    library.millrace_experts_shape_bytes.restype = library.millrace_recurrent_shape_bytes.restype = c_int64
    library.millrace_state_bytes.argtypes = [model]
    library.millrace_state_bytes.restype = c_int64
    library.millrace_model_delete.argtypes = [model]
    library.millrace_model_delete.restype = None
    library.millrace_set_positions.argtypes = [model, c_int64, c_int64, c_void_p, c_void_p, c_void_p]
    library.millrace_set_positions.restype = c_int32
    library.millrace_set_tensors.argtypes = [model, POINTER(TensorStruct), c_int64, POINTER(c_int64)]
    library.millrace_set_tensors.restype = c_int32
    library.millrace_set_formats.argtypes = [model, c_int64, POINTER(FormatStruct)]
    library.millrace_set_formats.restype = c_int32
    library.millrace_set_columns.argtypes = [model, c_int64, c_int32, c_int64, c_void_p]
    library.millrace_set_columns.restype = c_int32
    library.millrace_set_rows.argtypes = [model, POINTER(RowsStruct)]
    library.millrace_set_rows.restype = c_int32
    library.millrace_product.argtypes = [model, c_int64, c_int32, c_int64, c_void_p, c_int64, c_void_p]
    library.millrace_product.restype = c_int32
    library.millrace_reserve_adapters.argtypes = [model, c_int64, c_int64]
    library.millrace_reserve_adapters.restype = c_int32
    library.millrace_adapter_new.argtypes = [model, c_int32, c_int64, POINTER(LoraSliceStruct)]
    library.millrace_adapter_new.restype = c_void_p
    library.millrace_adapter_delete.argtypes = library.millrace_adapter_bytes.argtypes = [c_void_p]
    library.millrace_adapter_delete.restype = None
    library.millrace_adapter_bytes.restype = c_int64
    library.millrace_use_adapter.argtypes = [model, c_int64, c_void_p]
    library.millrace_use_adapter.restype = None
    library.millrace_use_plain_kernels.argtypes = [c_int32]
    library.millrace_use_plain_kernels.restype = None
    library.millrace_rows_bytes.restype = library.millrace_format_bytes.restype = c_int64
    library.millrace_encode_bf16_12bit.argtypes = [model]
    library.millrace_encode_bf16_12bit.restype = c_int32
    library.millrace_get_matrix.argtypes = [model, c_int64, c_int32, c_int64, c_void_p]
    library.millrace_get_matrix.restype = c_int32
    library.millrace_weights_bytes.argtypes = [model]
    library.millrace_weights_bytes.restype = c_int64
    library.millrace_token_weights_bytes.argtypes = [model]
    library.millrace_token_weights_bytes.restype = c_int64
    library.millrace_screen_bytes.argtypes = [model]
    library.millrace_screen_bytes.restype = c_int64
    library.millrace_is_split_by_rows.argtypes = [model]
    library.millrace_is_split_by_rows.restype = c_int32
    library.millrace_is_split.argtypes = [model]
    library.millrace_is_split.restype = c_int32
    library.millrace_num_layers_before_split.argtypes = [model]
    library.millrace_num_layers_before_split.restype = c_int32
    library.millrace_assume_split.argtypes = [model, c_int32]
    library.millrace_assume_split.restype = None
    library.millrace_is_streaming.argtypes = [model]
    library.millrace_is_streaming.restype = c_int32
    library.millrace_can_screen.argtypes = [model]
    library.millrace_can_screen.restype = c_int32
    library.millrace_screen_candidates.argtypes = [model]
    library.millrace_screen_candidates.restype = c_int64
    library.millrace_screen_refined.argtypes = [model]
    library.millrace_screen_refined.restype = c_int64
    library.millrace_step_bytes.argtypes = [model, c_int64, c_int64]
    library.millrace_step_bytes.restype = c_int64
    library.millrace_time_phases.argtypes = [model, c_void_p]
    library.millrace_time_phases.restype = None
    library.millrace_step.argtypes = [model, POINTER(StepInputsStruct)]
    library.millrace_count_thread_times.argtypes = [model, c_void_p]
    library.millrace_count_thread_times.restype = None
    library.millrace_limit_threads.argtypes = [model, c_int32, c_int32]
    library.millrace_limit_threads.restype = None
    library.millrace_set_join_delay.argtypes = [model, c_int32]
    library.millrace_set_join_delay.restype = None
    library.millrace_assume_retained.argtypes = [model, c_int64]
    library.millrace_assume_retained.restype = None
    library.millrace_kv_prefetched_bytes.argtypes = [model]
    library.millrace_kv_prefetched_bytes.restype = c_int64
    library.millrace_step.restype = c_int32
    library.millrace_norm.argtypes = [model, c_void_p, c_int64, c_void_p]
    library.millrace_norm.restype = None
    library.millrace_head.argtypes = [model, c_void_p, c_int64, c_void_p]
    library.millrace_head.restype = c_int32
    library.millrace_decode.argtypes = [model, POINTER(DecodeSlots), c_int64, c_void_p, c_void_p, c_void_p]
    library.millrace_decode.restype = c_int32
    library.millrace_route.argtypes = [POINTER(ExpertsStruct), c_void_p, c_void_p, c_int64, c_void_p, c_void_p]
    library.millrace_route.restype = None
    library.millrace_sample.argtypes = [model, POINTER(SlotSampling), POINTER(SamplingRows)]
    library.millrace_sample.restype = c_int32
    library.millrace_step_thread_id.argtypes = [model]
    library.millrace_step_thread_id.restype = c_int32
    for add in (library.millrace_begin, library.millrace_follow):
        add.argtypes = [model, c_int64, POINTER(DecodeSlots), POINTER(SlotSampling), c_int64]
        add.restype = c_int32
    library.millrace_wait.argtypes = [model, c_int64, c_int64, c_void_p, c_void_p]
    library.millrace_wait.restype = c_int32
    library.millrace_drain.argtypes = [model]
    library.millrace_drain.restype = None
    if not library.millrace_is_supported():
        raise NativeUnavailableError(f"instruction set {instruction_set}: the processor lacks it")
    structs = (ShapeStruct, LayerStruct, ExpertsStruct, RecurrentStruct, RowsStruct, FormatStruct)
    mirrored = tuple(map(ctypes.sizeof, structs))
    sizes = ("shape", "layer_shape", "experts_shape", "recurrent_shape", "rows", "format")
    compiled = tuple(getattr(library, f"millrace_{name}_bytes")() for name in sizes)
    assert mirrored == compiled, f"structs of {mirrored} bytes: the library has {compiled}"
    library.millrace_draw_fields.restype = c_char_p
    names = library.millrace_draw_fields().decode()
    assert names.split() == [field.name for field in DRAWS], f"sampling fields of the library: {names}"
    return library

"""The kernel launches that the compile check compiles: one case for each configuration in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..layout import sampling_rows, step_state
from ..layout.layer_options import Activation, HeadNorms
from ..layout.work_lists import AttentionShape, extend_tiling
from ..triton import attention as triton_attention
from ..triton import attention_plan as triton_plan
from ..triton import attention_prologue as triton_prologue
from ..triton import block_copy as triton_copy
from ..triton import layers as triton_layers
from ..triton import logit_edits as triton_edits
from ..triton import sampling as triton_sampling
from ..triton import step_state as triton_step
from ..triton import token_scores as triton_scores

NUM_PROCESSORS = 132  # of an H200
LEAST_COPIED = 8  # head size from which loads are wide enough to be asynchronous copies
FP8_ARCH = 89  # the first architecture with e4m3
TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


StackBound = Literal["usual", "f32", "wide"]  # wide: extend of heads above 128 in 16 bits


@dataclass(frozen=True, slots=True)
class CompileCase:
    """A configuration in use: one launch of one kernel, or that of attention and of its lists."""

    name: str
    launch: Callable[[], object]  # on meta tensors
    copies_ahead: bool = False  # has loops over cached tokens, whose loads must be asynchronous
    uses_wgmma: bool = False  # must have warpgroup matrix instructions on sm_90
    least_arch: int = 80  # compute capability, as in `SHARED_BYTES`
    stack: StackBound = "usual"  # of attention: which bound `compile_check.STACK_BYTES` has for it


def all_cases(arch: int, head_dims: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[CompileCase]:
    """Every configuration in use on that chip, for these head sizes and types."""
    cases = step_cases() + [case for dtype in dtypes for case in layer_cases(dtype) + other_layer_cases(dtype)]
    kinds = _kinds_of(head_dims, dtypes)
    cases += [case for each in kinds for case in attention_cases(*each)]
    small = torch.float8_e4m3fn
    cases += [case for dim in head_dims for case in attention_cases(dim, torch.bfloat16, cache_dtype=small)]
    cases += [case for dim in head_dims if dim in DISTINCT_DIMS for case in group_cases(dim)]
    folded = [dim for dim in head_dims if dim <= triton_attention.MOST_FOLDED_DIM]
    cases += [case for each in kinds if each[0] in folded for case in folded_cases(*each)]
    cases += [case for dim in folded for case in folded_cases(dim, torch.bfloat16, small)[:2]]
    cases += [case for each in kinds for case in prologue_cases(arch, *each)]
    cases += [case for each in kinds if _is_distinct(*each) for case in other_prologue_cases(*each)]
    cases += copy_cases() + [case for dtype in dtypes for case in sampling_cases(dtype)]
    return [case for case in cases if arch >= case.least_arch]


def layer_cases(dtype: torch.dtype) -> list[CompileCase]:
    """Norms and activation at the widths of an 8B model."""
    x = _meta(64, 4096, dtype=dtype)
    weight = _meta(4096, dtype=dtype)
    q, _, _ = _qkv(32, 8, 128, dtype)
    name = TYPE_NAMES[dtype]
    return [
        CompileCase(f"rms_norm {name}", lambda: triton_layers.rms_norm(x, weight, 1e-5)),
        CompileCase(f"rms_norm heads {name}", lambda: triton_layers.rms_norm(q, weight[:128], 1e-6)),
        CompileCase(f"add_rms_norm {name}", lambda: triton_layers.add_rms_norm(x, x, weight, 1e-5)),
        CompileCase(f"gated silu {name}", lambda: triton_layers.gated(_meta(64, 2 * 14336, dtype=dtype), "silu")),
    ]


def other_layer_cases(dtype: torch.dtype) -> list[CompileCase]:
    """Norms with other weights, and the other activations."""
    x = _meta(64, 4096, dtype=dtype)
    exact, bias = _meta(4096, dtype=torch.float32), _meta(4096, dtype=dtype)
    q, _, _ = _qkv(32, 8, 128, dtype)
    weights = _meta(32, 128, dtype=dtype)  # a head has its own
    gate_up, params = _meta(64, 2 * 14336, dtype=dtype), _meta(2, dtype=torch.float32)
    name = TYPE_NAMES[dtype]
    activations: list[Activation] = ["gelu", "gelu_tanh", "relu", "relu2", "xielu", "swiglu_clamped"]
    gated, activated = triton_layers.gated, triton_layers.activated
    return [
        CompileCase(f"rms_norm exact {name}", lambda: triton_layers.rms_norm(x, exact, 1e-5)),
        CompileCase(f"rms_norm no weight {name}", lambda: triton_layers.rms_norm(x, None, 1e-5)),
        CompileCase(f"layer_norm {name}", lambda: triton_layers.layer_norm(x, bias, bias, 1e-5)),
        CompileCase(f"layer_norm no bias {name}", lambda: triton_layers.layer_norm(x, bias, None, 1e-5)),
        CompileCase(f"layer_norm heads {name}", lambda: triton_layers.layer_norm(q, weights, None, 1e-5)),
        *(
            CompileCase(f"gated {kind} {name}", partial(gated, gate_up, kind))
            for kind in activations
            if kind != "xielu"
        ),
        *(
            CompileCase(f"activated {kind} {name}", partial(activated, x, kind, params))
            for kind in activations
            if kind != "swiglu_clamped"
        ),
    ]


class AttentionOptions(NamedTuple):
    """What an attention launch is asked for besides."""

    window: int | None = None
    soft_cap: float | None = None
    is_fixed: bool = False
    has_sinks: bool = False
    has_alibi: bool = False
    chunk: int | None = None
    is_few: bool = False  # sequences: lists are made in other ways

    @property
    def name(self) -> str:
        names = ("window", "cap", "fixed", "sinks", "alibi", "chunk", "few")
        return "".join(f" {name}" for name, value in zip(names, self, strict=True) if value)


OPTIONS = (
    AttentionOptions(),
    AttentionOptions(window=4096),
    AttentionOptions(soft_cap=50.0),
    AttentionOptions(is_fixed=True),
    AttentionOptions(has_sinks=True),
    AttentionOptions(window=4096, soft_cap=50.0),  # Gemma 2
    AttentionOptions(window=128, has_sinks=True),  # gpt-oss
    AttentionOptions(has_alibi=True),
    AttentionOptions(chunk=8192),
    AttentionOptions(is_few=True),
)
# A head size for each row of the tables of tilings: others have the code of one of these, but for masks. f16 has that
# of bf16, but for the type in its instructions, with as many registers and as much memory. So all options are taken of
# bf16 and these sizes alone, and f16 of these sizes alone.
DISTINCT_DIMS = (64, 128, 256)
FEW_OPTIONS = (AttentionOptions(), AttentionOptions(window=4096, soft_cap=50.0))


def _is_distinct(head_dim: int, dtype: torch.dtype) -> bool:
    return head_dim in DISTINCT_DIMS and dtype == torch.bfloat16


def _kinds_of(head_dims: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[tuple[int, torch.dtype]]:
    return [(dim, dtype) for dim in head_dims for dtype in dtypes if dim in DISTINCT_DIMS or dtype != torch.float16]


def attention_cases(
    head_dim: int, dtype: torch.dtype, group: int = 4, block_size: int = 16, cache_dtype: torch.dtype | None = None
) -> list[CompileCase]:
    """Decode, and extend in a mixed batch, each with lists, with each of `OPTIONS`, or `FEW_OPTIONS`."""
    q, _, _ = _qkv(8 * group, 8, head_dim, dtype)
    tensors = (q, *_caches(8, block_size, head_dim, cache_dtype or dtype), _meta(64, 512, dtype=torch.int32))
    scales = _meta(8, dtype=torch.float32) if cache_dtype else None
    head_scores = _meta(8 * group, dtype=torch.float32)

    def shape_of(options: AttentionOptions) -> AttentionShape:
        types = (dtype, cache_dtype or dtype)
        return AttentionShape(8 * group, 8, head_dim, *types, (options.window,), options.is_fixed)

    def attend(kind: str, options: AttentionOptions) -> None:
        num_sequences = 4 if options.is_few else 64
        lengths, starts = (_meta(num_sequences + extra, dtype=torch.int32) for extra in (0, 1))
        plan = triton_plan.plan_attention(
            shape_of(options), lengths, None if kind == "decode" else starts, 64, NUM_PROCESSORS
        )
        work = plan.decode[options.window] if kind == "decode" else plan.extend[options.window]
        out = torch.empty_like(q)
        sinks, alibi = (head_scores if is_asked else None for is_asked in (options.has_sinks, options.has_alibi))
        triton_attention.attend(
            out, work, plan.partials, *tensors, head_dim**-0.5, options.window, options.soft_cap, scales, scales,
            sinks, alibi, options.chunk,
        )  # fmt: skip

    def case(kind: str, options: AttentionOptions) -> CompileCase:
        types = TYPE_NAMES[dtype] + (f" {TYPE_NAMES[cache_dtype]}" if cache_dtype else "")
        return CompileCase(
            f"{kind}{options.name} {head_dim} {types}",
            lambda: attend(kind, options),
            copies_ahead=head_dim >= LEAST_COPIED,
            uses_wgmma=kind == "extend"
            and dtype != torch.float32
            and extend_tiling(shape_of(options), 90).block_m >= 64,
            least_arch=90 if cache_dtype else 80,
            stack="f32" if dtype == torch.float32 else "wide" if kind == "extend" and head_dim > 128 else "usual",
        )

    asked = OPTIONS if _is_distinct(head_dim, dtype) else FEW_OPTIONS
    return [case(kind, options) for options in asked for kind in ("decode", "extend")]


def group_cases(head_dim: int) -> list[CompileCase]:
    """Other numbers of query heads to a key/value head, as models have, in bfloat16, over a cache of either type.

    The group size changes register use: with 2 heads, two programs instead of three once fitted, which made an H200 a
    third slower.
    """
    sizes = [(group, cache) for group in (1, 2, 8) for cache in (None, torch.float8_e4m3fn)]
    return [
        replace(case, name=f"{case.name} group {group}")
        for group, cache in sizes
        for case in attention_cases(head_dim, torch.bfloat16, group, cache_dtype=cache)[:2]
    ]


def folded_cases(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype | None = None) -> list[CompileCase]:
    """Decode that does its own prologue: of Qwen3, of Llama, and of what costs other registers."""
    size = f"{head_dim} {TYPE_NAMES[dtype]}" + (f" {TYPE_NAMES[cache_dtype]}" if cache_dtype else "")
    weight, exact = _meta(head_dim, dtype=dtype), _meta(head_dim, dtype=torch.float32)
    norms, wide = HeadNorms(q=weight, k=weight, eps=1e-6), HeadNorms(q=exact, k=exact, eps=1e-6)
    forms: dict[str, tuple[int, HeadNorms | None, AttentionOptions]] = {
        "group 2 norms": (2, norms, AttentionOptions()),
        "group 4": (4, None, AttentionOptions()),
        "group 1 norms": (1, norms, AttentionOptions()),
        "group 8": (8, None, AttentionOptions()),
        "group 4 exact norms window": (4, wide, AttentionOptions(window=4096)),
        "group 2 window cap": (2, None, AttentionOptions(window=4096, soft_cap=50.0)),
        "group 8 window sinks": (8, None, AttentionOptions(window=128, has_sinks=True)),
    }
    return [
        CompileCase(
            f"folded {name} {size}",
            partial(_folded, head_dim, dtype, cache_dtype or dtype, *form),
            copies_ahead=head_dim >= LEAST_COPIED,
            least_arch=90 if cache_dtype else 80,
            stack="f32" if dtype == torch.float32 else "usual",
        )
        for name, form in list(forms.items())[: None if _is_distinct(head_dim, dtype) else 2]
    ]


def _folded(
    head_dim: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    group: int,
    norms: HeadNorms | None,
    options: AttentionOptions,
) -> Tensor:
    num_rows, num_groups = triton_attention.MOST_FOLDED_ROWS, 8
    qkv = _meta(num_rows, (group + 2) * num_groups, head_dim, dtype=dtype)
    table, numbers = _meta(4096, head_dim // 2, dtype=torch.float32), _meta(num_rows, dtype=torch.int64)
    lengths, blocks = _meta(num_rows, dtype=torch.int32), _meta(num_rows, 512, dtype=torch.int32)
    scales = None if cache_dtype == dtype else _meta(num_groups, dtype=torch.float32)
    shape = AttentionShape(group * num_groups, num_groups, head_dim, dtype, cache_dtype, (options.window,))
    return triton_attention.prologue_decode(
        qkv, norms, table, table, numbers, *_caches(num_groups, 16, head_dim, cache_dtype), numbers, None, blocks,
        lengths, head_dim**-0.5, options.window, soft_cap=options.soft_cap,
        sinks=_meta(group * num_groups, dtype=torch.float32) if options.has_sinks else None,
        k_scale=scales, v_scale=scales,
        plan=triton_plan.plan_attention(shape, lengths, None, num_rows, NUM_PROCESSORS),
    )  # fmt: skip


def step_cases() -> list[CompileCase]:
    """The state of 256 sequences of at most 32k tokens, and a step of 256 rows and 1,024 tokens."""
    ints, longs = torch.int32, torch.int64
    tables = _meta(256, 2048, dtype=ints)
    slots = step_state.SlotState(_meta(256, step_state.STATE_WIDTH, dtype=ints), _meta(256, 32768, dtype=ints), tables)
    tokens, rows, row_ids = _meta(1024, dtype=longs), _meta(256, dtype=ints), _meta(256, dtype=longs)
    starts, adapters = _meta(257, dtype=ints), _meta(1024, dtype=ints)
    of_kinds = _meta(1, 1024, dtype=longs), _meta(1, 256, 2048, dtype=ints)
    buffers = step_state.StepBuffers(
        tokens, tokens, tokens, tables, starts, rows, row_ids, rows, rows, rows, adapters, *of_kinds, row_ids
    )
    diff, out = _meta(8192, dtype=ints), _meta(2, 256, dtype=ints)
    offset = replace(slots, has_rope_offsets=True, has_adapters=True)
    recurrent = replace(slots, has_states=True)
    two_kinds = replace(slots, tables=_meta(512, 2048, dtype=ints))
    return [
        CompileCase("step news", lambda: triton_step.apply_updates(diff, slots)),
        CompileCase("step inputs", lambda: triton_step.make_inputs(diff, slots, buffers, 16)),
        CompileCase("step inputs recurrent", lambda: triton_step.make_inputs(diff, recurrent, buffers, 16)),
        CompileCase("step inputs of two kinds", lambda: triton_step.make_inputs(diff, two_kinds, buffers, 16)),
        CompileCase("step inputs longrope adapters", lambda: triton_step.make_inputs(diff, offset, buffers, 16)),
        CompileCase("step settle", lambda: triton_step.note_tokens(out, row_ids, buffers, slots)),
    ]


def prologue_cases(arch: int, head_dim: int, dtype: torch.dtype) -> list[CompileCase]:
    """With and without norms of heads, with half of a head rotated, and with an fp8 cache if the chip has fp8."""
    size, half = f"{head_dim} {TYPE_NAMES[dtype]}", head_dim // 2
    weight = _meta(head_dim, dtype=dtype)
    norms = HeadNorms(q=weight, k=weight, eps=1e-6)
    cases = [
        CompileCase(f"prologue {size}", lambda: _prologue(head_dim, dtype, half)),
        CompileCase(f"prologue norms {size}", lambda: _prologue(head_dim, dtype, half, norms)),
        CompileCase(f"prologue half rotated {size}", lambda: _prologue(head_dim, dtype, half // 2)),
    ]
    if arch >= FP8_ARCH:
        cases.append(
            CompileCase(f"prologue norms fp8 {size}", lambda: _prologue(head_dim, dtype, half, norms, is_fp8=True))
        )
    return cases


def other_prologue_cases(head_dim: int, dtype: torch.dtype) -> list[CompileCase]:
    """The other norms of heads, no rotation, and factors of queries."""
    size, half = f"{head_dim} {TYPE_NAMES[dtype]}", head_dim // 2
    exact = _meta(head_dim, dtype=torch.float32)
    q, k = (_meta(heads, head_dim, dtype=dtype) for heads in (32, 8))
    forms = {
        "exact norms": HeadNorms(q=exact, k=exact, eps=1e-6),
        "layer norms of heads": HeadNorms(q=q, k=k, eps=1e-6, kind="layer"),
        "norms of rows": HeadNorms(q=q, k=k, eps=1e-6, is_over_row=True),
        "norms after rope": HeadNorms(q=exact, k=exact, eps=1e-6, is_after_rope=True),
        "norms without weight after rope": HeadNorms(q=None, k=None, eps=1e-6, is_after_rope=True),
    }
    return [
        *(
            CompileCase(f"prologue {name} {size}", partial(_prologue, head_dim, dtype, half, norms))
            for name, norms in forms.items()
        ),
        CompileCase(f"prologue not rotated {size}", lambda: _prologue(head_dim, dtype, 0)),
        CompileCase(
            f"prologue not rotated norms {size}", lambda: _prologue(head_dim, dtype, 0, HeadNorms(q=q, k=k, eps=1e-6))
        ),
        CompileCase(f"prologue factors {size}", lambda: _prologue(head_dim, dtype, half, has_factors=True)),
    ]


def _prologue(
    head_dim: int,
    dtype: torch.dtype,
    num_pairs: int,
    norms: HeadNorms | None = None,
    *,
    is_fp8: bool = False,
    has_factors: bool = False,
) -> Tensor:
    num_heads, num_groups = 32, 8
    qkv = _meta(64, num_heads + 2 * num_groups, head_dim, dtype=dtype)
    kv = _meta(1024, 32, 2, num_groups, 16, head_dim, dtype=torch.float8_e4m3fn if is_fp8 else dtype)
    table = _meta(4096, num_pairs, dtype=torch.float32) if num_pairs else None
    numbers = _meta(64, dtype=torch.int64)
    scale = _meta(num_groups, dtype=torch.float32) if is_fp8 else None
    factors = _meta(4096, dtype=torch.float32) if has_factors else None
    caches = kv[:, 5, 0], kv[:, 5, 1]
    return triton_prologue.attention_prologue(
        qkv, norms, table, table, numbers, *caches, numbers, scale, scale, factors
    )


def copy_cases() -> list[CompileCase]:
    """Blocks of 16 tokens of an 8B model, 2 MiB each."""
    data, ids = _meta(1024, 32, 2, 8, 16, 128, dtype=torch.bfloat16), _meta(64, dtype=torch.int64)
    return [CompileCase("copy_blocks", lambda: triton_copy.copy_blocks(data, 0, ids, ids))]


def sampling_cases(dtype: torch.dtype) -> list[CompileCase]:
    """The sampling kernels at the vocabulary of Qwen3, and at one whose rows are not aligned."""
    return [
        *_sampling_cases(dtype, 151_936, f"{TYPE_NAMES[dtype]}"),
        *_sampling_cases(dtype, 50_257, f"50257 {TYPE_NAMES[dtype]}")[:3],
    ]


def _sampling_cases(dtype: torch.dtype, vocab_size: int, name: str) -> list[CompileCase]:
    logits, rows = _meta(64, vocab_size, dtype=dtype), _meta(256, sampling_rows.WIDTH, dtype=torch.int32)
    slots, bounds = _meta(64, dtype=torch.int64), _meta(64, 2, dtype=torch.float32)
    counts, ends = _meta(256, vocab_size, dtype=torch.int16), _meta(256, 136, dtype=torch.int32)
    biased, bias = _meta(256, 1024, dtype=torch.int32), _meta(256, 1024, dtype=torch.float32)
    masks, forced = _meta(64, -(-vocab_size // 32), dtype=torch.int32), _meta(64, dtype=torch.int32)
    lists = (counts, biased, bias, ends)

    def edit(has_masks: bool) -> Tensor:
        guided = (masks, forced) if has_masks else (None, None)
        return triton_edits.edit(logits, rows, slots, slots, *lists, *guided)

    return [
        CompileCase(f"choose {name}", lambda: triton_sampling.choose(logits, rows, slots, slots)),
        CompileCase(f"choose truncated {name}", lambda: triton_sampling.choose_truncated(logits, rows, slots, slots)),
        CompileCase(f"edit {name}", lambda: edit(False)),
        CompileCase(f"edit masks {name}", lambda: edit(True)),
        CompileCase(f"force {name}", lambda: triton_edits.force(slots, forced)),
        CompileCase(f"count_tokens {name}", lambda: triton_edits.count_tokens(counts, rows, slots, slots)),
        CompileCase(f"score {name}", lambda: triton_scores.score(logits, slots, slots, 20)),
        CompileCase(f"score drawn {name}", lambda: triton_scores.score(logits, slots, slots, 20, rows, slots, bounds)),
    ]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _qkv(num_heads: int, num_groups: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one fused projection of 64 tokens."""
    heads = _meta(64, num_heads + 2 * num_groups, head_dim, dtype=dtype)
    keys_end = num_heads + num_groups
    return heads[:, :num_heads], heads[:, num_heads:keys_end], heads[:, keys_end:]


def _caches(num_groups: int, block_size: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One layer of 32, block-major: [N, layers, 2, G, B, D]."""
    kv = _meta(1024, 32, 2, num_groups, block_size, head_dim, dtype=dtype)
    return kv[:, 5, 0], kv[:, 5, 1]

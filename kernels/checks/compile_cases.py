"""What the compile check compiles of the kernels around attention: one case for each shipped configuration."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..layout import sampling_rows
from ..triton import attention_prologue as triton_prologue
from ..triton import block_copy as triton_copy
from ..triton import logit_edits as triton_edits
from ..triton import sampling as triton_sampling
from ..triton import thresholds as triton_thresholds
from .compile_check import TYPE_NAMES, Case

FP8_ARCH = 89  # the first whose compiler knows e4m3


def prologue_cases(
    arch: int, head_dim: int, dtype: torch.dtype, num_heads: int = 32, num_groups: int = 8
) -> list[Case]:
    """With and without norms of heads, half of a head rotated, and an fp8 cache where the chip has it."""

    def prologue(num_pairs: int, has_norms: bool, is_fp8: bool) -> Tensor:
        num_heads, num_groups = 32, 8
        qkv = _meta(64, num_heads + 2 * num_groups, head_dim, dtype=dtype)
        kv = _meta(1024, 32, 2, num_groups, 16, head_dim, dtype=torch.float8_e4m3fn if is_fp8 else dtype)
        norm = _meta(head_dim, dtype=dtype) if has_norms else None
        table, numbers = _meta(4096, num_pairs, dtype=torch.float32), _meta(64, dtype=torch.int64)
        scale = _meta(num_groups, dtype=torch.float32) if is_fp8 else None
        caches = kv[:, 5, 0], kv[:, 5, 1]
        return triton_prologue.attention_prologue(
            qkv, norm, norm, 1e-6, table, table, numbers, *caches, numbers, scale, scale
        )

    size, half = f"{head_dim} {TYPE_NAMES[dtype]}", head_dim // 2
    cases = [
        Case(f"prologue {size}", lambda: prologue(half, False, False)),
        Case(f"prologue norms {size}", lambda: prologue(half, True, False)),
        Case(f"prologue half rotated {size}", lambda: prologue(half // 2, False, False)),
    ]
    if arch >= FP8_ARCH:
        cases.append(Case(f"prologue norms fp8 {size}", lambda: prologue(half, True, True)))
    return cases


def copy_cases() -> list[Case]:
    """Blocks of 16 tokens of an 8B model, 2 MiB each."""
    data, ids = _meta(1024, 32, 2, 8, 16, 128, dtype=torch.bfloat16), _meta(64, dtype=torch.int64)
    return [Case("copy_blocks", lambda: triton_copy.copy_blocks(data, 0, ids, ids))]


def sampling_cases(dtype: torch.dtype) -> list[Case]:
    """The sampler's kernels at the vocabulary of Qwen3, and at one whose rows are not aligned."""
    return [
        *_sampling_cases(dtype, 151_936, f"{TYPE_NAMES[dtype]}"),
        *_sampling_cases(dtype, 50_257, f"50257 {TYPE_NAMES[dtype]}")[:3],
    ]


def _sampling_cases(dtype: torch.dtype, vocab_size: int, name: str) -> list[Case]:
    logits, rows = _meta(64, vocab_size, dtype=dtype), _meta(256, sampling_rows.WIDTH, dtype=torch.int32)
    slots, least = _meta(64, dtype=torch.int64), _meta(64, dtype=torch.float32)
    counts, ends = _meta(256, vocab_size, dtype=torch.int16), _meta(256, 136, dtype=torch.int32)
    biased, bias = _meta(256, 1024, dtype=torch.int32), _meta(256, 1024, dtype=torch.float32)
    masks = _meta(64, -(-vocab_size // 32), dtype=torch.int32)
    lists = (counts, biased, bias, ends)

    def edit(has_masks: bool) -> Tensor:
        guided = (masks, slots) if has_masks else (None, None)
        return triton_edits.edit(logits, rows, slots, slots, *lists, *guided)

    return [
        Case(f"choose {name}", lambda: triton_sampling.choose(logits, rows, slots, slots)),
        Case(f"choose cut {name}", lambda: triton_sampling.choose(logits, rows, slots, slots, least)),
        Case(f"thresholds {name}", lambda: triton_thresholds.thresholds(logits, rows, slots)),
        Case(f"edit {name}", lambda: edit(False)),
        Case(f"edit masks {name}", lambda: edit(True)),
        Case(f"count_tokens {name}", lambda: triton_edits.count_tokens(counts, rows, slots, slots)),
        Case(f"score {name}", lambda: triton_sampling.score(logits, slots, slots, 20)),
        Case(f"score drawn {name}", lambda: triton_sampling.score(logits, slots, slots, 20, rows, slots, least)),
    ]


def all_cases(arch: int, head_dims: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Case]:
    """Every shipped configuration for that chip."""
    prologues = [case for dim in head_dims for dtype in dtypes for case in prologue_cases(arch, dim, dtype)]
    return prologues + copy_cases() + [case for dtype in dtypes for case in sampling_cases(dtype)]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

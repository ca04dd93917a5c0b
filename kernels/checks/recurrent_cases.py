"""The launches of recurrent layers that the checks compile: those of Qwen3-Next, Granite 4 H and LFM2."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..reference.recurrent import SequenceRows
from ..triton.recurrent import launches
from .compile_cases import TYPE_NAMES, CompileCase

STATES: dict[str, tuple[int, int, int, int, bool]] = {  # groups, heads, sizes of keys and values, and the rule
    "Qwen3-Next": (16, 32, 128, 128, True),
    "Granite 4 H": (1, 48, 128, 64, False),
    "odd": (2, 6, 80, 72, True),
}
CHANNELS = {"Qwen3-Next": (8192, 4), "LFM2": (2048, 3), "odd": (200, 4)}
STEPS = ((1, 1), (64, 64), (256, 256), (4, 2048))  # sequences and tokens


def recurrent_cases(dtype: torch.dtype) -> list[CompileCase]:
    """The recurrence, which is in f32 for any dtype, and the convolution, for each step."""
    name = TYPE_NAMES[dtype]
    return [
        *(
            CompileCase(f"recur {model} {step[1]}", partial(_recur, *sizes, *step))
            for model, sizes in STATES.items()
            for step in STEPS
        ),
        *(
            CompileCase(f"recurrent gates {model} {step[1]} {name}", partial(_inputs, *sizes, *step, dtype))
            for model, sizes in STATES.items()
            for step in STEPS[1:2]
        ),
        *(
            CompileCase(f"conv {model} {step[1]} {name}", partial(_convolve, *sizes, *step, dtype))
            for model, sizes in CHANNELS.items()
            for step in STEPS
        ),
    ]


def _inputs(
    groups: int, heads: int, key_dim: int, value_dim: int, is_delta: bool, _: int, num_tokens: int, dtype: torch.dtype
) -> None:
    width = 2 * groups * key_dim + heads * value_dim
    each, head = _meta(num_tokens, heads, dtype=dtype), _meta(heads)
    if is_delta:
        launches.delta_inputs(_meta(num_tokens, width), each, each, head, head, groups, key_dim)
    else:
        launches.mamba_inputs(_meta(num_tokens, width), each, head, head, (0.0, float("inf")), groups, key_dim)
    x, gate = _meta(num_tokens, heads, value_dim), _meta(num_tokens, heads * value_dim, dtype=dtype)
    launches.gated_norm(x, gate, _meta(value_dim, dtype=dtype), 1e-6, is_gated_first=not is_delta)
    whole = _meta(heads * value_dim, dtype=dtype)
    launches.gated_norm(x.view(num_tokens, 1, -1), gate, whole, 1e-6, is_gated_first=not is_delta)


def _recur(
    groups: int, heads: int, key_dim: int, value_dim: int, is_delta: bool, num_rows: int, num_tokens: int
) -> Tensor:
    q, k = (_meta(num_tokens, groups, key_dim) for _ in range(2))
    rates = _meta(num_tokens, heads)
    states = _meta(256, 3, heads, key_dim, value_dim)[:, 1]
    v = _meta(num_tokens, heads, value_dim)
    return launches.recur(states, q, k, v, rates, rates if is_delta else None, _rows(num_rows))


def _convolve(channels: int, width: int, num_rows: int, num_tokens: int, dtype: torch.dtype) -> Tensor:
    tails = _meta(256, 3, width - 1, channels, dtype=dtype)[:, 1]
    weight = _meta(channels, width, dtype=dtype)
    return launches.causal_conv(_meta(num_tokens, channels, dtype=dtype), tails, weight, None, _rows(num_rows))


def _rows(num_rows: int) -> SequenceRows:
    sizes = {torch.int64: num_rows, torch.int32: num_rows + 1}
    slots, starts = (_meta(size, dtype=dtype) for dtype, size in sizes.items())
    return SequenceRows(slots, starts, _meta(num_rows, dtype=torch.int32))


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

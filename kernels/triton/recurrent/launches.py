"""Launches of recurrent layers: a causal convolution, the recurrence of delta rule and Mamba-2, and what is beside it.

Their twins are in `kernels/reference/recurrent.py`; the kernels, and how they work, are in `convolution.py`,
`gates.py`, `recurrence.py` and `chunks.py`. Nothing is read by the host. All sizes follow from the number of tokens and
sequences.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import torch
from torch import Tensor

import triton

from ...reference.recurrent import SequenceRows
from ..launch import check_dtype, early_launch, next_power_of_2
from .chunks import chunk_kernel, pairs_kernel
from .convolution import conv_kernel, tail_kernel
from .gates import gated_norm_kernel, inputs_kernel
from .recurrence import token_kernel

CONV_TOKENS, CONV_CHANNELS = 8, 128  # of a program: 8 sums a thread
STATE_NUMBERS = 4096  # of a program: 32 a thread
LEAST_VALUES = 8  # of a program: 32 bytes of a row
CHUNK = 32  # tokens; see `chunks.py`. With 64 registers spill
CHUNK_VALUES = 16  # columns of the state in a program of chunks
CHUNK_WARPS, PAIRS_WARPS = 8, 4
LENGTH_EPS = 1e-6  # added to the squared length of queries and keys
NORMED_A_WARP = 256  # numbers of a row: 8 a thread
LEAST_CHUNKED = 17  # new tokens of a sequence in chunks. With fewer, one token after another takes no longer


def causal_conv(x: Tensor, tails: Tensor, weight: Tensor, bias: Tensor | None, step: SequenceRows) -> Tensor:
    """See `RecurrentKernels.causal_conv`."""
    check_dtype(x)
    (num_tokens, channels), num_rows = x.shape, len(step.slots)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not num_tokens or not num_rows:
        return out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    assert tails.stride(2) == 1 and weight.is_contiguous() and tails.dtype == x.dtype
    where = (step.slots, step.query_starts, step.lengths)
    sizes = (channels, x.stride(0), tails.stride(0), tails.stride(1))
    block, block_t = min(CONV_CHANNELS, next_power_of_2(channels)), min(CONV_TOKENS, next_power_of_2(num_tokens))
    blocks, options = triton.cdiv(channels, block), early_launch(x.device)
    conv_kernel[(triton.cdiv(num_tokens, block_t), blocks)](
        out, x, tails, weight, bias, *where, num_tokens, num_rows, *sizes,
        WIDTH=weight.shape[1], ROWS=next_power_of_2(num_rows), BLOCK_T=block_t, BLOCK=block,
        enable_fp_fusion=True, **options,
    )  # fmt: skip
    tail_kernel[(num_rows, blocks)](
        x, tails, *where, *sizes, KEPT=tails.shape[1], BLOCK=block, enable_fp_fusion=True, **options
    )
    return out


def delta_inputs(
    mixed: Tensor, step: Tensor, rate: Tensor, decay: Tensor, step_bias: Tensor, groups: int, key_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `RecurrentKernels.delta_inputs`. A program for each group of a token, and for each head."""
    q, k, v, log_decay = _empty_inputs(mixed, decay, groups, key_dim)
    beta = torch.empty_like(log_decay)
    _launch_inputs(q, k, None, v, log_decay, beta, mixed, step, rate, decay, step_bias, (0.0, 0.0))
    return q, k, v, log_decay, beta


def mamba_inputs(
    mixed: Tensor,
    step: Tensor,
    decay: Tensor,
    step_bias: Tensor,
    step_limit: tuple[float, float],
    groups: int,
    key_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `RecurrentKernels.mamba_inputs`. A program for each group of a token, and for each head."""
    q, k, v, log_decay = _empty_inputs(mixed, decay, groups, key_dim)
    x = torch.empty_like(v)
    _launch_inputs(q, k, x, v, log_decay, None, mixed, step, None, decay, step_bias, step_limit)
    return q, k, x, v, log_decay


def _empty_inputs(mixed: Tensor, decay: Tensor, groups: int, key_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_tokens, num_heads = len(mixed), len(decay)
    value_dim = (mixed.shape[1] - 2 * groups * key_dim) // num_heads
    shapes = (groups, key_dim), (groups, key_dim), (num_heads, value_dim), (num_heads,)
    q, k, v, log_decay = (torch.empty(num_tokens, *shape, dtype=torch.float32, device=mixed.device) for shape in shapes)
    return q, k, v, log_decay


def _launch_inputs(
    q: Tensor,
    k: Tensor,
    x: Tensor | None,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    mixed: Tensor,
    step: Tensor,
    rate: Tensor | None,
    decay: Tensor,
    step_bias: Tensor,
    step_limit: tuple[float, float],
) -> None:
    (num_tokens, groups, key_dim), (_, num_heads, value_dim) = q.shape, v.shape
    assert mixed.dtype == torch.float32 and mixed.stride(1) == step.stride(1) == 1
    if not num_tokens:
        return
    inputs_kernel[(num_tokens, groups + num_heads)](
        q, k, x, v, log_decay, beta, mixed, step, rate, decay, step_bias, groups, num_heads,
        *map(float, step_limit), key_dim**-0.5, LENGTH_EPS,
        mixed.stride(0), step.stride(0), 0 if rate is None else rate.stride(0),
        IS_DELTA=beta is not None, KEYS=key_dim, VALUES=value_dim,
        BLOCK_K=next_power_of_2(key_dim), BLOCK_V=next_power_of_2(value_dim), num_warps=1, enable_fp_fusion=True,
        **early_launch(mixed.device),
    )  # fmt: skip


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, is_gated_first: bool) -> Tensor:
    """See `RecurrentKernels.gated_norm`. A program for each group of a token."""
    check_dtype(gate)
    num_tokens, num_groups, size = x.shape
    assert x.is_contiguous() and x.dtype == torch.float32 and gate.stride(1) == 1 and weight.is_contiguous()
    out = torch.empty(num_tokens, num_groups * size, dtype=gate.dtype, device=x.device)
    if not num_tokens:
        return out
    block = next_power_of_2(size)
    gated_norm_kernel[(num_tokens, num_groups)](
        out, x, gate, weight, eps, gate.stride(0), size if weight.numel() > size else 0, num_groups,
        D=size, BLOCK=block, IS_GATED_FIRST=is_gated_first, num_warps=max(1, min(8, block // NORMED_A_WARP)),
        enable_fp_fusion=True, **early_launch(x.device),
    )  # fmt: skip
    return out


def recur(
    states: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None, step: SequenceRows
) -> Tensor:
    """See `RecurrentKernels.recur`. A program for some columns of each head of each sequence.

    Prompts go in chunks, unless `step.is_fixed`: those round otherwise than one token after another.
    """
    num_tokens, num_heads, value_dim = v.shape
    groups, key_dim = k.shape[1:]
    num_rows = len(step.slots)
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    if not num_tokens or not num_rows:
        return out.zero_()
    q, k, v, log_decay = (one.contiguous() for one in (q, k, v, log_decay))
    beta = None if beta is None else beta.contiguous()
    assert states.dtype == torch.float32 and states.stride(3) == 1 and max(v.numel(), k.numel()) < 1 << 31
    block_k = next_power_of_2(key_dim)
    block_v = max(LEAST_VALUES, min(STATE_NUMBERS // block_k, next_power_of_2(value_dim)))
    has_chunks = not step.is_fixed and num_tokens >= LEAST_CHUNKED and num_tokens > num_rows
    if has_chunks:
        _recur_in_chunks(out, states, q, k, v, log_decay, beta, step)
    token_kernel[(num_rows, num_heads, triton.cdiv(value_dim, block_v))](
        out, states, q, k, v, log_decay, beta, step.slots, step.query_starts, step.lengths,
        num_tokens, groups, num_heads, states.stride(0), states.stride(1), states.stride(2),
        MOST=LEAST_CHUNKED if has_chunks else 0, KEYS=key_dim, VALUES=value_dim, BLOCK_K=block_k, BLOCK_V=block_v,
        enable_fp_fusion=True, **early_launch(v.device),
    )  # fmt: skip
    return out


def _recur_in_chunks(
    out: Tensor,
    states: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    step: SequenceRows,
) -> None:
    """As `recur`, for sequences of at least LEAST_CHUNKED new tokens; leaves the others to `token_kernel`."""
    num_tokens, num_heads, value_dim = v.shape
    groups, key_dim = k.shape[1:]
    num_rows, options = len(step.slots), early_launch(v.device)
    sizes = {"LEAST": LEAST_CHUNKED, "KEYS": key_dim, "BLOCK_K": max(16, next_power_of_2(key_dim)), "CHUNK": CHUNK}
    seen = torch.empty(num_tokens, num_heads, CHUNK, dtype=torch.float32, device=v.device)
    inverses = None if beta is None else torch.empty_like(seen)
    pairs_kernel[(num_tokens // CHUNK + num_rows, num_heads)](
        inverses, seen, q, k, log_decay, beta, step.query_starts, num_rows, groups, num_heads,
        ROWS=next_power_of_2(num_rows), num_warps=PAIRS_WARPS, enable_fp_fusion=True, **sizes, **options,
    )  # fmt: skip
    chunk_kernel[(num_rows, num_heads, triton.cdiv(value_dim, CHUNK_VALUES))](
        out, states, q, k, v, log_decay, beta, inverses, seen, step.slots, step.query_starts, step.lengths,
        groups, num_heads, states.stride(0), states.stride(1), states.stride(2),
        VALUES=value_dim, BLOCK_V=CHUNK_VALUES, num_warps=CHUNK_WARPS, num_stages=1, enable_fp_fusion=True,
        **sizes, **options,
    )  # fmt: skip

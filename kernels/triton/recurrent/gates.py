"""Triton kernels beside the recurrence of a layer: what it reads of the layer's products, and the norm behind it.

A program has one head, or one row of the norm, so no sum depends on what else is in a step.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ..launch import start_early


@triton.jit
def inputs_kernel(
    q, k, x, v, log_decay, beta, mixed, step, rate, decay, step_bias, groups, heads, low, high, scale, eps,
    mixed_row, step_row, rate_row,
    IS_DELTA: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    IS_EARLY: tl.constexpr,
):  # fmt: skip
    """A token's queries and keys of one group, or its values, decay and rate of one head."""
    start_early(IS_EARLY)
    token, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = mixed + token * mixed_row
    keys = groups * KEYS
    if program < groups:
        i = tl.arange(0, BLOCK_K)
        is_key = i < KEYS
        first = row + program * KEYS + i
        if not IS_DELTA:  # behind the values, and keys before queries
            first += heads * VALUES
        one = silu(tl.load(first, mask=is_key, other=0.0))
        other = silu(tl.load(first + keys, mask=is_key, other=0.0))
        place = (token * groups + program) * KEYS + i
        if IS_DELTA:
            one = one * tl.rsqrt(tl.sum(one * one, axis=0) + eps) * scale
            other = other * tl.rsqrt(tl.sum(other * other, axis=0) + eps)
            tl.store(q + place, one, mask=is_key)
            tl.store(k + place, other, mask=is_key)
        else:
            tl.store(k + place, one, mask=is_key)
            tl.store(q + place, other, mask=is_key)
    else:  # names are not those above: their shapes differ
        head = program - groups
        j = tl.arange(0, BLOCK_V)
        is_value = j < VALUES
        source = row + head * VALUES + j
        if IS_DELTA:
            source += 2 * keys
        value = silu(tl.load(source, mask=is_value, other=0.0))
        size = softplus(tl.load(step + token * step_row + head).to(tl.float32) + tl.load(step_bias + head))
        target = (token * heads + head) * VALUES + j
        if IS_DELTA:
            turn = tl.load(rate + token * rate_row + head).to(tl.float32)
            tl.store(beta + token * heads + head, 1.0 / (1.0 + tl.exp(-turn)))
            tl.store(v + target, value, mask=is_value)
        else:
            size = tl.minimum(tl.maximum(size, low), high)
            tl.store(x + target, value, mask=is_value)
            tl.store(v + target, value * size, mask=is_value)
        tl.store(log_decay + token * heads + head, tl.load(decay + head) * size)


@triton.jit
def gated_norm_kernel(
    out, x, gate, weight, eps, gate_row, weight_row, num_groups,
    D: tl.constexpr, BLOCK: tl.constexpr, IS_GATED_FIRST: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    """One group of a token, [D]."""
    start_early(IS_EARLY)
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    is_number = d < D
    place = (token * num_groups + group) * D + d
    numbers = tl.load(x + place, mask=is_number, other=0.0)
    opened = silu(tl.load(gate + token * gate_row + group * D + d, mask=is_number, other=0.0).to(tl.float32))
    if IS_GATED_FIRST:
        numbers *= opened
    numbers *= tl.rsqrt(tl.sum(numbers * numbers, axis=0) / D + eps)
    numbers *= tl.load(weight + group * weight_row + d, mask=is_number, other=0.0).to(tl.float32)
    if not IS_GATED_FIRST:
        numbers *= opened
    tl.store(out + place, numbers.to(out.dtype.element_ty), mask=is_number)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), of small exponents, too: the quotient takes back what the sum rounds off."""
    small = tl.exp(x)
    whole = 1.0 + small
    rest = whole - 1.0
    logarithm = tl.where(rest == 0.0, small, tl.log(whole) * (small / tl.where(rest == 0.0, 1.0, rest)))
    return tl.where(x > 20.0, x, logarithm)

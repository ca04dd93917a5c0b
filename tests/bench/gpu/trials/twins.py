"""Trials of the norms, activations and prologues that only some decoders have, against their twins.

Norms and activations are held against the twins in float32; prologues against the twins in the same type, on the same
device, as their roundings in between are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import torch
from torch import Generator, Tensor

from millrace.kernels.checks import roofline
from millrace.kernels.checks.roofline import LaunchCost
from millrace.kernels.kernel_set import Activation, HeadNorms, KernelSet
from millrace.kernels.reference import kernel_set as twins
from tests.bench.gpu.trials.layers import EPS, Widths
from tests.bench.gpu.trials.trial import Tensors, Trial, far


def twin_trials(
    kernels: KernelSet, widths: Widths, num_tokens: int, dtype: torch.dtype, draw: Generator
) -> Iterator[Trial]:
    """Norms with each kind of weight, every activation, and every form of the norms of heads."""
    size = dtype.itemsize
    x, gate_up, weight, bias = (
        _randn(draw, *dims).to(dtype)
        for dims in ((num_tokens, widths.hidden), (num_tokens, 2 * widths.inner), (widths.hidden,), (widths.hidden,))
    )
    at = f"of {num_tokens} x {widths.hidden}"
    cost = roofline.layer_norm(num_tokens, widths.hidden, size)
    kinds = {"": (weight, bias), " in f32": (weight.float(), None), " without weight": (None, None)}
    for name, weights in kinds.items():
        yield _trial(f"layer_norm{name} {at}", "layer_norm", cost, kernels, x, *weights, EPS)
        if name:
            yield _trial(f"rms_norm{name} {at}", "rms_norm", cost, kernels, x, weights[0], EPS)
    at = f"of {num_tokens} x {widths.inner}"
    params = torch.tensor([0.8, 1.1], device=draw.device)
    activations: tuple[Activation, ...] = get_args(Activation)
    for kind in activations:
        if kind != "xielu":
            cost = roofline.gated(num_tokens, widths.inner, size)
            yield _trial(f"gated {kind} {at}", "gated", cost, kernels, gate_up, kind)
        if kind != "swiglu_clamped":
            cost = roofline.activated(num_tokens, 2 * widths.inner, size)
            yield _trial(f"activated {kind} {at}", "activated", cost, kernels, gate_up, kind, params)
    yield from _prologue_trials(kernels, widths, num_tokens, dtype, draw)


def _trial(name: str, kernel: str, cost: LaunchCost, kernels: KernelSet, *args: object) -> Trial:
    wide = [arg.float().cpu() if isinstance(arg, Tensor) else arg for arg in args]
    return Trial(
        name,
        lambda: {"out": getattr(kernels, kernel)(*args)},
        lambda got: far("the result", got["out"], getattr(twins, kernel)(*wide)),
        cost,
    )


def _prologue_trials(
    kernels: KernelSet, widths: Widths, num_tokens: int, dtype: torch.dtype, draw: Generator
) -> Iterator[Trial]:
    heads, groups, dim = widths.num_heads, widths.num_groups, widths.head_dim
    q, k = _randn(draw, heads, dim), _randn(draw, groups, dim)
    forms: dict[str, HeadNorms | None] = {
        "factors": None,
        "exact norms": HeadNorms(q=q[0], k=k[0], eps=EPS),
        "layer norms of heads": HeadNorms(q=q.to(dtype), k=k.to(dtype), eps=EPS, kind="layer"),
        "norms of rows": HeadNorms(q=q.to(dtype), k=k.to(dtype), eps=EPS, is_over_row=True),
        "norms after rope": HeadNorms(q=q[0], k=k[0], eps=EPS, is_after_rope=True),
        "norms without weight": HeadNorms(q=None, k=None, eps=EPS, is_after_rope=True),
    }
    qkv = _randn(draw, num_tokens, heads + 2 * groups, dim).to(dtype)
    angles = torch.rand(512, dim // 2, generator=draw, device=draw.device) * 6
    positions = torch.randint(0, 512, (num_tokens,), generator=draw, device=draw.device)
    for name, norms in forms.items():
        for half in (0, dim // 4, dim // 2):
            tables = (angles[:, :half].cos(), angles[:, :half].sin()) if half else (None, None)
            factors = _randn(draw, 512) if name == "factors" else None
            launch = partial(_prologue, qkv, groups, norms, *tables, positions, factors)
            cost = roofline.attention_prologue(num_tokens, heads, groups, dim, 2 * half, dtype.itemsize, dtype.itemsize)
            yield Trial(
                f"attention_prologue {name} of {num_tokens} x {heads}/{groups} x {dim}, {2 * half} rotated",
                partial(launch, kernels),
                partial(_compared, launch),
                cost,
            )


def _prologue(
    qkv: Tensor,
    num_groups: int,
    norms: HeadNorms | None,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor,
    factors: Tensor | None,
    kernels: KernelSet,
) -> Tensors:
    """What it returns, and what it wrote to a cache of one block a token."""
    caches = torch.zeros(2, len(qkv), num_groups, 1, qkv.shape[2], dtype=qkv.dtype, device=qkv.device)
    slots = torch.arange(len(qkv), device=qkv.device).flip(0)
    more = (positions, *caches, slots, None, None, factors)
    return {"q": kernels.attention_prologue(qkv.clone(), norms, cos, sin, *more), "cache": caches}


def _compared(launch: Callable[[KernelSet], Tensors], got: Tensors) -> Iterator[str]:
    for name, want in launch(twins).items():
        yield from far(f"the {name}", got[name], want)


def _randn(draw: Generator, *dims: int) -> Tensor:
    return torch.randn(dims, generator=draw, device=draw.device)

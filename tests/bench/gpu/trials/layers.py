"""Trials of the kernels around attention: norms, activation, prologue, copies of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from millrace.kernels.checks import roofline
from millrace.kernels.kernel_set import HeadNorms, KernelSet
from tests.bench.gpu.trials import oracle
from tests.bench.gpu.trials.trial import Tensors, Trial, far, unlike

EPS = 1e-5
SMALLEST_E4M3 = 2.0**-9  # the step between numbers near zero


@dataclass(frozen=True, slots=True)
class Widths:
    """What layers of a model are as wide as."""

    hidden: int
    num_heads: int
    num_groups: int
    head_dim: int
    inner: int

    @classmethod
    def of(cls, shape: dict[str, Any]) -> Widths:
        return cls(
            shape["hidden_size"],
            shape["num_attention_heads"],
            shape["num_key_value_heads"],
            shape["head_dim"],
            shape["intermediate_size"],
        )


def norm_trials(
    kernels: KernelSet, widths: Widths, num_tokens: int, dtype: torch.dtype, draw: Generator
) -> list[Trial]:
    """Norms of a layer, and its activation."""
    size = dtype.itemsize
    x, residual, weight = (
        _randn(draw, *dims, dtype=dtype)
        for dims in ((num_tokens, widths.hidden), (num_tokens, widths.hidden), (widths.hidden,))
    )
    gate_up = _randn(draw, num_tokens, 2 * widths.inner, dtype=dtype)
    before, at = residual.clone(), f"of {num_tokens} x {widths.hidden}"

    def summed(got: Tensors) -> Iterator[str]:
        yield from far("the residual", got["residual"], before.double() + x.double())
        yield from far("the result", got["out"], oracle.rms_norm(before + x, weight, EPS))

    return [
        Trial(
            f"rms_norm {at}",
            lambda: {"out": kernels.rms_norm(x, weight, EPS)},
            lambda got: far("the result", got["out"], oracle.rms_norm(x, weight, EPS)),
            roofline.rms_norm(num_tokens, widths.hidden, size),
        ),
        Trial(
            f"add_rms_norm {at}",
            lambda: {"out": kernels.add_rms_norm(x, residual, weight, EPS), "residual": residual},
            summed,
            roofline.add_rms_norm(num_tokens, widths.hidden, size),
        ),
        Trial(
            f"gated of {num_tokens} x {widths.inner}",
            lambda: {"out": kernels.gated(gate_up, "silu")},
            lambda got: far("the result", got["out"], oracle.gated(gate_up)),
            roofline.gated(num_tokens, widths.inner, size),
        ),
    ]


def prologue_trial(
    kernels: KernelSet,
    widths: Widths,
    num_tokens: int,
    dtype: torch.dtype,
    draw: Generator,
    *,
    has_norms: bool = False,
    is_fp8: bool = False,
    block_size: int = 16,
) -> Trial:
    """Of scattered slots of one layer's cache; the first of several tokens is padding."""
    num_groups, head_dim, device = widths.num_groups, widths.head_dim, draw.device
    num_blocks = -(-num_tokens // block_size) + 2
    qkv = _randn(draw, num_tokens, widths.num_heads + 2 * num_groups, head_dim, dtype=dtype)
    norms = (_randn(draw, head_dim, dtype=dtype), _randn(draw, head_dim, dtype=dtype)) if has_norms else None
    angles = torch.rand(4096, head_dim // 2, generator=draw, device=device) * 6
    cos, sin = angles.cos(), angles.sin()
    positions = torch.randint(0, 4096, (num_tokens,), generator=draw, device=device)
    slots = torch.randperm(num_blocks * block_size, generator=draw, device=device)[:num_tokens]
    if num_tokens > 1:
        slots[0] = -1
    data = _randn(draw, num_blocks, 2, num_groups, block_size, head_dim, dtype=dtype)  # a layer, block-major
    if is_fp8:
        data = data.to(torch.float8_e4m3fn)
    scales = torch.rand(2, num_groups, generator=draw, device=device) / 100 + 0.001 if is_fp8 else None
    caches = data[:, 0], data[:, 1]
    inputs, before = qkv.clone(), data.to(torch.float32, copy=True)

    def launch() -> Tensors:
        normed = HeadNorms(q=norms[0], k=norms[1], eps=EPS) if norms is not None else None
        more = (None, None) if scales is None else (scales[0], scales[1])
        tables = (cos, sin, positions, *caches, slots)
        return {"q": kernels.attention_prologue(qkv, normed, *tables, *more)}

    def wrong(got: Tensors) -> Iterator[str]:
        q, k, v = oracle.prologue(inputs, num_groups, norms, EPS, cos, sin, positions)
        roundings = [_turned_roundings(turned, dtype) if has_norms else torch.zeros_like(turned) for turned in (q, k)]
        yield from far("the queries", got["q"], q, slack=roundings[0])
        is_kept = slots >= 0
        want, where = before.double(), slots[is_kept]
        places = where // block_size, where % block_size
        after = data.double() if not is_fp8 else data.float().double()
        for which, (name, numbers, rounding) in enumerate(
            (("keys", k, roundings[1]), ("values", v, torch.zeros_like(v)))
        ):
            scale = scales[which].double()[:, None] if scales is not None else torch.ones((), device=device)
            limit = 448.0 if is_fp8 else float("inf")
            kept = (numbers[is_kept] / scale).clamp(-limit, limit)
            found, slack = after[:, which].transpose(1, 2)[places], rounding[is_kept] / scale
            if is_fp8:  # 3 bits behind the first: half a step, and what the rounding before it makes of that
                allowed = 2.0**-4 * 1.2 * (kept.abs() + slack) + slack + SMALLEST_E4M3
                is_far = ~((found - kept).abs() <= allowed)
                if bool(is_far.any()):
                    yield f"{int(is_far.sum())} of {is_far.numel()} {name} are off by more than a step of e4m3"
            else:
                yield from far(name, found.to(dtype), kept, slack=slack)
            want[:, which].transpose(1, 2)[places] = found
        yield from unlike("what is beside the written slots", after, want)

    names = f"{' norms' if has_norms else ''}{' fp8' if is_fp8 else ''}"
    heads = f"{widths.num_heads}/{num_groups} x {head_dim}"
    sizes = (widths.num_heads, num_groups, head_dim, head_dim, dtype.itemsize, data.itemsize, has_norms)
    return Trial(
        f"attention_prologue{names} of {num_tokens} x {heads}",
        launch,
        wrong,
        roofline.attention_prologue(num_tokens, *sizes),
    )


def _turned_roundings(turned: Tensor, dtype: torch.dtype) -> Tensor:
    """By how much heads [T, H, D] f64 that are normed and then turned may be off: a norm rounds twice, and turning adds
    up numbers of a pair that may cancel, so what each was rounded by is in proportion to the pair's size."""
    first, second = turned.chunk(2, dim=-1)
    return (torch.finfo(dtype).eps * torch.hypot(first, second)).repeat(1, 1, 2)


def copy_trial(kernels: KernelSet, block_bytes: int, num_copied: int, draw: Generator) -> Trial:
    """Of whole blocks, which are never where others come from."""
    words = torch.randint(
        -(1 << 31), 1 << 31, (2 * num_copied + 3, block_bytes // 4), generator=draw, device=draw.device
    )
    data, ids = words.int(), torch.randperm(2 * num_copied + 3, generator=draw, device=draw.device)
    sources, destinations = ids[:num_copied], ids[num_copied : 2 * num_copied]
    want = data.clone()
    want[destinations] = data[sources]

    def launch() -> Tensors:
        kernels.copy_blocks(data, 0, sources, destinations)
        return {"data": data}

    return Trial(
        f"copy_blocks of {num_copied} x {block_bytes} B",
        launch,
        lambda got: unlike("the cache", got["data"], want),
        roofline.copy_blocks(num_copied, block_bytes),
    )


def _randn(draw: Generator, *dims: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(dims, generator=draw, device=draw.device, dtype=torch.float32).to(dtype)

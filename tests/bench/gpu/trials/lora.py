"""Trials of the kernels of LoRA: the lists of a step, and both halves of the updates of a layer's linears."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from millrace.kernels.checks import roofline_lora
from millrace.kernels.kernel_set import LoraKernels
from millrace.kernels.layout.lora_lists import LoraLists, LoraWeights, make_lists
from tests.bench.gpu.trials.layers import Widths
from tests.bench.gpu.trials.trial import Tensors, Trial, far, unlike


def lora_trials(
    kernels: LoraKernels,
    widths: Widths,
    num_tokens: int,
    num_adapters: int,
    rank: int,
    dtype: torch.dtype,
    draw: Generator,
) -> Iterator[Trial]:
    """The launches of a layer for tokens that have adapters in turn, one of `rank` in all parts of each linear."""
    adapters = (torch.arange(num_tokens, device=draw.device) % num_adapters + 1).int()
    lists = make_lists(
        lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype), device=draw.device),
        num_tokens,
        num_adapters,
    )
    kernels.group_tokens(adapters, lists)
    about = f"{num_tokens} tokens of {num_adapters} adapters"
    yield _group_trial(kernels, adapters, lists, about)
    heads, keys = widths.num_heads * widths.head_dim, widths.num_groups * widths.head_dim
    for name, sizes, num_inner in (
        ("qkv", (heads, keys, keys), widths.hidden),
        ("output", (widths.hidden,), heads),
        ("gate_up", (widths.inner, widths.inner), widths.hidden),
        ("down", (widths.hidden,), widths.inner),
    ):
        x = _randn(draw, num_tokens, num_inner, dtype=dtype)
        a = _randn(draw, num_adapters, len(sizes), rank, num_inner, dtype=dtype)
        b = _randn(draw, num_adapters, rank, sum(sizes), dtype=dtype)
        ranks = torch.full((num_adapters, len(sizes)), rank, dtype=torch.int32, device=draw.device)
        weights = LoraWeights((a * num_inner**-0.5).to(dtype), (b * rank**-0.5).to(dtype), ranks, sizes)
        yield from _product_trials(kernels, x, weights, lists, f"{name}, {about}", draw)


def _group_trial(kernels: LoraKernels, adapters: Tensor, lists: LoraLists, about: str) -> Trial:
    want = torch.argsort(adapters, stable=True).int()

    def launch() -> Tensors:
        kernels.group_tokens(adapters, lists)
        return {"order": lists.order}

    return Trial(
        f"lora_group of {about}",
        launch,
        lambda got: unlike("the order", got["order"], want),
        roofline_lora.group_tokens(len(adapters), lists.most_tiles),
    )


def _product_trials(
    kernels: LoraKernels, x: Tensor, weights: LoraWeights, lists: LoraLists, about: str, draw: Generator
) -> Iterator[Trial]:
    """Shrink, then the half that adds; for gate and up with the activation."""
    (num_adapters, num_parts, rank, num_inner), num_outputs = weights.a.shape, sum(weights.sizes)
    size, dtype, num_tokens = x.itemsize, x.dtype, len(x)
    before, out = (_randn(draw, num_tokens, num_outputs, dtype=dtype) for _ in range(2))
    sums = kernels.lora_shrink(x, weights, lists)
    is_gated = num_parts == 2

    def shrink() -> Tensors:
        return {"sums": kernels.lora_shrink(x, weights, lists)}

    def expand() -> Tensors:
        out.copy_(before)
        if is_gated:
            return {"out": kernels.lora_gated(out, sums, weights, lists, "silu")}
        kernels.lora_add(out, sums, weights, lists)
        return {"out": out}

    def wrong_sums(got: Tensors) -> Iterator[str]:
        slots = torch.arange(num_tokens, device=x.device) % num_adapters
        order = lists.order.long()
        want = torch.einsum("tk,tprk->tpr", x[order].double(), weights.a[slots[order]].double())
        yield from far("the sums", got["sums"].sum(0), want.reshape(num_tokens, num_parts * rank), 1e-3)

    def wrong(got: Tensors) -> Iterator[str]:
        want = before.double() + _updates(x, weights)
        if is_gated:
            gate, up = want.chunk(2, dim=1)
            want = F.silu(gate) * up
        yield from far("the result", got["out"], want)

    shared = (num_tokens, num_adapters, num_parts, rank)
    yield Trial(f"lora_shrink of {about}", shrink, wrong_sums, roofline_lora.lora_shrink(*shared, num_inner, size))
    added = roofline_lora.lora_add(*shared, num_outputs, size)
    gated = roofline_lora.lora_gated(num_tokens, num_adapters, rank, num_outputs // 2, size)
    yield Trial(f"lora_{'gated' if is_gated else 'add'} of {about}", expand, wrong, gated if is_gated else added)


def _updates(x: Tensor, weights: LoraWeights) -> Tensor:
    """B (A x) of all tokens in float64, [T, M]; token t has adapter t % S."""
    found = torch.zeros(len(x), sum(weights.sizes), dtype=torch.float64, device=x.device)
    for slot in range(min(len(x), len(weights.a))):
        rows, begin = x[slot :: len(weights.a)].double(), 0
        for part, size in enumerate(weights.sizes):
            columns = slice(begin, begin + size)
            update = rows @ weights.a[slot, part].double().t() @ weights.b[slot, :, columns].double()
            found[slot :: len(weights.a), columns] = update
            begin += size
    return found


def _randn(draw: Generator, *dims: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(dims, generator=draw, device=draw.device, dtype=torch.float32).to(dtype)

"""Trials of a layer of experts: routing and lists, the whole layer, and its two products by the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from millrace.kernels.checks.expert_cases import LAYERS, Rule
from millrace.kernels.checks.roofline import LaunchCost
from millrace.kernels.kernel_set import ExpertKernels
from millrace.kernels.layout.experts import ExpertStack, RoutedExperts
from millrace.kernels.reference.experts import route
from tests.bench.gpu.trials.trial import Tensors, Trial, far, unlike

SUM = 4  # bytes of an f32


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """A layer of experts with a gate."""

    num_experts: int
    width: int
    inner: int
    top_k: int
    rule: Rule

    @classmethod
    def of(cls, name: str) -> ExpertSizes:
        """Of `LAYERS`."""
        layer = LAYERS[name]
        return cls(*layer["sizes"], layer["top_k"], layer["rule"])


def made_experts(sizes: ExpertSizes, dtype: torch.dtype, draw: Generator) -> RoutedExperts:
    """A layer with drawn weights."""
    gate_up = torch.empty(sizes.num_experts, 2 * sizes.inner, sizes.width, dtype=dtype, device=draw.device)
    down = torch.empty(sizes.num_experts, sizes.width, sizes.inner, dtype=dtype, device=draw.device)
    gate_up.normal_(0, sizes.width**-0.5, generator=draw)
    down.normal_(0, sizes.inner**-0.5, generator=draw)
    stack = ExpertStack(gate_up=gate_up, gate_up_bias=None, down=down, down_bias=None)
    return RoutedExperts(rule=sizes.rule, top_k=sizes.top_k, stack=stack)


def expert_trials(
    kernels: ExpertKernels, name: str, experts: RoutedExperts, num_tokens: int, draw: Generator
) -> Iterator[Trial]:
    """The layer for that many tokens, which go to experts at random."""
    stack = experts.stack
    assert stack is not None
    num_experts, width, inner = stack.down.shape
    x = torch.randn(num_tokens, width, generator=draw, device=draw.device, dtype=torch.float32).to(stack.down.dtype)
    logits = torch.randn(num_tokens, num_experts, generator=draw, device=draw.device)
    ids, _ = route(logits, experts.rule, experts.top_k)
    cost = _cost(x, ids, inner)
    about = f"of {num_tokens} x {name}"

    def whole() -> Tensors:
        return {"out": kernels.routed_experts(x, logits, experts)}

    def wrong(got: Tensors) -> Iterator[str]:
        yield from far("the result", got["out"], _exact(x, logits, experts), 3e-2 if x.itemsize == 2 else 1e-4)

    yield Trial(f"experts {about}", whole, wrong, cost)
    yield _lists_trial(about, logits, experts)
    if by_library := _library(x, ids, stack):
        yield Trial(f"experts by the library's grouped products {about}", by_library, lambda got: iter(()), cost)


def _lists_trial(about: str, logits: Tensor, experts: RoutedExperts) -> Trial:
    from millrace.kernels.triton.experts.launches import list_pairs

    num_tokens, num_experts = logits.shape
    num_pairs = num_tokens * experts.top_k

    def launch() -> Tensors:
        lists = list_pairs(logits, experts, 16)
        return {"ids": lists.ids, "order": lists.order}

    def wrong(got: Tensors) -> Iterator[str]:
        ids, _ = route(logits, experts.rule, experts.top_k)
        yield from unlike("the choice of experts", got["ids"].long(), ids)
        yield from unlike("the order", got["order"].long(), ids.reshape(-1).argsort(stable=True))

    return Trial(
        f"experts' lists {about}", launch, wrong, LaunchCost(SUM * (num_tokens * num_experts + 3 * num_pairs), 0)
    )


def _cost(x: Tensor, ids: Tensor, inner: int) -> LaunchCost:
    """The weights of experts that have rows, once; each pair's row in and out of both products."""
    num_active, (num_tokens, top_k), width = len(ids.unique()), ids.shape, x.shape[1]
    num_pairs = num_tokens * top_k
    num_numbers = num_active * 3 * inner * width + num_tokens * width + num_pairs * 2 * (inner + width)
    return LaunchCost(num_numbers * x.itemsize + SUM * num_tokens * width, 6 * num_pairs * inner * width)


def _exact(x: Tensor, logits: Tensor, experts: RoutedExperts) -> Tensor:
    """In float64, one expert after another."""
    stack = experts.stack
    assert stack is not None
    ids, shares = route(logits, experts.rule, experts.top_k)
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        tokens, rank = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].double() @ stack.gate_up[expert].double().t()).chunk(2, dim=1)
        part = (F.silu(gate) * up) @ stack.down[expert].double().t()
        total.index_add_(0, tokens, part * shares[tokens, rank, None].double())
    return total


def _library(x: Tensor, ids: Tensor, stack: ExpertStack) -> Callable[[], Tensors] | None:
    """The two products and the gate alone, of rows that are sorted already; None where torch has no grouped product."""
    if not hasattr(F, "grouped_mm") or x.dtype != torch.bfloat16:
        return None
    flat = ids.reshape(-1)
    rows = x[flat.argsort(stable=True) // ids.shape[1]]
    ends = torch.bincount(flat, minlength=len(stack.down)).cumsum(0).int()

    def launch() -> Tensors:
        gate, up = F.grouped_mm(rows, stack.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=1)
        return {"out": F.grouped_mm(F.silu(gate) * up, stack.down.transpose(1, 2), offs=ends)}

    return launch

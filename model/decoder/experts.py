"""A mixture of experts by torch: rows grouped by expert, one product for each expert that some token goes to.

The number of rows of each expert is read by the host, so a step with experts cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ...kernels.kernel_set import KernelSet
from ...kernels.reference.routing import route
from ..spec import FeedSpec, MoeSpec
from .linear import Linear
from .norms import NormWeights, normed


@dataclass(frozen=True, slots=True, eq=False)
class FeedWeights:
    """A feed-forward network."""

    gate_up: Linear  # hidden -> 2 F: gate, up; hidden -> F without a gate
    down: Linear  # F -> hidden

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory."""
        yield from self.gate_up.tensors()
        yield from self.down.tensors()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ExpertWeights:
    """The networks of a layer with experts. What its `MoeSpec` does not have is None."""

    router: Linear  # hidden -> E, f32
    choice_bias: Tensor | None  # [E] f32
    router_norm: NormWeights | None = None
    expert_scale: Tensor | None = None  # [E] f32
    # of what the experts read, what they return and what `dense_beside` returns
    own_norms: tuple[NormWeights, ...] = ()
    experts: tuple[FeedWeights, ...]
    shared: FeedWeights | None
    shared_router: Linear | None  # hidden -> 1
    dense_beside: FeedWeights | None

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor held in memory."""
        for field in fields(self):
            value = getattr(self, field.name)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, Tensor):
                    yield part
                elif part is not None:
                    yield from part.tensors()


class Experts:
    """The feed-forward part of a layer with experts."""

    def __init__(self, spec: MoeSpec, weights: ExpertWeights, kernels: KernelSet) -> None:
        self.spec, self.weights, self.kernels = spec, weights, kernels

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """What the layer adds to the residual for x [T, hidden], before it is normed and scaled; as x.

        `residual`: what x is the norm of, for experts with `own_norms`. A token's experts are added in the order of
        rank, in f32, whichever tokens are beside it.
        """
        if self.weights.own_norms:
            assert residual is not None
            return self._apart(x, residual)
        return self._mixed(x, x).to(x.dtype)

    def _apart(self, x: Tensor, residual: Tensor) -> Tensor:
        """The experts of the residual, and the network beside them of x: each with norms of its own."""
        spec, weights, kernels = self.spec, self.weights, self.kernels
        before, after, after_dense = weights.own_norms
        total = normed(self._mixed(normed(residual, before, kernels), residual).to(x.dtype), after, kernels)
        if spec.dense_beside is None or weights.dense_beside is None:
            return total
        return total + normed(self._feed(spec.dense_beside, weights.dense_beside, x), after_dense, kernels)

    def _mixed(self, x: Tensor, routed: Tensor) -> Tensor:
        """The sum of what the experts return for x [T, hidden], which are chosen by `routed`, in f32."""
        spec, weights = self.spec, self.weights
        read = (
            routed.float() if weights.router_norm is None else normed(routed.float(), weights.router_norm, self.kernels)
        )
        ids, shares = route(weights.router(read), spec.router, spec.top_k, weights.choice_bias)
        if weights.expert_scale is not None:
            shares = shares * weights.expert_scale[ids]
        parts = self._pairs(x, ids)  # [T, k, hidden]
        total = parts[:, 0].float() * shares[:, :1]
        for rank in range(1, spec.top_k):
            total += parts[:, rank].float() * shares[:, rank : rank + 1]
        if spec.shared is not None and weights.shared is not None:
            shared = self._feed(spec.shared, weights.shared, x).float()
            if weights.shared_router is not None:
                shared *= torch.sigmoid(weights.shared_router(x).float())
            total += shared
        if spec.dense_beside is not None and weights.dense_beside is not None and not weights.own_norms:
            total += self._feed(spec.dense_beside, weights.dense_beside, x).float()
        return total

    def _pairs(self, x: Tensor, ids: Tensor) -> Tensor:
        """The output [T, k, hidden] of each token's experts, for ids [T, k]."""
        num_tokens, top_k = ids.shape
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)  # pairs of token and rank by expert, an expert's in the order of tokens
        rows = x.index_select(0, order // top_k)
        counts = torch.bincount(flat, minlength=self.spec.num_experts).tolist()
        found = [
            self._feed(self.spec.expert, expert, part)
            for expert, part in zip(self.weights.experts, rows.split_with_sizes(counts), strict=True)
            if len(part)
        ]
        pairs = torch.empty_like(rows)
        if found:
            pairs[order] = torch.cat(found)
        return pairs.view(num_tokens, top_k, x.shape[1])

    def _feed(self, spec: FeedSpec, weights: FeedWeights, x: Tensor) -> Tensor:
        """A network of x [T, hidden]; as x."""
        if not spec.is_gated:
            return weights.down(self.kernels.activated_linear(x, None, weights.gate_up, spec.activation))
        inner = self.kernels.gated_linear(x, None, weights.gate_up, spec.activation, spec.alpha, spec.limit)
        return weights.down(inner)

"""A layer's mixture of experts: router, routed experts, and the networks beside them that all tokens go to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ...kernels.kernel_set import KernelSet, load_experts
from ...kernels.layout.experts import ExpertStack, RoutedExperts
from ...kernels.tilings.tables import Tilings
from ..checkpoint.tensor_shapes import TensorSource
from ..families import names
from ..grouped_matrix import GroupedMatrix
from ..quantized.expert_codes import bits_per_number, coded_format
from ..spec import DecoderSpec, FeedSpec, MoeSpec
from .linear import EvenLinear, Linear
from .norms import NormWeights, normed

EXPERT = names.EXPERT_GATE, names.EXPERT_UP, names.EXPERT_DOWN


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
    experts: tuple[FeedWeights, ...]  # none of a stack of codes
    stack: ExpertStack | None = None  # the same memory as one tensor each, for kernels that need it
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
                elif part is not None and not (isinstance(part, ExpertStack) and self.experts):
                    yield from part.tensors()


class Experts:
    """The feed-forward part of a layer with experts."""

    def __init__(
        self, spec: MoeSpec, weights: ExpertWeights, kernels: KernelSet, tilings: Tilings | None = None
    ) -> None:
        self.spec, self.weights, self.kernels = spec, weights, kernels
        self.expert_kernels = load_experts(kernels.name)
        expert = spec.expert
        self.routed = RoutedExperts(
            rule=spec.router,
            top_k=spec.top_k,
            choice_bias=weights.choice_bias,
            scales=weights.expert_scale,
            is_gated=expert.is_gated,
            activation=expert.activation,
            alpha=expert.alpha,
            limit=expert.limit,
            each=[(one.gate_up, one.down) for one in weights.experts],
            stack=weights.stack,
            is_batch_invariant=isinstance(weights.router, EvenLinear),
            tilings=tilings,
        )

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
        total = self.expert_kernels.routed_experts(x, weights.router(read), self.routed)
        if spec.shared is not None and weights.shared is not None:
            shared = self._feed(spec.shared, weights.shared, x).float()
            if weights.shared_router is not None:
                shared *= torch.sigmoid(weights.shared_router(x).float())
            total += shared
        if spec.dense_beside is not None and weights.dense_beside is not None and not weights.own_norms:
            total += self._feed(spec.dense_beside, weights.dense_beside, x).float()
        return total

    def _feed(self, spec: FeedSpec, weights: FeedWeights, x: Tensor) -> Tensor:
        """A network of x [T, hidden]; as x."""
        if not spec.is_gated:
            return weights.down(self.kernels.activated_linear(x, None, weights.gate_up, spec.activation))
        inner = self.kernels.gated_linear(x, None, weights.gate_up, spec.activation, spec.alpha, spec.limit)
        return weights.down(inner)


def coded_item_sizes(source: TensorSource, spec: DecoderSpec) -> dict[str, float]:
    """Bytes of a number of each matrix of experts that stays in codes."""
    found = dict[str, float]()
    if not source.packing:
        return found
    for index, layer in enumerate(spec.layers):
        if not isinstance(moe := layer.feed, MoeSpec):
            continue
        parts = expert_parts(moe, lambda stem, index=index: stem.replace("*", str(index)))  # type: ignore[misc]
        formats = [coded_format(source, parts[field]) for field in ("gate_up", "down")]
        for form, field in zip(formats, ("gate_up", "down"), strict=True):
            for name in (name for joined in parts[field] for name in joined):
                if form is None or None in formats:
                    continue
                matrix = source.grouped(name)
                assert isinstance(matrix, GroupedMatrix)
                found[name] = bits_per_number(form, matrix.shape[1]) / 8
    return found


def expert_parts(moe: MoeSpec, name: Callable[[str], str]) -> dict[str, list[list[str]]]:
    """The tensors of a layer's experts by the fields of `ExpertStack`: of each expert those that are joined.

    `name` gives the layer's number to stems.
    """
    stems = [[name(names.of_expert(stem, expert)) for stem in EXPERT] for expert in range(moe.num_experts)]
    inner, outer = slice(0 if moe.expert.is_gated else 1, 2), slice(2, 3)
    kinds = {
        "gate_up": (inner, "weight"),
        "gate_up_bias": (inner, "bias"),
        "down": (outer, "weight"),
        "down_bias": (outer, "bias"),
    }
    return {
        field: [[f"{stem}.{kind}" for stem in each[part]] for each in stems] for field, (part, kind) in kinds.items()
    }

"""The products of a decoder's layers that kernels of few rows compute, and why the others are left to the library.

The choice is made once, when a decoder is built, from the tilings of the card. Kernels without products of their own
ignore it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.kernel_set import FewRows
from ...kernels.layout.products import num_counters
from ...kernels.tilings.products import DtypeName, FormsByRows, ProductKind
from ...kernels.tilings.tables import Tilings
from ..spec import FeedSpec, LayerSpec
from .linear import Linear
from .weights import LayerWeights


@dataclass(frozen=True, slots=True, eq=False)
class LayerProducts:
    """The products of a layer; None = the library's, for any number of rows."""

    qkv: FewRows | None = None
    output: FewRows | None = None
    gate_up: FewRows | None = None
    down: FewRows | None = None


class FewRowProducts:
    """The products of all layers, and the counters with which their splits are joined.

    `tilings` None = there are none. `decisions` says for each product of the first layer that has it: its size, kind,
    and forms by rows, or the reason for the library.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        weights: Sequence[LayerWeights],
        tilings: Tilings | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.decisions: dict[str, str] = {}
        self.layers = [LayerProducts() for _ in layers]
        self._counters: Tensor | None = None
        self._split_rows: set[int] = set()  # numbers of rows with which a step uses counters
        if tilings is None:
            return
        planned = [list(self._plan(*layer, tilings, dtype)) for layer in zip(layers, weights, strict=True)]
        sizes = [
            num_counters(forms, _num_outputs(linear, kind)) for layer in planned for _, linear, kind, forms in layer
        ]
        if sum(sizes):
            self._counters = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        counters = iter([None] * len(sizes) if self._counters is None else self._counters.split_with_sizes(sizes))
        self.layers = [
            LayerProducts(
                **{
                    name: FewRows(linear.weight, linear.bias, forms, counted) if forms else None
                    for (name, linear, _, forms), counted in zip(layer, counters, strict=False)
                }
            )
            for layer in planned
        ]

    @property
    def form_rows(self) -> list[int]:
        """The most rows of each form of each product, ascending: steps of these sizes launch every form there is."""
        products = (few for layer in self.layers for few in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return sorted({rows for few in products if few is not None for rows, _ in few.forms})

    def begin_step(self, num_rows: int) -> None:
        """Makes all counters zero if a step of that many rows uses them: a step that failed may have left others."""
        if self._counters is not None and num_rows in self._split_rows:
            self._counters.zero_()

    def _plan(
        self, layer: LayerSpec, weights: LayerWeights, tilings: Tilings, dtype: torch.dtype
    ) -> Iterator[tuple[str, Linear, ProductKind, FormsByRows]]:
        for name, kind in _kinds(layer).items():
            linear: Linear = getattr(weights, name)
            if type(linear) is not Linear:
                self.decisions.setdefault(f"{name} {kind}", f"library: {type(linear).__name__} has its own form")
                continue
            forms, reason = tilings.product_forms(_num_outputs(linear, kind), linear.num_inner, kind, _NAMES[dtype])
            for fewer, (most, form) in zip((0, *(rows for rows, _ in forms)), forms, strict=False):
                if form.num_splits > 1:
                    self._split_rows.update(range(fewer + 1, most + 1))
            size = f"{linear.num_outputs}x{linear.num_inner}"
            self.decisions.setdefault(f"{name} {kind} {size}", _described(forms, reason))
            yield name, linear, kind, forms


def _kinds(layer: LayerSpec) -> Mapping[str, ProductKind]:
    """What follows each product inside of its kernel: see `_Layer` of `decoder.py`."""
    is_added = layer.residual_scale == 1.0
    kinds: dict[str, ProductKind] = {
        "qkv": "plain",
        "output": "add" if is_added and layer.post_mixer is None else "plain",
    }
    if isinstance(layer.feed, FeedSpec):  # those of experts are the library's
        kinds["gate_up"] = "gated" if layer.feed.is_gated else "activated"
        kinds["down"] = "add" if is_added and layer.post_feed is None else "plain"
    return kinds


def _num_outputs(linear: Linear, kind: ProductKind) -> int:
    return linear.num_outputs // (2 if kind == "gated" else 1)


_NAMES: dict[torch.dtype, DtypeName] = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
}


def _described(forms: FormsByRows, reason: str) -> str:
    if not forms:
        return f"library: {reason}"
    return f"{reason}: " + ", ".join(f"{form.form} to {rows}" for rows, form in forms)

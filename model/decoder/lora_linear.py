"""Linears to which the adapters of a step's rows are added, in PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.reference.lora import LoraSlice, add_lora
from ..checkpoint.canonical import widened
from ..checkpoint.safetensors import BFLOAT16
from ..lora.adapter import LINEARS, Adapter, LinearName
from .linear import Linear
from .weights import DecoderWeights, LayerWeights

Place = tuple[int, LinearName]  # layer, linear


class LoraTable:
    """The adapters on the device by slot, and which tokens of the current step each has. Slot 0 is the base model.

    Used on the device thread only.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._slices: list[Mapping[Place, tuple[LoraSlice, ...]]] = [{} for _ in range(num_slots + 1)]
        self._groups: list[tuple[int, Tensor]] = []  # (slot, its tokens [t] i64)

    def load(self, slot: int, adapter: Adapter) -> None:
        """Copies an adapter to the device, in place of the one in that slot. If it raises, the slot is empty."""
        self._slices[slot] = {}  # first, so that its memory is there for the new one
        matrices: dict[int, Tensor] = {}  # slices may share an array

        def on_device(array: NDArray[np.generic]) -> Tensor:
            if id(array) not in matrices:
                wide = widened(array) if array.dtype == BFLOAT16 else array.astype(np.float32)
                matrices[id(array)] = torch.from_numpy(np.ascontiguousarray(wide)).to(self._device)
            return matrices[id(array)]

        self._slices[slot] = {
            place: tuple(LoraSlice(one.row_start, on_device(one.a), on_device(one.b)) for one in slices)
            for place, slices in adapter.linears.items()
        }

    def begin_step(self, slots: NDArray[np.int64] | None) -> None:
        """Sets the adapter slot of each token, [T]; None: all tokens are the base model's."""
        self._groups = []
        if slots is not None:
            for slot in np.unique(slots[slots > 0]).tolist():
                self._groups.append((slot, torch.from_numpy(np.flatnonzero(slots == slot)).to(self._device)))

    @property
    def is_idle(self) -> bool:
        """Whether no token of the step has an adapter."""
        return not self._groups

    def add(self, product: Tensor, x: Tensor, place: Place) -> None:
        """Adds the updates of all adapters to a product [T, M] f32 of x [T, K], in place."""
        for slot, rows in self._groups:
            slices = self._slices[slot].get(place)
            if slices is not None:
                add_lora(product, x, rows, slices)


class LoraLinear(Linear):
    """A linear with the adapters of a `LoraTable`. Steps without adapters compute what `base` does."""

    def __init__(self, base: Linear, table: LoraTable, place: Place) -> None:
        self._base, self._table, self._place = base, table, place

    def __call__(self, x: Tensor) -> Tensor:
        return self._base(x) if self._table.is_idle else self._adapted(x).to(self.dtype)

    def unrounded(self, x: Tensor) -> Tensor:
        """As the base's, in the same dtype: what follows a product takes the dtype that it has without adapters."""
        product = self._base.unrounded(x)
        return product if self._table.is_idle else self._with_updates(product, x).to(product.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if self._table.is_idle:
            return self._base.add_to(residual, x)
        return (residual.float() + self._adapted(x)).to(residual.dtype)

    def _adapted(self, x: Tensor) -> Tensor:
        """The product with all updates, [T, M] f32."""
        return self._with_updates(self._base.unrounded(x), x)

    def _with_updates(self, product: Tensor, x: Tensor) -> Tensor:
        """A product of the base [T, M] with all updates, f32."""
        wide = product.float()
        self._table.add(wide, x, self._place)
        return wide

    @property
    def weight(self) -> Tensor:
        return self._base.weight

    @property
    def dtype(self) -> torch.dtype:
        return self._base.dtype

    @property
    def num_outputs(self) -> int:
        return self._base.num_outputs

    @property
    def num_inner(self) -> int:
        return self._base.num_inner

    @property
    def bias(self) -> Tensor | None:
        return self._base.bias

    def tensors(self) -> Iterator[Tensor]:
        yield from self._base.tensors()


def with_adapters(weights: DecoderWeights, table: LoraTable) -> DecoderWeights:
    """The weights with the adapters of `table` added to the linears of attention and feed."""
    layers = tuple(replace(layer, **_adapted(layer, index, table)) for index, layer in enumerate(weights.layers))  # type: ignore[arg-type]
    return replace(weights, layers=layers)


def _adapted(layer: LayerWeights, index: int, table: LoraTable) -> dict[str, LoraLinear]:
    """The linears that the layer has; adapters of experts are refused."""
    found = {name: getattr(layer, name) for name in LINEARS}
    return {name: LoraLinear(base, table, (index, name)) for name, base in found.items() if base is not None}

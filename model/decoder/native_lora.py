"""The adapters of a native decoder: packed where they are read, and in the library's slots while steps use them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...kernels.native.lora import NativeLoraSlice, PackedAdapter
from ...kernels.native.model import NativeModel
from ..lora.adapter import Adapter
from ..lora.prepared import PreparedAdapter
from ..lora.tensor_file import Pauses


class NativeLoraTable:
    """The adapters by slot, and which tokens of the current step each has. Slot 0 is the base model.

    `prepare` may be called on any thread, and the rest on the device thread. The memory of an adapter is freed with it
    and the slots that have it.
    """

    def __init__(self, model: NativeModel, num_slots: int, max_rank: int) -> None:
        self._model = model
        self.token_slots: NDArray[np.int64] | None = None  # [T] of the current step; None: all are the base model's
        model.reserve_adapters(num_slots, max_rank)

    def prepare(self, adapter: Adapter) -> PreparedAdapter[PackedAdapter]:
        """Packs an adapter, so that a step that loads it only changes a pointer."""
        fits = adapter.dtype == "bfloat16" or adapter.dtype == self._model.dtype
        assert fits, f"an adapter in {adapter.dtype} for {self._model.dtype}"
        all_slices = adapter.slices()
        slices = [NativeLoraSlice(layer, linear, one.row_start, one.a, one.b) for layer, linear, one in all_slices]
        packed = self._model.pack_adapter(slices, Pauses(), adapter.dtype)
        return PreparedAdapter.of(adapter, packed, packed.num_bytes)

    def load(self, slot: int, adapter: PreparedAdapter[PackedAdapter]) -> None:
        """Puts an adapter into a slot, in place of the one there."""
        self._model.use_adapter(slot, adapter.contents)

    def begin_step(self, slots: NDArray[np.int64] | None) -> None:
        """Sets the adapter slot of each token, [T]; None: all tokens are the base model's."""
        self.token_slots = slots

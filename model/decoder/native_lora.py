"""The adapters of a native decoder: packed where they are read, and in the library's slots while steps use them."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ...kernels.native.lora import NativeLoraSlice, PackedAdapter
from ...kernels.native.model import NativeModel
from ..lora.adapter import Adapter


class NativeLoraTable:
    """The adapters by slot, and which tokens of the current step each has. Slot 0 is the base model.

    `pack` may be called on any thread, and the rest on the device thread. An adapter takes its memory twice: as read,
    and packed for as long as the adapter or a slot that has it exists.
    """

    def __init__(self, model: NativeModel, num_slots: int, max_rank: int) -> None:
        self._model = model
        self._packed: WeakKeyDictionary[Adapter, PackedAdapter] = WeakKeyDictionary()
        self.token_slots: NDArray[np.int64] | None = None  # [T] of the current step; None: all are the base model's
        model.reserve_adapters(num_slots, max_rank)

    def pack(self, adapter: Adapter) -> PackedAdapter:
        """Packs an adapter, unless it is packed, so that a step that loads it only changes a pointer."""
        packed = self._packed.get(adapter)
        if packed is None:
            assert adapter.dtype == self._model.dtype, f"an adapter in {adapter.dtype} for {self._model.dtype}"
            all_slices = adapter.slices()
            slices = [NativeLoraSlice(layer, linear, one.row_start, one.a, one.b) for layer, linear, one in all_slices]
            self._packed[adapter] = packed = self._model.pack_adapter(slices)
        return packed

    def load(self, slot: int, adapter: Adapter) -> None:
        """Puts an adapter into a slot, in place of the one there. If it raises, the slot is empty."""
        self._model.use_adapter(slot, None)  # first, so that its memory is there for the new one
        self._model.use_adapter(slot, self.pack(adapter))

    def begin_step(self, slots: NDArray[np.int64] | None) -> None:
        """Sets the adapter slot of each token, [T]; None: all tokens are the base model's."""
        self.token_slots = slots

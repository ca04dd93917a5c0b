"""The states of recurrent layers by slot, and behind them those of cached prefixes."""

from __future__ import annotations

import numpy as np

from ..layout.state_layout import StateLayout
from .aligned import CACHE_LINE, aligned_zeros
from .shape import Array, DType, Longs, NativeShape


class NativeStates:
    """`memory` [slots and snapshots, bytes]: each state has all recurrent layers, as the library lays it out.

    A state is not cleared when its sequence ends: a sequence that begins with its first token reads zeros.
    """

    def __init__(self, shape: NativeShape, layout: StateLayout, dtype: DType) -> None:
        self.layout = layout
        stride = -(-shape.state_bytes(dtype) // CACHE_LINE) * CACHE_LINE
        self.memory: Array = aligned_zeros((layout.num_slots + layout.num_snapshots, stride), np.dtype(np.uint8))

    @property
    def place(self) -> dict[str, int]:
        """The states as fields of `CacheSlabsStruct`."""
        num_states, stride = self.memory.shape
        return {"states": self.memory.ctypes.data, "state_stride": stride, "num_states": num_states}

    def make_host_states(self) -> Array:
        """Host memory for the states of swapped sequences. Unused places take address space only."""
        return np.empty((self.layout.num_on_host, self.memory.shape[1]), np.uint8)

    def copy(self, sources: Longs, destinations: Longs) -> None:
        """Copies the state of slot or snapshot `sources[i]` to `destinations[i]`. None is in both."""
        _copy(self.memory, sources, self.memory, destinations)

    def copy_out(self, slots: Longs, host: Array, places: Longs) -> None:
        """Copies the state of `slots[i]` to place `places[i]` of `host` (see `make_host_states`)."""
        _copy(self.memory, slots, host, places)

    def copy_in(self, host: Array, places: Longs, slots: Longs) -> None:
        """Copies place `places[i]` of `host` to the state of `slots[i]`."""
        _copy(host, places, self.memory, slots)


def _copy(memory: Array, sources: Longs, to: Array, destinations: Longs) -> None:
    """One at a time, without a copy in between."""
    for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
        to[destination] = memory[source]

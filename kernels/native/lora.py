"""LoRA adapters in the library: packed once, then put into a model's slots between steps."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import library
from .shape import Array

TARGETS = ("qkv", "output", "gate_up", "down")  # `LoraTarget` of source/lora/adapter.h


@dataclass(frozen=True, slots=True, eq=False)
class NativeLoraSlice:
    """Rows of a layer's linear that an adapter changes: y[row_start : row_start + n] += b @ (a @ x).

    Gate and up lie one after another. Slices with the same array `a` share its sums.
    """

    layer: int
    target: str  # of TARGETS
    row_start: int
    a: Array  # [r, k], contiguous, of the adapter's dtype; bfloat16 as two bytes each
    b: Array  # [n, r] likewise


class PackedAdapter:
    """An adapter's matrices as steps of one model read them. Its memory is freed with it and the slots that have it."""

    def __init__(
        self,
        native: ctypes.CDLL,
        model: int,
        type_id: int,
        slices: Sequence[NativeLoraSlice],
        pause: Callable[[], object] | None = None,
    ) -> None:
        """Copies and packs the arrays; may run beside steps. Raises MemoryError.

        `pause` is called between small pieces of work in Python, so that it may let other threads have the lock.
        """
        sources = (library.LoraSliceStruct * len(slices))()
        for source, one in zip(sources, slices, strict=True):
            if pause is not None:
                pause()
            assert one.a.flags.c_contiguous and one.b.flags.c_contiguous, "a and b must be contiguous"
            source.layer, source.target = one.layer, TARGETS.index(one.target)
            source.first_row, source.num_rows, source.rank = one.row_start, one.b.shape[0], one.a.shape[0]
            source.a, source.b = one.a.ctypes.data, one.b.ctypes.data
        self.handle: int | None = native.millrace_adapter_new(model, type_id, len(slices), sources)
        if not self.handle:
            raise MemoryError(f"no memory for an adapter of {sum(one.a.nbytes + one.b.nbytes for one in slices)} bytes")
        self.num_bytes = int(native.millrace_adapter_bytes(self.handle))
        weakref.finalize(self, native.millrace_adapter_delete, self.handle).atexit = False

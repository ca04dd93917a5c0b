"""A model in the library: how long it lives, what its calls report, and what it tells of its last step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterable

_PROBLEMS = {
    1: "an input id is outside the vocabulary",
    2: "a position is past the rotary tables (max_positions)",
    3: "a slot is past the cache",
    4: "query_starts or lengths do not fit the tokens or the block tables",
    5: "a block table has a block id outside the cache",
    6: "a logits row is not one of the tokens",
    7: "no memory for the step's activations",
    9: "a token's adapter slot is empty, or past those that were reserved",
    10: "a sequence of recurrent layers has no slot, or one past the states of the cache",
}
IS_PROMPT = 8  # a row reads a token of its prompt


class LibraryModel:
    """The library's own model, at `pointer`, which functions of `library` take. Deleted with the last reference."""

    def __init__(self, library: ctypes.CDLL, pointer: int) -> None:
        self.library, self.pointer = library, pointer
        self._kept: list[object] = []
        self._positions: list[object] = []
        freed = weakref.finalize(self, _delete, library, pointer, (self._kept, self._positions))
        freed.atexit = False  # the system frees the memory of a process, and a thread may still be packing weights

    def keep(self, *memory: object) -> None:
        """Keeps memory alive as long as the model: steps that are not waited for may read it, or write to it."""
        self._kept.extend(memory)

    def keep_positions(self, tables: Iterable[object]) -> None:
        """Keeps the rotary tables alive, in place of those before."""
        self._positions[:] = tables

    def check(self, problem: int) -> None:
        """Raises ValueError or MemoryError for what a call has returned, unless it is 0."""
        if problem == 7:
            raise MemoryError(_PROBLEMS[problem])
        if problem:
            raise ValueError(f"native step: {_PROBLEMS[problem]}")

    # -- what the last step did

    @property
    def num_screen_candidates(self) -> int:
        """(row, panel of 32 tokens) pairs that the last step's argmax screen left as candidates.

        -1: the step used no screen, or needed no logits.
        """
        return int(self.library.millrace_screen_candidates(self.pointer))

    @property
    def num_screen_refined(self) -> int:
        """(row, panel) pairs that the last step's argmax screen refined."""
        return int(self.library.millrace_screen_refined(self.pointer))

    @property
    def is_split_by_rows(self) -> bool:
        """Whether two threads split the last step's products by rows, each with all weights, and not by columns."""
        return bool(self.library.millrace_is_split_by_rows(self.pointer))

    @property
    def is_split(self) -> bool:
        """Whether the last step's rows were split between two threads, from the layer before which both had joined."""
        return bool(self.library.millrace_is_split(self.pointer))

    @property
    def num_layers_before_split(self) -> int:
        """Layers before the last split step was split; -1: the second thread did not join before the last layer."""
        return int(self.library.millrace_num_layers_before_split(self.pointer))

    @property
    def is_streaming(self) -> bool:
        """Whether the last step had so few rows, in its layers or its head, that it read weights non-temporally."""
        return bool(self.library.millrace_is_streaming(self.pointer))

    @property
    def kv_prefetched_bytes(self) -> int:
        """Bytes of keys and values that the last step prefetched a layer ahead, beside products."""
        return int(self.library.millrace_kv_prefetched_bytes(self.pointer))

    # -- for tests

    def assume_retained(self, num_bytes: int) -> None:
        """Fixes the bytes that the shared cache retains; negative: measures them, as by default.

        Results of steps do not depend on it.
        """
        self.library.millrace_assume_retained(self.pointer, num_bytes)

    def assume_split(self, is_split: bool | None) -> None:
        """Splits the rows of all steps that allow it, or of none; None: the faster way, as by default.

        Results of steps do not depend on it.
        """
        self.library.millrace_assume_split(self.pointer, -1 if is_split is None else int(is_split))


def _delete(library: ctypes.CDLL, model: int, kept: object) -> None:
    """Deletes the model, then releases `kept`, which running steps may read. No caller may be waiting for a step."""
    library.millrace_model_delete(model)

"""Chained decoding steps: each may be queued while the one before it runs, whose sampled tokens it reads.

No Python code runs between two chained steps. State is in slot columns, as in `slot_step.py`.
"""

from __future__ import annotations

import numpy as np

from .shape import Bools, Ints, Longs
from .slot_step import NativeChooser, SlotStep


class StepChain:
    """Decoding steps with sampling, on the model's step thread. Step numbers rise, by one where a step follows another.

    Each row reads its slot's newest token and replaces it by the sampled one.
    """

    def __init__(self, decoding: SlotStep, chooser: NativeChooser) -> None:
        self._model, self._slot_sampling = decoding.model, chooser.slot_sampling
        assert self._model.step_thread_id, "a step chain needs a model with a step thread: num_threads > 1"
        self._begun, self._following = decoding.rows(), decoding.rows()

    def begin(self, number: int, slots: Longs, starts: Ints) -> None:
        """Queues a step of these slots behind everything that the model was asked to run.

        `starts` [L]: tokens of each slot in the cache. Raises MemoryError. Call on the thread that calls `wait`.
        """
        rows, count = self._begun.of(slots, starts)
        self._model.begin(number, rows, self._slot_sampling, count)

    def follow(self, number: int, slots: Longs, starts: Ints) -> bool:
        """Like `begin`, but directly behind step `number - 1`.

        Returns false and does nothing if that step has not begun, is over, or is not the last in the queue. Call on any
        one thread, which may be another than the one that waits.
        """
        rows, count = self._following.of(slots, starts)
        return self._model.follow(number, rows, self._slot_sampling, count)

    def wait(self, number: int, num_rows: int) -> tuple[Longs, Bools] | None:
        """Waits for a step: (token ids, broken rows), [L] each. Call once per step.

        None if a row reads a token of its prompt, in this step or the one that it follows; then nothing was done.
        Raises as `NativeModel.decode` does; then the steps that follow have done nothing either.
        """
        token_ids, is_broken = np.empty(num_rows, np.int64), np.empty(num_rows, np.bool_)
        is_done = self._model.wait(number, num_rows, token_ids.ctypes.data, is_broken.ctypes.data)
        return (token_ids, is_broken) if is_done else None

    def drain(self) -> None:
        """Waits until no step runs, including steps without a call of `wait`."""
        self._model.drain()

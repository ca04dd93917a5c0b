"""Decoding steps with the choice of their tokens, each of which may be handed over while the one before it runs: what
is chosen there is what it reads, and nothing else is between the two.

Knows slots' columns, as `slot_step.py` does. Refuses to know who wants which step.
"""

from __future__ import annotations

import numpy as np

from .shape import Bools, Ints, Longs
from .slot_step import Chooser, Decoding


class Chain:
    """Steps of a model that has a thread of its own for them. Their numbers rise, by one where one follows another.

    Each row reads its slot's newest token, and the one that is chosen takes its place.
    """

    def __init__(self, decoding: Decoding, chooser: Chooser) -> None:
        self._model, self._asked = decoding.model, chooser.asked
        assert self._model.step_thread_id, "a chain of steps, and no thread that goes from one to the next"
        self._begun, self._following = decoding.rows(), decoding.rows()

    def begin(self, number: int, slots: Longs, starts: Ints) -> None:
        """Has a step of these slots run when all is over that the model was asked for. Each has `starts` [L] tokens in
        the cache. Raises MemoryError. By the thread that waits."""
        rows, count = self._begun.of(slots, starts)
        self._model.begin(number, rows, self._asked, count)

    def follow(self, number: int, slots: Longs, starts: Ints) -> bool:
        """The same, but right behind step `number - 1`; false, and nothing is done, if that is over, not begun yet, or
        somebody is behind it. By any one thread, beside the one that waits."""
        rows, count = self._following.of(slots, starts)
        return self._model.follow(number, rows, self._asked, count)

    def wait(self, number: int, num_rows: int) -> tuple[Longs, Bools] | None:
        """(token ids, rows that hold no number), [L] each, of a step that has begun; asked for once.

        None, and nothing was done, if a row reads a token of its prompt, here or in the step that this one follows.
        Raises as `NativeModel.decode`; then those that follow have done nothing, too.
        """
        token_ids, is_broken = np.empty(num_rows, np.int64), np.empty(num_rows, np.bool_)
        is_done = self._model.wait(number, num_rows, token_ids.ctypes.data, is_broken.ctypes.data)
        return (token_ids, is_broken) if is_done else None

    def drain(self) -> None:
        """Returns when no step runs, of those too that nobody waits for."""
        self._model.drain()

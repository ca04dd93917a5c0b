"""Records the rows of each step, as changes only."""

from __future__ import annotations

import numpy as np

from .format import Column, EventKind
from .tracer import Tracer

KEYFRAME_STEPS = 256


class StepRows:
    """Writes the rows of each step, as changes: nothing while the same rows go on decoding.

    Every KEYFRAME_STEPS steps it writes all rows, so that a ring whose beginning was overwritten can still be read.

    `num_slots` is the size of the slot-indexed state. With several lanes, so many steps with rows of their own take
    turns, and all of these rows are changes.
    """

    def __init__(self, tracer: Tracer, source: int, num_slots: int, num_lanes: int = 1) -> None:
        self._tracer = tracer
        self._source = source
        self._decoding = np.full(num_slots, -1, np.int64)  # [S] the sequence that decodes in the slot, -1 if none
        self._is_here = np.zeros(num_slots, np.bool_)  # [S] in the current step; false between steps
        self._last_slots = np.empty(0, np.int64)
        self._decoding_slots: Column | None = None  # of the last step, if all its rows decoded
        self._num_lanes = num_lanes
        self._lanes: list[tuple[Column, Column]] = []  # (slots, sequences) of the last steps whose rows all decoded

    def go_on(self, step: int, slots: Column, starts: Column) -> bool:
        """Whether this step has the rows of the last one, or of a lane, all decoding.

        Then there is nothing left to write. It compares the array's identity only.
        """
        if step % KEYFRAME_STEPS == 0:
            return False
        if slots is self._decoding_slots:
            return True
        return self._num_lanes > 1 and self._take_turns(step, slots, starts)

    def _take_turns(self, step: int, slots: Column, starts: Column) -> bool:
        """Writes the change from one lane to another, if both are known."""
        before = after = None
        for lane, ids in self._lanes:
            before = ids if lane is self._decoding_slots else before
            after = ids if lane is slots else after
        if before is None or after is None or self._decoding_slots is None:
            return False
        if self._tracer.enabled:
            self._tracer.emit_many(EventKind.ROW_LEAVE, self._source, step, before, self._decoding_slots)
            self._tracer.emit_many(EventKind.ROW_DECODE, self._source, step, after, slots, starts)
        self._decoding[self._decoding_slots] = -1
        self._decoding[slots] = after
        self._decoding_slots, self._last_slots = slots, slots.astype(np.int64)
        return True

    def step(
        self,
        step: int,
        slots: Column,
        sequence_ids: Column,
        starts: Column,
        num_tokens: Column,
    ) -> None:
        """Writes the rows of a step.

        Arrays [R]: slot, sequence, position of its first token, tokens computed.
        """
        if not self._tracer.enabled:
            return
        decodes, before = num_tokens == 1, self._decoding[slots]
        is_new = before != sequence_ids
        if step % KEYFRAME_STEPS == 0:
            is_new[:] = True
        self._decoding_slots = slots if decodes.all() else None
        if self._num_lanes > 1 and self._decoding_slots is not None:
            others = [lane for lane in self._lanes if lane[0] is not slots]
            self._lanes = [*others, (slots, sequence_ids)][-self._num_lanes :]
        if not is_new.any() and len(slots) == len(self._last_slots) and self._decoding_slots is not None:
            return  # as many rows as before, all of which decoded before: the same rows
        emit_many, source = self._tracer.emit_many, self._source
        extends, begins = ~decodes, decodes & is_new
        self._is_here[slots] = True
        gone = self._last_slots[~self._is_here[self._last_slots]]
        self._is_here[slots] = False
        left = np.concatenate([gone, slots[before != sequence_ids]])  # not in this step, or taken by another sequence
        left = left[self._decoding[left] >= 0]
        if len(left):
            emit_many(EventKind.ROW_LEAVE, source, step, self._decoding[left], left)
            self._decoding[left] = -1
        if extends.any():
            of_slots = (slots[extends], starts[extends], num_tokens[extends])
            emit_many(EventKind.ROW_EXTEND, source, step, sequence_ids[extends], *of_slots)
        if begins.any():
            emit_many(EventKind.ROW_DECODE, source, step, sequence_ids[begins], slots[begins], starts[begins])
        self._decoding[slots] = np.where(decodes, sequence_ids, -1)
        self._last_slots = slots.astype(np.int64)

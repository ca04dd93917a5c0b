"""Records the rows of each step, as changes only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .format import Column, EventKind
from .tracer import Tracer

KEYFRAME_STEPS = 256


class StepRows:
    """Writes the rows of each step, as changes: nothing while the same rows go on decoding.

    Every KEYFRAME_STEPS steps it writes all rows, so that a ring whose beginning was overwritten can still be read.

    `num_slots` is the size of the slot-indexed state.
    """

    def __init__(self, tracer: Tracer, source: int, num_slots: int) -> None:
        self._tracer = tracer
        self._source = source
        self._decoding = np.full(num_slots, -1, np.int64)  # [S] the sequence that decodes in the slot, -1 if none
        self._is_here = np.zeros(num_slots, np.bool_)  # [S] in the current step; false between steps
        self._last_slots = np.empty(0, np.int64)
        self._decoding_slots: Column | None = None  # of the last step, if all its rows decoded

    def go_on(self, step: int, slots: Column, starts: Column) -> bool:
        """Whether this step has the rows of the last one, all decoding.

        Then there is nothing left to write. It compares the array's identity only.
        """
        return slots is self._decoding_slots and step % KEYFRAME_STEPS != 0

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


@dataclass(slots=True, eq=False)
class _Turn:
    """Rows that decode together, in one of `num_lanes` steps."""

    slots: Column
    sequence_ids: Column
    written: int  # step in which they were last written
    due: int  # step that reads them next, unless something is written


class LaneRows:
    """As `StepRows`, of rows in lanes: so many steps with rows of their own take turns.

    Rows that decode are written with the number of lanes, and nothing is written while each lane keeps to its turn.
    """

    def __init__(self, tracer: Tracer, source: int, num_slots: int, num_lanes: int) -> None:
        self._tracer, self._source, self._num_lanes = tracer, source, num_lanes
        self._here = np.full(num_slots, -1, np.int64)  # [S] sequences of the current step; -1 between steps
        self._turns: list[_Turn] = []  # no row is in two of them

    def go_on(self, step: int, slots: Column, starts: Column) -> bool:
        """As of `StepRows`, whether this step has the rows of a lane, of which all that changes is then written."""
        mine = None
        for turn in self._turns:
            if turn.slots is slots:
                mine = turn
        if mine is None:
            return False
        self._end_missed(step, mine)
        if mine.due != step or step - mine.written >= KEYFRAME_STEPS:
            self._write(step, mine, starts)
        mine.due = step + self._num_lanes
        return True

    def step(
        self,
        step: int,
        slots: Column,
        sequence_ids: Column,
        starts: Column,
        num_tokens: Column,
    ) -> None:
        """As of `StepRows`."""
        if not self._tracer.enabled:
            return
        self._here[slots] = sequence_ids
        for turn in list(self._turns):
            found = self._here[turn.slots]
            if (found >= 0).any():  # some of its rows are in other company now
                self._turns.remove(turn)
                self._leave(step, turn, found != turn.sequence_ids)
        self._here[slots] = -1
        self._end_missed(step)
        extends = num_tokens != 1
        if extends.any():
            of_slots = (slots[extends], starts[extends], num_tokens[extends])
            self._tracer.emit_many(EventKind.ROW_EXTEND, self._source, step, sequence_ids[extends], *of_slots)
        decodes = ~extends
        if decodes.any():
            is_lane = not extends.any()
            turn = _Turn(slots if is_lane else slots[decodes], sequence_ids[decodes], step, step + self._num_lanes)
            self._turns.append(turn)
            self._write(step, turn, starts[decodes])

    def _write(self, step: int, turn: _Turn, starts: Column) -> None:
        turn.written = step
        of_slots = (turn.slots, starts, self._num_lanes)
        self._tracer.emit_many(EventKind.ROW_DECODE, self._source, step, turn.sequence_ids, *of_slots)

    def _end_missed(self, step: int, mine: _Turn | None = None) -> None:
        """Ends the turns of other rows, which this step should have had."""
        for turn in [one for one in self._turns if one is not mine and one.due <= step]:
            self._turns.remove(turn)
            self._leave(step, turn, np.ones(len(turn.slots), np.bool_))

    def _leave(self, step: int, turn: _Turn, is_gone: np.ndarray) -> None:
        if is_gone.any():
            of_rows = (turn.sequence_ids[is_gone], turn.slots[is_gone])
            self._tracer.emit_many(EventKind.ROW_LEAVE, self._source, step, *of_rows)

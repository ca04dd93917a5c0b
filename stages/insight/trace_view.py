"""Records of a trace, indexed by kind, by step and by request.

The records may be of this process, of a file, or of a recording.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...runtime.trace.format import ENGINE_STEPS
from ...runtime.trace.tracer import EventKind, Records, some_of

# Names of stages in the engine's pipeline that the analysis treats specially.
SCHEDULE, SAMPLE = "schedule", "sample"


@dataclass(frozen=True, slots=True)
class StageBatches:
    """A stage's batches that carried steps, in order, [B] each. Times in ns."""

    stage: str
    first_steps: np.ndarray
    num_items: np.ndarray
    begins: np.ndarray
    service_ends: np.ndarray
    ends: np.ndarray  # after the time blocked

    def of_step(self, step: int) -> int | None:
        """The index of the batch that carried `step`, or None."""
        place = int(np.searchsorted(self.first_steps, step, "right")) - 1
        return place if place >= 0 and step < self.first_steps[place] + self.num_items[place] else None


class TraceView:
    """`records` in order of time, and the table of their names."""

    def __init__(self, records: Records, names: Sequence[str]) -> None:
        self.records = records
        self.names = names
        self._by_kind: dict[EventKind, Records] = {}
        self._step_places: dict[EventKind, dict[int, int]] = {}

    def of(self, kind: EventKind) -> Records:
        """The records of one kind."""
        if kind not in self._by_kind:
            self._by_kind[kind] = some_of(self.records, self.records["kind"] == kind)
        return self._by_kind[kind]

    def of_request(self, kind: EventKind, sequence_id: int) -> Records:
        """The records of a kind whose first field is `sequence_id`."""
        records = self.of(kind)
        chosen: Records = records[records["a"] == sequence_id]
        return chosen

    def of_step(self, kind: EventKind, step: int) -> np.void | None:
        """The last record of a kind for `step`, or None."""
        place = self._places_by_step(kind).get(step)
        return None if place is None else self.of(kind)[place]

    def rows_of(self, sequence_id: int) -> Records:
        """The ROW records of a sequence, in order of time."""
        rows, places = self._rows
        first, end = np.searchsorted(places, [sequence_id, sequence_id + 1])
        return rows[first:end]

    def num_prompt_tokens(self, sequence_id: int) -> int:
        """Of a sequence's prompt; 0 if the trace does not have it.

        The choices of a prompt have the ids after it.
        """
        records = self.of(EventKind.REQUEST_TOKENIZED)
        before = records[records["a"] <= sequence_id]
        return int(before["b"][np.argmax(before["a"])]) if len(before) else 0

    @property
    def begin_ns(self) -> int:
        """Time of the first record."""
        return int(self.records["time_ns"][0]) if len(self.records) else 0

    @property
    def end_ns(self) -> int:
        """Time of the last record."""
        return int(self.records["time_ns"][-1]) if len(self.records) else 0

    @cached_property
    def step_batches(self) -> list[StageBatches]:
        """The batches of each stage whose items are steps, without schedule."""
        batches = self.of(EventKind.STAGE_BATCH)
        others = {*np.unique(self.of(EventKind.REQUEST_STAGE)["source"]).tolist()}
        others |= {source for source, name in enumerate(self.names) if name == SCHEDULE}
        sources = [source for source in np.unique(batches["source"]).tolist() if source not in others]
        return [self._batches(some_of(batches, batches["source"] == source)) for source in sources]

    @cached_property
    def schedule_batches(self) -> StageBatches | None:
        """The batches of schedule."""
        batches = self.of(EventKind.STAGE_BATCH)
        planned = self.of(EventKind.STEP_PLANNED)
        of_schedule = some_of(batches, batches["source"] == planned["source"][0]) if len(planned) else planned
        return self._batches(of_schedule) if len(of_schedule) else None

    @cached_property
    def void_steps(self) -> set[int]:
        """Granted steps that did not run."""
        return set(self.of(EventKind.STEP_VOID)["step"].tolist())

    @cached_property
    def last_step(self) -> int:
        """The last granted step, or -1."""
        granted = self.of(EventKind.STEP_GRANTED)
        return int(granted["step"].max()) if len(granted) else -1

    @cached_property
    def decode_step_ns(self) -> int | None:
        """The median forward pass without prompt tokens; None if there was none."""
        executed = self.of(EventKind.STEP_EXECUTED)
        alone = executed[executed["a"] == executed["b"]]
        return int(np.median(alone["c"])) * 1000 if len(alone) else None

    @cached_property
    def preemptions(self) -> list[tuple[int, int, str]]:
        """(sequence id, time in ns, how) of each PREEMPTED record, in order."""
        rows, _ = self._rows
        rows = rows[rows["kind"] != EventKind.ROW_LEAVE]
        found = []
        for record in self.of(EventKind.PREEMPTED):
            held = rows[(rows["b"] == record["a"]) & (rows["time_ns"] <= record["time_ns"])]
            if len(held):
                last = held[np.argmax(held["time_ns"])]
                found.append((int(last["a"]), int(record["time_ns"]), self.names[int(record["b"])]))
        return found

    @cached_property
    def _rows(self) -> tuple[Records, np.ndarray]:
        """ROW records by sequence, then by time; and the sequence of each."""
        is_row = (self.records["kind"] >= EventKind.ROW_EXTEND) & (self.records["kind"] <= EventKind.ROW_LEAVE)
        rows = some_of(self.records, is_row)
        rows = some_of(rows, np.argsort(rows["a"], kind="stable"))
        return rows, rows["a"]

    def _batches(self, records: Records) -> StageBatches:
        ends = records["time_ns"].astype(np.int64)
        service_ends = ends - records["d"].astype(np.int64) * 1000
        begins = service_ends - records["c"].astype(np.int64) * 1000
        name = self.names[int(records["source"][0])]
        steps, num_items = records["step"].astype(np.int64), records["a"].astype(np.int64)
        columns = (steps, num_items, begins, service_ends, ends)
        if len(steps) and int(steps.max()) - int(steps.min()) >= ENGINE_STEPS:  # of several engine processes, mixed
            order = np.argsort(steps, kind="stable")
            columns = tuple(column[order] for column in columns)  # type: ignore[assignment]
        return StageBatches(name, *columns)

    def _places_by_step(self, kind: EventKind) -> dict[int, int]:
        found = self._step_places.get(kind)
        if found is None:
            found = {step: place for place, step in enumerate(self.of(kind)["step"].tolist())}
            self._step_places[kind] = found
        return found

"""Functions on arrays of records: joining, names, request ids, and the token timeline."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .format import ENGINE_STEPS, FIELDS, RECORD_DTYPE, WHOLE, EventKind, Records

MOST_KINDS = 1 << 16


def in_order_of_time(parts: Iterable[Records]) -> Records:
    """Joins the records of several rings in order of time. Records of one ring keep their order."""
    records = np.concatenate([np.empty(0, WHOLE), *(part.view(WHOLE) for part in parts)]).view(RECORD_DTYPE)
    return some_of(records, np.argsort(records["time_ns"], kind="stable"))


def some_of(records: Records, which: npt.NDArray[Any]) -> Records:
    """`records[which]`, for an array of indices or a mask; faster than indexing by field."""
    some: Records = records.view(WHOLE)[which].view(RECORD_DTYPE)
    return some


def table_of(kinds: Iterable[EventKind]) -> npt.NDArray[np.bool_]:
    """A lookup table of these kinds: `table_of(kinds)[records["kind"]]`."""
    table = np.zeros(MOST_KINDS, np.bool_)
    table[list(kinds)] = True
    return table


def as_dicts(records: Records, names: list[str]) -> Iterator[dict[str, Any]]:
    """Each record as a dict of named fields, with name ids resolved.

    For people and exports; slow.
    """
    for record in records:
        kind = EventKind(int(record["kind"]))
        event: dict[str, Any] = {"time_ns": int(record["time_ns"]), "kind": kind.name}
        event |= {"source": names[record["source"]], "step": int(record["step"])}
        for field, column in zip(FIELDS[kind], "abcd", strict=False):
            value = int(record[column])
            event[field] = names[value] if field.endswith("_name") else value
        yield event


def request_names(records: Records) -> dict[int, str]:
    """sequence_id -> request_id, from the REQUEST_NAME records, which must be in order."""
    texts: dict[int, bytes] = {}
    for record in records[records["kind"] == EventKind.REQUEST_NAME]:
        words = struct.pack("<III", *(int(record[column]) for column in "bcd"))
        texts[int(record["a"])] = texts.get(int(record["a"]), b"") + words
    return {sequence_id: text.rstrip(b"\0").decode(errors="replace") for sequence_id, text in texts.items()}


def token_times(records: Records) -> dict[int, list[tuple[int, int]]]:
    """sequence_id -> (step, time_ns) of each of its tokens: the token timeline.

    `records` are in order of time and reach back to where the rows began. The time is that of the step's STEP_DONE. A
    row that extends gets a token if its next record is a decode: its prompt was then complete.
    """
    done = {int(r["step"]): int(r["time_ns"]) for r in records[records["kind"] == EventKind.STEP_DONE]}
    rows = records[np.isin(records["kind"], (EventKind.ROW_EXTEND, EventKind.ROW_DECODE, EventKind.ROW_LEAVE))]
    numbers = sorted(done)
    history: dict[int, list[tuple[int, int, int]]] = {}  # sequence_id -> (step, kind, num_lanes), in order
    for row in rows:
        event = (int(row["step"]), int(row["kind"]), max(1, int(row["d"])))
        history.setdefault(int(row["a"]), []).append(event)
    timeline: dict[int, list[tuple[int, int]]] = {}
    for sequence_id, events in history.items():
        steps: list[int] = []
        for (step, kind, every), (next_step, next_kind, _) in zip(events, [*events[1:], (-1, 0, 1)], strict=True):
            if kind == EventKind.ROW_DECODE:
                is_near = 0 <= next_step - step < ENGINE_STEPS  # else it has none, or in another engine process
                end = next_step if is_near else step + ENGINE_STEPS
                found = numbers[bisect_left(numbers, step) : bisect_left(numbers, end)]
                steps.extend(found if every == 1 else [one for one in found if (one - step) % every == 0])
            elif kind == EventKind.ROW_EXTEND and next_kind == EventKind.ROW_DECODE:
                steps.append(step)
        timeline[sequence_id] = [(step, done[step]) for step in steps if step in done]
    return timeline

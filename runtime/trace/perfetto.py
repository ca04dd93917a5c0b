"""The trace as Chrome's trace-event JSON, which ui.perfetto.dev and chrome://tracing open.

Each stage and the device have a track of slices: a batch, a forward pass. Each request is a track of async slices.
Flows follow each step from schedule to sample. Counters show what runs, waits and fills blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import numpy as np

from .request_spans import RequestSpans, request_spans
from .tracer import EventKind, Records

Event = dict[str, Any]
STAGES, REQUESTS, COUNTERS = 1, 2, 3  # "processes", which group tracks
LANES = 64  # of a stage with concurrent items; track numbers are this far apart
ROUNDING_NS = 200_000  # a slice may seem to begin this long before the previous one ended: records come afterwards
FLOW = ((EventKind.STEP_PLANNED, "schedule"), (EventKind.STEP_GRANTED, "allocate"), (EventKind.STEP_DONE, "sample"))


def chrome_trace(records: Records, names: list[str]) -> dict[str, Any]:
    """The document.

    `records` are in order of time, `names` is the name table of any of their rings. Times in the document are in
    microseconds from the first record on.
    """
    base_ns = int(records["time_ns"][0]) if len(records) else 0
    tracks = _Tracks(base_ns)
    for record in records[np.isin(records["kind"], list(_SLICES))]:
        tracks.add(record, names)
    events = [
        *tracks.events(),
        *_flows(records, tracks, base_ns),
        *_counters(records, names, base_ns),
        *_instants(records, names, tracks, base_ns),
    ]
    for request in request_spans(records, names):
        events += _request(request, base_ns)
    groups = {STAGES: "stages", REQUESTS: "requests", COUNTERS: "counters"}
    metadata = [_named("process_name", pid, 0, title) for pid, title in groups.items()]
    return {"traceEvents": [*metadata, *events], "displayTimeUnit": "ms"}


# -- slices

# kind -> (track, or None for the record's own source; columns whose sum is the duration in microseconds)
_SLICES: dict[EventKind, tuple[str | None, tuple[str, ...]]] = {
    EventKind.STAGE_BATCH: (None, ("c", "d")),
    EventKind.STEP_EXECUTED: ("device", ("c",)),
    EventKind.STEP_SAMPLED: ("device", ("b",)),
    EventKind.LOOP_LAG: ("loop", ("a",)),
    EventKind.GC_PAUSE: ("gc", ("a",)),
}


class _Tracks:
    """Tracks of slices without overlap: slices of one stage that overlap go to separate lanes."""

    def __init__(self, base_ns: int) -> None:
        self._base_ns = base_ns
        self._tids: dict[str, int] = {}
        self._ends: dict[int, list[int]] = {}  # tid -> end of each of its slices, ns
        self._begins: dict[int, list[int]] = {}
        self._events: list[Event] = []

    def add(self, record: np.void, names: list[str]) -> None:
        kind = EventKind(int(record["kind"]))
        track, columns = _SLICES[kind]
        track = track or names[record["source"]]
        end_ns = int(record["time_ns"])
        begin_ns = max(self._base_ns, end_ns - 1000 * sum(int(record[column]) for column in columns))
        tid, begin_ns = self._place(track, begin_ns, end_ns)
        self._begins[tid].append(begin_ns)
        self._ends[tid].append(end_ns)
        title, args = _title(kind, record)
        times = {"ts": (begin_ns - self._base_ns) / 1000, "dur": (end_ns - begin_ns) / 1000}
        self._events.append({"ph": "X", "pid": STAGES, "tid": tid, "name": title, "args": args} | times)

    def find(self, track: str, time_ns: int) -> tuple[int, int] | None:
        """(tid, a time in it) of the slice that was active at `time_ns`; None if there is none."""
        tid = self._tids.get(track)
        if tid is None:
            return None
        at = bisect_left(self._ends[tid], time_ns)
        if at == len(self._ends[tid]) or self._begins[tid][at] - time_ns > ROUNDING_NS:
            return None
        return tid, max(time_ns, self._begins[tid][at])

    def tid(self, track: str) -> int:
        """The number of a track; new ones come after the others."""
        if track not in self._tids:
            self._tids[track] = LANES * (1 + len(self._tids))
        return self._tids[track]

    def events(self) -> Iterator[Event]:
        """The slices, and the names of their tracks."""
        yield from self._events
        for track, tid in self._tids.items():
            for lane in range(LANES):
                if tid + lane in self._ends or lane == 0:
                    yield _named("thread_name", STAGES, tid + lane, f"{track} {lane + 1}" if lane else track)
                    order = {"ph": "M", "name": "thread_sort_index", "pid": STAGES, "tid": tid + lane}
                    yield order | {"args": {"sort_index": tid + lane}}

    def _place(self, track: str, begin_ns: int, end_ns: int) -> tuple[int, int]:
        """(tid, begin) on the first lane that is free by then, within ROUNDING_NS."""
        first = self.tid(track)
        for tid in range(first, first + LANES):
            ends = self._ends.setdefault(tid, [])
            self._begins.setdefault(tid, [])
            free_ns = ends[-1] if ends else 0
            if free_ns <= begin_ns + ROUNDING_NS and free_ns <= end_ns:
                return tid, max(begin_ns, free_ns)
        return first, max(begin_ns, self._ends[first][-1])


def _title(kind: EventKind, record: np.void) -> tuple[str, Event]:
    a, b, step = int(record["a"]), int(record["b"]), int(record["step"])
    match kind:
        case EventKind.STAGE_BATCH:
            return "batch", {
                "num_items": a,
                "wait_us": b,
                "service_us": int(record["c"]),
                "blocked_us": int(record["d"]),
            }
        case EventKind.STEP_EXECUTED:
            return "forward", {"step": step, "num_rows": a, "num_tokens": b}
        case EventKind.STEP_SAMPLED:
            return "sample", {"step": step, "num_rows": a}
        case EventKind.LOOP_LAG:
            return "late", {}
        case _:
            return "collection", {"generation": b, "num_collected": int(record["c"])}


# -- requests, flows, counters


def _request(request: RequestSpans, base_ns: int) -> Iterator[Event]:
    """An async slice for the request, and one for each span within it."""
    args = {
        "request_id": request.request_id,
        "cause": request.cause or "under way",
        "num_sequences": request.num_sequences,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_cached_tokens": request.num_cached_tokens,
        "num_generated_tokens": request.num_generated_tokens,
        "is_cut": request.is_cut,
    }
    own = {"cat": "request", "id": request.number, "pid": REQUESTS, "tid": 0}
    yield {"ph": "b", "name": request.request_id, "ts": (request.begin_ns - base_ns) / 1000, "args": args} | own
    for span in request.spans:
        yield {"ph": "b", "name": span.name, "ts": (span.begin_ns - base_ns) / 1000} | own
        yield {"ph": "e", "name": span.name, "ts": (span.end_ns - base_ns) / 1000} | own
    yield {"ph": "e", "name": request.request_id, "ts": (request.end_ns - base_ns) / 1000} | own


def _flows(records: Records, tracks: _Tracks, base_ns: int) -> Iterator[Event]:
    """An arrow for each step, through the slices in which it was planned, granted and done."""
    stops: dict[int, list[tuple[int, int]]] = {}  # step -> (tid, ns)
    steps = records[np.isin(records["kind"], [kind for kind, _ in FLOW])]
    for kind, track in FLOW:
        for record in steps[steps["kind"] == kind]:
            place = tracks.find(track, int(record["time_ns"]))
            if place is not None:
                stops.setdefault(int(record["step"]), []).append(place)
    for step, places in stops.items():
        if len(places) != len(FLOW) or sorted(ns for _, ns in places) != [ns for _, ns in places]:
            continue  # its beginning was overwritten, it is not done, or its number was reused after a void step
        for phase, (tid, time_ns) in zip("stf", places, strict=True):
            event = {"ph": phase, "cat": "step", "name": "step", "id": step, "pid": STAGES, "tid": tid}
            yield event | {"ts": (time_ns - base_ns) / 1000} | ({"bp": "e"} if phase == "f" else {})


def _counters(records: Records, names: list[str], base_ns: int) -> Iterator[Event]:
    for record in records:
        a, b, c, d = (int(record[column]) for column in "abcd")
        match record["kind"]:
            case EventKind.STEP_PLANNED:
                title, values = "sequences", {"running": c, "waiting": d}
            case EventKind.STEP_GRANTED:
                title, values = "tokens of a step", {"tokens": b}
            case EventKind.KV_POOL:
                title, values = "KV blocks", {"in use": b, "cached": c, "quarantined": d, "free": a}
            case EventKind.EDGE_DEPTH:
                title, values = f"depth of {names[record['source']]}", {"items": a}
            case _:
                continue
        ts = (int(record["time_ns"]) - base_ns) / 1000
        yield {"ph": "C", "name": title, "pid": COUNTERS, "tid": 0, "ts": ts, "args": values}


_INSTANTS = (EventKind.STALL, EventKind.STAGE_RESTART, EventKind.STEP_VOID, EventKind.PREEMPTED, EventKind.REQUEST_SHED)


def _instants(records: Records, names: list[str], tracks: _Tracks, base_ns: int) -> Iterator[Event]:
    for record in records[np.isin(records["kind"], _INSTANTS)]:
        name = EventKind(int(record["kind"])).name.lower().replace("_", " ")
        tid, ts = tracks.tid(names[record["source"]]), (int(record["time_ns"]) - base_ns) / 1000
        yield {"ph": "i", "s": "t", "name": name, "pid": STAGES, "tid": tid, "ts": ts}


def _named(what: str, pid: int, tid: int, title: str) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": title}}

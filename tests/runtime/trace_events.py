"""A validator of Chrome's trace-event format, for what the engine's exports promise of it."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

PHASES = {"X", "M", "b", "e", "C", "i", "s", "t", "f"}
EPSILON_US = 0.001  # of times, which are thousandths of microseconds


def check_trace_events(document: dict[str, Any]) -> None:
    """Raises AssertionError unless it is JSON whose async slices each end, nested; whose slices on a track nest; whose
    flows begin once, end once and touch slices in order; and whose counters are numbers."""
    events = json.loads(json.dumps(document, allow_nan=False))["traceEvents"]
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert event["ph"] in PHASES and isinstance(event["name"], str) and event["name"], event
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int), event
        if event["ph"] != "M":
            assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "C":
            assert event["args"] and all(type(value) in (int, float) for value in event["args"].values()), event
    for track, parts in slices.items():
        _check_nesting(track, parts)
    _check_async([event for event in events if event["ph"] in "be"])
    _check_flows([event for event in events if event["ph"] in "stf"], slices)


def _check_nesting(track: tuple[int, int], slices: list[tuple[float, float]]) -> None:
    around: list[float] = []
    for begin, end in sorted(slices, key=lambda part: (part[0], -part[1])):
        while around and around[-1] <= begin + EPSILON_US:
            around.pop()
        assert not around or end <= around[-1] + EPSILON_US, f"track {track}: a slice at {begin} overlaps another"
        around.append(end)


def _check_async(events: list[dict[str, Any]]) -> None:
    """In file order, which must be the order of their times."""
    under_way: dict[tuple[str, int], list[str]] = defaultdict(list)
    last: dict[tuple[str, int], float] = defaultdict(float)
    for event in events:
        key = (event["cat"], event["id"])
        assert event["ts"] >= last[key], f"{event} goes back in time"
        last[key] = event["ts"]
        if event["ph"] == "b":
            under_way[key].append(event["name"])
        else:
            assert under_way[key] and under_way[key].pop() == event["name"], f"{event} ends what it is not in"
    assert not any(under_way.values()), f"without end: { {key: names for key, names in under_way.items() if names} }"


def _check_flows(events: list[dict[str, Any]], slices: dict[tuple[int, int], list[tuple[float, float]]]) -> None:
    flows: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        flows[event["cat"], event["id"]].append(event)
        parts = slices[event["pid"], event["tid"]]
        is_on_one = any(begin - EPSILON_US <= event["ts"] <= end + EPSILON_US for begin, end in parts)
        assert is_on_one, f"{event} touches no slice"
    for key, stops in flows.items():
        assert "".join(event["ph"] for event in stops) == "s" + "t" * (len(stops) - 2) + "f", key
        times = [event["ts"] for event in stops]
        assert times == sorted(times), key

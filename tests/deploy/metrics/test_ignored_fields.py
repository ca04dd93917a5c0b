"""Unknown fields of requests: each name is logged once, and clients can fill neither the memory nor the log."""

from __future__ import annotations

from millrace.deploy.metrics.ignored_fields import LINE_S, MAX_LINES, MAX_NAMES, IgnoredFields, shown_name
from millrace.runtime.env.log import captured_logs

KNOWN = ("max_tokens", "temperature", "stop")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_an_unknown_field_is_logged_once_with_the_name_that_is_most_like_it() -> None:
    fields = IgnoredFields(Clock())
    with captured_logs() as lines:
        for _ in range(3):
            fields.note(["max_tokns", "zz"], KNOWN)
    told = [(line["level"], line["event"], line["field"], line["perhaps_meant"]) for line in lines]
    assert told == [
        ("warning", "request.unknown_field", "max_tokns", "max_tokens"),
        ("warning", "request.unknown_field", "zz", None),
    ]
    assert fields.num_fields == 6


def test_many_and_odd_names_fill_neither_the_memory_nor_the_log() -> None:
    clock = Clock()
    fields = IgnoredFields(clock)
    with captured_logs() as lines:
        for number in range(40):
            fields.note([f"a\n{number} {place}" * 9_000 for place in range(40)], KNOWN)
        assert len(lines) == MAX_LINES, "at once"
        clock.now_s += 3 * LINE_S
        for number in range(40):
            fields.note([f"b{number}"], KNOWN)
        assert len(lines) == MAX_LINES + 3, "and one more for each minute"
        for number in range(2 * MAX_NAMES):
            clock.now_s += LINE_S
            fields.note([f"c{number}"], KNOWN)
    assert all(line["field"] == shown_name(line["field"]) and len(line["field"]) <= 64 for line in lines)
    assert fields.num_fields == 40 * 40 + 40 + 2 * MAX_NAMES and len(fields._names) == MAX_NAMES

"""The file of a run: a line of JSON for each finding, on the disk before the next one is looked for.

    {"t": 12.3, "part": "attention", "row": {...}}

`t` is in seconds since the run began. The third name is the kind: `KINDS` lists them. Several processes append to one
file. A process that is killed leaves whole lines, but for the last one at the most, which readers skip.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NAME = "rows.jsonl"
KINDS = {
    "run": "how it was started; all rows before are of an earlier run",
    "began": "of a part: its limit in seconds",
    "device": "the card's name",
    "versions": "of all that figures depend on",
    "row": "a finding",
    "wrong": "a result that is not right, in a sentence",
    "oom": "out of memory: what was tried",
    "left_out": "what was tried and raised, and why",
    "failed": "the part raised, or its process ended",
    "stopped": "the part took longer than its limit",
    "skipped": "the part was not begun, and why",
    "packages": "installed packages that were imported",
    "health": "clocks, power and temperature when the part had ended",
    "ended": "of a part, in seconds",
    "end": "of the run, in seconds",
}


class RowFile:
    """Appends rows. Each is on the disk when its call returns."""

    def __init__(self, folder: Path, began_s: float) -> None:
        self._began_s = began_s  # of the monotonic clock, which all processes share
        self._file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # behind what a killed process left

    def write(self, part: str, kind: str, value: Any) -> None:
        self.write_all(part, kind, [value])

    def write_all(self, part: str, kind: str, values: Iterable[Any]) -> None:
        """Several rows that were found together, as one write."""
        assert kind in KINDS
        t = round(time.monotonic() - self._began_s, 3)
        lines = [json.dumps({"t": t, "part": part, kind: _plain(value)}, default=str) + "\n" for value in values]
        left = "".join(lines).encode()
        while left:
            left = left[os.write(self._file, left) :]
        os.fsync(self._file)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All whole rows of a run, in their order."""
    path, rows = folder / NAME, []
    for line in path.read_bytes().split(b"\n") if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "part" in row:
            rows.append(row)
    return rows


def _plain(value: Any) -> Any:
    """Without numbers that JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value

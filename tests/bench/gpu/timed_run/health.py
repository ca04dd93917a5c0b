"""Clocks, power and temperature of the card: a run that was slowed down looks like a slower program otherwise."""

from __future__ import annotations

import shutil
import subprocess
from threading import Thread

from tests.bench.gpu.timed_run.rows import RowFile

ASKED = (
    *("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu"),
    *("clocks_event_reasons.active", "memory.used", "utilization.gpu"),
)
LIMIT_S = 10.0
_asking: list[Thread] = []


def note(rows: RowFile, part: str) -> None:
    """Writes a row, beside what comes next; nothing without the tool."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        _asking.append(Thread(target=_note, args=(tool, rows, part), daemon=True))
        _asking[-1].start()


def wait() -> None:
    """Until all rows are written."""
    while _asking:
        _asking.pop().join(LIMIT_S)


def _note(tool: str, rows: RowFile, part: str) -> None:
    asked = [tool, f"--query-gpu={','.join(ASKED)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        rows.write(part, "health", {"error": str(error)})
        return
    values = [each.strip() for each in said.strip().split("\n")[0].split(",")]
    rows.write(part, "health", dict(zip(ASKED, values, strict=False)))

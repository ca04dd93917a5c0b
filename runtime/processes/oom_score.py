"""Which of our processes the kernel ends first when memory runs out: one that can be replaced."""

from __future__ import annotations

from contextlib import suppress

FILE = "/proc/self/oom_score_adj"
MOST = 1000
ENGINE, HELPER = 500, 900  # thousandths of all memory by which such a process counts as larger than it is


def raise_oom_score(by: int) -> None:
    """Makes this process a likelier victim than its parent. Does nothing where the system has no such file."""
    with suppress(OSError, ValueError):
        with open(FILE) as file:
            inherited = int(file.read())
        with open(FILE, "w") as file:
            file.write(str(min(MOST, inherited + by)))

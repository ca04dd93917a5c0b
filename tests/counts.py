"""How much of a test is run: what CI has time for, or the full count, by MILLRACE_FULL=1."""

from __future__ import annotations

import os

FULL = bool(os.environ.get("MILLRACE_FULL"))


def count(in_ci: int, full: int) -> int:
    """The count that is wanted now."""
    return full if FULL else in_ci

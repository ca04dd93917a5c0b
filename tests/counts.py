"""How much of a test is run, and with which draws: what CI has time for, or the full count, by MILLRACE_FULL=1.

A change is judged by the same draws every time, so a failure is the change's; full counts draw anew.
"""

from __future__ import annotations

import os
import random

FULL = bool(os.environ.get("MILLRACE_FULL"))


def count(in_ci: int, full: int) -> int:
    """The count that is wanted now."""
    return full if FULL else in_ci


def first_seed() -> int:
    """Where a test's draws begin, which it prints: MILLRACE_SEED, or a new one for full counts, or always the same."""
    seed = int(os.environ.get("MILLRACE_SEED", random.SystemRandom().randrange(2**32) if FULL else 20_241))
    print(f"MILLRACE_SEED={seed}")
    return seed

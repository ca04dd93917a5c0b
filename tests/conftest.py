"""What holds for all tests."""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # one of several beside each other: torch's threads would fight for the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

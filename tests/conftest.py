"""What holds for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from millrace.runtime import log

if "PYTEST_XDIST_WORKER" in os.environ:  # one of several beside each other: torch's threads would fight for the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def the_log_is_put_back() -> Iterator[None]:
    """A command run within this process sets up the log, and would leave it so for the tests after it."""
    yield
    log.shutdown()

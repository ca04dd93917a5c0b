from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.running import RunningServer


@pytest.fixture(scope="package")
def server() -> Iterator[RunningServer]:
    """A server with steps that take no time."""
    with RunningServer() as running:
        yield running


@pytest.fixture(scope="package")
def slow_server() -> Iterator[RunningServer]:
    """A server with steps of 10 ms that never ends an answer by itself."""
    with RunningServer(step_s=0.01, script={"eos_probability": 0.0}) as running:
        yield running

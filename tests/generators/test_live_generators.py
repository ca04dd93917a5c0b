""", as many as fit a change; MILLRACE_FULL=1 for the counts that are asked for, commands for more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.counts import count, first_seed
from tests.deploy.running import RunningServer
from tests.generators import bodies, http_mutator
from tests.security.watch import watched

pytestmark = [pytest.mark.slow, pytest.mark.security]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(server={"log_format": "json"}, audit=True) as running, watched(running, fully=True):
        yield running


def test_bodies_with_wrong_fields_are_refused_by_the_right_name(server: RunningServer):
    bodies.run(server, count(150, full=2_000))


def test_mutated_http_breaks_nothing(server: RunningServer):
    http_mutator.run(server, count(300, full=500), first_seed())
    assert "unhandled error" not in server.errors() and "request.failed" not in server.errors()

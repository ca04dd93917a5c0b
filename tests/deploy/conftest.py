from __future__ import annotations

import os
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


# tests of what a server with one front alone tells, or of engines that its fronts share: see `scripted_fronts.py`
OF_ONE_FRONT = {
    "test_health_and_version_answer": "/health has the list of fronts",
    "test_server_info_tells_the_model_the_settings_and_the_blocks": "/server_info has the list of fronts",
    "test_server_info_names_the_caches_that_fill_and_their_bounds": "/server_info tells of the caches of one front",
    "test_cached_tokens_are_counted": "each front of the test has an engine of its own, with its own cache",
    "test_a_key_sees_its_own_requests_and_the_admins_sees_all": "the rows of /v1/requests name their fronts",
    "test_requests_are_listed_page_by_page_in_the_order_in_which_they_came": "they come front by front",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With MILLRACE_TEST_FRONTS skips what holds of one front."""
    if os.environ.get("MILLRACE_TEST_FRONTS"):
        for item in items:
            if (reason := OF_ONE_FRONT.get(getattr(item, "originalname", item.name))) is not None:
                item.add_marker(pytest.mark.skip(reason=f"MILLRACE_TEST_FRONTS: {reason}"))

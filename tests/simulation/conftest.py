"""Starts the long part of the simulation beside the other tests, if there are any."""

from __future__ import annotations

import pytest

from tests.simulation import background

FEW = 200  # tests: for fewer it is not worth a process


def pytest_collection_finish(session: pytest.Session) -> None:
    is_wanted = any("test_a_planted_bug_is_found" in item.name for item in session.items)
    is_alone = not hasattr(session.config, "workerinput")  # else the other workers are beside it as it is
    if is_wanted and is_alone and len(session.items) > FEW and not session.config.option.collectonly:
        background.start()


def pytest_sessionfinish() -> None:
    background.stop()

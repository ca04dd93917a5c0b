"""The scripted engine as a pytest fixture: `pytest_plugins = ["millrace.stages.testing.pytest_plugin"]` in a
conftest.py.

def test_my_client_reads_the_answer(scripted):
    async def main(engine):
        ...
    scripted(main, answer="Hello!")
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from .scripted.engine import ScriptedEngine, scripted_engine

Main = Callable[[ScriptedEngine], Awaitable[Any]]


@pytest.fixture
def scripted() -> Callable[..., Any]:
    """Runs `async def main(engine)` with a scripted engine, started, on an event loop of its own, and returns what it
    returned. Keywords are those of `scripted_engine`."""

    def run(main: Main, **options: Any) -> Any:
        async def run_main() -> Any:
            engine = scripted_engine(**options)
            async with engine:
                return await main(engine)

        return asyncio.run(run_main())

    return run

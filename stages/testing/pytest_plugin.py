"""The pytest fixture `scripted`, which runs a scripted engine.

Put `pytest_plugins = ["millrace.stages.testing.pytest_plugin"]` into a conftest.py.

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
    """A function that runs `async def main(engine)` with a scripted engine.

    It returns the result of `main`. Each call has an event loop of its own. Keyword arguments are those of
    `scripted_engine`.
    """

    def run(main: Main, **options: Any) -> Any:
        async def run_main() -> Any:
            engine = scripted_engine(**options)
            async with engine:
                return await main(engine)

        return asyncio.run(run_main())

    return run

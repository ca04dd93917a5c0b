"""The event loop that a millrace process runs on, and waiting for what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib.util import find_spec


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's factory if uvloop is installed; None: asyncio's own loop."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def until_any_is_set(*events: asyncio.Event) -> None:
    """Waits until one of these events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)

"""`AwakeClock`: the time in which this process ran, for limits that hold on a busy machine, too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any

TICK_S = 0.1
LATE_S = 1.0  # between two looks: then this process did not run, and the fleet's hardly


class AwakeClock:
    """Seconds that only pass while the loop runs: a machine that is stopped or overloaded for a while adds none.

    Run `tick` in a task.
    """

    def __init__(self) -> None:
        self._last_s = time.monotonic()
        self._lost_s = 0.0

    def now(self) -> float:
        """The time in seconds."""
        now_s = time.monotonic()
        if now_s - self._last_s > LATE_S:
            self._lost_s += now_s - self._last_s - TICK_S
        self._last_s = now_s
        return now_s - self._lost_s

    @property
    def lost_s(self) -> float:
        """Seconds so far in which this process did not run."""
        self.now()
        return self._lost_s

    async def tick(self) -> None:
        """Looks at the time again and again, until it is cancelled."""
        while True:
            self.now()
            await asyncio.sleep(TICK_S)

    async def wait(self, awaited: Sequence[Awaitable[Any]], limit_s: float) -> bool:
        """Waits until all are done. False after `limit_s`; what is not done goes on."""
        pending = {asyncio.ensure_future(one) for one in awaited}
        end_s = self.now() + limit_s
        while pending and self.now() < end_s:
            _, pending = await asyncio.wait(pending, timeout=TICK_S)
        return not pending

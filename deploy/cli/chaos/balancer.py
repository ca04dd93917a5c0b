"""What stands before several fronts: a client goes to its own one, or to another one that is ready."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from .fleet import ChaosFleet

if TYPE_CHECKING:
    import aiohttp

LOOK_S = 0.25  # between two looks at the readiness of a front
LOOK_TIMEOUT_S = 1.0


class Balancer:
    """Asks each front whether it is ready. Call `start`, in the end `aclose`."""

    def __init__(self, fleet: ChaosFleet) -> None:
        self._fleet = fleet
        self._urls = [str(front.ready["url"]) for front in fleet.fronts]  # where requests of a front go
        self._next_urls: dict[int, str] = {}  # of successors, until the process before says that it is not ready
        self._is_ready = [True] * len(self._urls)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look(), name="balancer")

    async def aclose(self) -> None:
        """Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def url(self, front: int) -> str:
        return self._urls[front]

    def choose(self, client: int) -> int:
        """The front of a client: its own one if that is ready, or none is; else the next one that is."""
        count = len(self._urls)
        order = [(client + step) % count for step in range(count)]
        return next((front for front in order if self._is_ready[front]), order[0])

    def note_failure(self, front: int) -> None:
        """A connection to it failed: it is tried again once it says that it is ready."""
        self._is_ready[front] = False

    def note_new(self, front: int, *, at_once: bool) -> None:
        """A front has a new process. Requests go there: at once, or when the process before is not ready any more."""
        self._next_urls[front] = str(self._fleet.fronts[front].ready["url"])
        if at_once:
            self._switch(front)

    def _switch(self, front: int) -> bool:
        """Whether a successor takes over."""
        if (url := self._next_urls.pop(front, None)) is None:
            return False
        self._urls[front] = url
        return True

    async def _look(self) -> None:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=LOOK_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                await asyncio.gather(*(self._look_at(session, front) for front in range(len(self._urls))))
                await asyncio.sleep(LOOK_S)

    async def _look_at(self, session: aiohttp.ClientSession, front: int) -> None:
        url = self._urls[front]
        is_ready = await self._asked(session, url)
        if url == self._urls[front]:
            self._is_ready[front] = is_ready or self._switch(front)

    async def _asked(self, session: aiohttp.ClientSession, url: str) -> bool:
        import aiohttp

        with suppress(OSError, TimeoutError, aiohttp.ClientError):
            async with session.get(f"{url}/health/ready") as response:
                return response.status == 200
        return False

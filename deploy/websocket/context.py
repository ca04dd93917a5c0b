"""Shared state of all sessions of one server: services, configuration, tasks and threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, ParamSpec, TypeVar

from ..api.openai.generation import Generation
from ..api.service import Service
from ..http.json_limits import INLINE_BYTES
from ..http.sized_threads import run_sized
from ..metrics.metrics import Metrics

P = ParamSpec("P")
T = TypeVar("T")


class SocketContext:
    """The shared context; one per server, used on its event loop only."""

    def __init__(self, generation: Generation, metrics: Metrics, threads: Executor) -> None:
        self.generation = generation
        self.service: Service = generation.service
        self.config = generation.service.config
        self.metrics = metrics
        self._threads = threads
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs `work` in a task of its own; holds a reference to it until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Cancels all spawned tasks."""
        for task in list(self._tasks):
            task.cancel()

    async def compute(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls `function` for a message; in a thread if `num_bytes` is over `INLINE_BYTES`."""
        if num_bytes <= INLINE_BYTES:
            return function(*args, **kwargs)
        return await run_sized(self._threads, num_bytes, lambda: function(*args, **kwargs))

"""Waits of requests at a gate, for an adapter or a grammar: the end of the request ends its wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ...runtime.exit import Outbox
from ...runtime.trace.tracer import EventKind, Tracer
from ..errors import Overloaded


class GateWaits:
    """The waits of one engine, by request id. Each is that of the task that submits the request."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[object]] = {}

    def request_ended(self, outbox: Outbox[object], cause: str, error: BaseException | None) -> None:
        """Ends the wait of a request that was aborted, or that ran out of time. Called by the exit."""
        task = self._tasks.pop(outbox.request_id, None)
        if task is not None:
            task.cancel()

    @contextmanager
    def waiting(self, outbox: Outbox[object]) -> Iterator[None]:
        """Around a wait of the current task. Leaves it without an error when the request ends."""
        task, request_id = asyncio.current_task(), outbox.request_id
        assert task is not None
        num_cancels = task.cancelling()
        self._tasks[request_id] = task
        try:
            yield
        except asyncio.CancelledError:
            has_ended = self._tasks.get(request_id) is not task
            if not has_ended or task.uncancel() > num_cancels:  # the task itself was cancelled
                raise
        finally:
            if self._tasks.get(request_id) is task:
                del self._tasks[request_id]


def trace_shed(tracer: Tracer, error: Overloaded, reason: str) -> None:
    """Records that a request was turned away before it entered the pipeline."""
    counts = (int(error.estimated_wait_s * 1000), error.queue_depth, tracer.source(reason))
    tracer.emit(EventKind.REQUEST_SHED, tracer.source("door"), 0, *counts)

"""Streams chunks to clients from the outbox's wakeup, without waking a task per token.

Waking a task costs a turn of the event loop and all its coroutines, several times the cost of the write. While a client
reads, its task sleeps. The callback writes all chunks that have arrived in one write. The task wakes up if a write
would have to wait, or on an error.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context

from ....runtime.wakeups import SharedWakeup
from ...http.sse import EventStream
from .chunks import ChunkIterator


async def send_all(chunks: ChunkIterator, stream: EventStream) -> None:
    """Sends all chunks to the end, each as soon as it arrives.

    Raises the error that ends the request, and `ConnectionError` if the client has disconnected.
    """
    async for bodies in chunks:
        await stream.send(bodies)
        if stream.can_send_now and not chunks.needs_waiting and not chunks.is_over():
            await _StreamPump(chunks, stream).run()


class _StreamPump:
    """Writes a stream from a callback while its client reads and its task sleeps."""

    def __init__(self, chunks: ChunkIterator, stream: EventStream) -> None:
        self._chunks = chunks
        self._stream = stream
        self._wakeup = chunks.outbox.wakeup
        self._context = copy_context()
        # resolved: the task must continue (None) or raise the exception
        self._is_stuck: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Sends chunks while writes need no waiting.

        On return every chunk is sent or still unread in the outbox.
        """
        try:
            self._on_wakeup(self._wakeup)  # chunks that arrived in the meantime
            error = await self._is_stuck
        finally:
            if not self._wakeup.is_going:
                self._wakeup.waiter = None
        if error is not None:
            raise error

    def _on_wakeup(self, wakeup: SharedWakeup) -> None:
        """Sends the chunks that are there; hands any exception to the task."""
        if self._is_stuck.done():
            return  # the task was cancelled
        try:
            if self._send_arrived():
                wakeup.add_done_callback(self._on_wakeup, context=self._context)
            else:
                self._is_stuck.set_result(None)
        except Exception as error:
            self._is_stuck.set_result(error)  # lost if the task is cancelled, which is fine

    def _send_arrived(self) -> bool:
        if not self._stream.can_send_now:
            return False
        if bodies := self._chunks.poll():
            self._stream.send_now(bodies)
        return self._chunks.outbox.cause is None and not self._chunks.is_over()

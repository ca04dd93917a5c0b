"""Chunks on their way to clients that read: those of all streams are written in the turn of the loop they come in.

A task that waits for its next token costs a turn of the loop and all its coroutines each time, several times what the
writing costs. So while a client reads, its task sleeps, and its stream is written where its outbox's bell is heard:
what has come by then, in one write. Where a write would have to wait, or something goes wrong, the task wakes up and
sees to it.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context

from ....runtime.wakeups import SharedBell
from ...http.sse import EventStream
from .chunks import Chunks


async def send_all(chunks: Chunks, stream: EventStream) -> None:
    """Sends all chunks to the end, each as soon as it is there. Raises what ends the request, and `ConnectionError`
    where the client has left."""
    async for bodies in chunks:
        await stream.send(bodies)
        if stream.can_send_now and not chunks.needs_waiting and not chunks.is_over():
            await _Flow(chunks, stream).run()


class _Flow:
    """A stream whose client reads, in the place of its task."""

    def __init__(self, chunks: Chunks, stream: EventStream) -> None:
        self._chunks = chunks
        self._stream = stream
        self._bell = chunks.outbox.bell
        self._context = copy_context()
        # resolved: its task has to go on, or to raise that
        self._is_stuck: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Sends chunks as long as none has to be waited for. Returns with all that came sent, or still to be read."""
        try:
            self._hear(self._bell)  # what came meanwhile
            error = await self._is_stuck
        finally:
            if not self._bell.is_going:
                self._bell.waiter = None
        if error is not None:
            raise error

    def _hear(self, bell: SharedBell) -> None:
        """Sends what is there. What goes wrong is for the task to hear."""
        if self._is_stuck.done():
            return  # it was cancelled
        try:
            if self._goes_on():
                bell.add_done_callback(self._hear, context=self._context)
            else:
                self._is_stuck.set_result(None)
        except Exception as error:
            self._is_stuck.set_result(error)  # if the task is cancelled, nobody misses it

    def _goes_on(self) -> bool:
        if not self._stream.can_send_now:
            return False
        if bodies := self._chunks.poll():
            self._stream.send_now(bodies)
        return self._chunks.outbox.cause is None and not self._chunks.is_over()

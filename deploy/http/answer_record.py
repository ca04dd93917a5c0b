"""An answer that is kept while it is made, so that several connections can read it from its beginning."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping

from aiohttp import web

KEY_HEADER = "Idempotency-Key"  # of a request whose answer is kept for others with the same key
KEY = re.compile(r"[\x21-\x7e]{1,255}")  # what it may be
OVERHEAD_BYTES = 1024  # counted for a record beside its answer


class AnswerRecord:
    """The status, headers and body of one answer, as far as it is made.

    `count` is called with the bytes that came; what it raises, the writer of the answer gets.
    """

    def __init__(self, count: Callable[[int], object]) -> None:
        self.status = 200
        self.headers: Mapping[str, str] = {}
        self.is_stream = False
        self.is_over = False
        self.error: Exception | None = None  # instead of an answer, or of its rest
        self.num_bytes = OVERHEAD_BYTES
        self._parts: list[bytes] = []
        self._has_begun = False
        self._count = count
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, status: int, headers: Mapping[str, str], *, is_stream: bool) -> None:
        """The answer has this status and these headers; parts of its body follow."""
        self.status, self.headers, self.is_stream, self._has_begun = status, headers, is_stream, True
        self._tell()

    def add(self, part: bytes) -> None:
        """A part of the body."""
        self.num_bytes += len(part)
        self._count(len(part))
        self._parts.append(part)
        self._tell()

    def end(self, error: Exception | None = None) -> None:
        """All of it is there, or no more will come. Idempotent."""
        if not self.is_over:
            self.is_over, self.error = True, error
            self._tell()

    async def begun(self) -> None:
        """Waits for status and headers. Raises the error if there is one instead."""
        while not (self._has_begun or self.is_over):
            await asyncio.shield(self._changed)
        if not self._has_begun and self.error is not None:
            raise self.error

    async def parts(self) -> AsyncIterator[bytes]:
        """The body, as it comes. Raises the error if there is one instead of its rest."""
        num_read = 0
        while True:
            if num_read < len(self._parts):
                data, num_read = b"".join(self._parts[num_read:]), len(self._parts)
                yield data
            elif not self.is_over:
                await asyncio.shield(self._changed)
            elif self.error is not None:
                raise self.error
            else:
                return

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)


RECORD = web.RequestKey("record", AnswerRecord)  # set on a request whose answer is written there

"""The lines of OpenAI's batch format: reading them in a stream, parsing requests, and formatting answers."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import secrets
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import orjson

from ...runtime.workers.thread_start import start_thread

URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
READ_AHEAD = 32  # lines read before a request can take them
NOT_IN_A_BATCH = ("stream", "background")  # fields whose answer is not one JSON object


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One line of the input. `data` is None for a line over the size limit."""

    number: int  # from 1
    data: bytes | None


@dataclass(frozen=True, slots=True)
class BatchItem:
    """The request of one line."""

    custom_id: str
    url: str
    body: dict[str, Any]


class BadBatchLine(Exception):
    """A line that is not a valid request."""

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


class LineReader:
    """The non-blank lines of `file`, read by its own thread at most `READ_AHEAD` lines ahead.

    Several tasks may iterate over it: each line goes to one of them. A line over `max_bytes` comes without its data
    and is never in memory as a whole. The iteration raises a read error once. The reader owns and closes the file.
    `close` ends the iteration early: the thread ends after its current line. A read from a terminal cannot be
    interrupted, so there the thread waits for that line; it is a daemon and keeps no process alive.
    """

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._loop = asyncio.get_running_loop()
        self._room = threading.Semaphore(READ_AHEAD)
        self._queue: asyncio.Queue[BatchLine | OSError | None] = asyncio.Queue()
        self._is_closed = False
        start_thread(threading.Thread(target=self._read, args=(file,), name="millrace-batch-lines", daemon=True))

    async def __aiter__(self) -> AsyncIterator[BatchLine]:
        while True:
            line = await self._queue.get()
            if not isinstance(line, BatchLine):
                self._queue.put_nowait(None)  # for the other tasks that iterate
                if line is None:
                    return
                raise line
            self._room.release()
            yield line

    def close(self) -> None:
        """Stops reading. Idempotent."""
        self._is_closed = True
        self._room.release()

    def _read(self, file: BinaryIO) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            try:
                with file:
                    self._read_lines(file)
            except OSError as error:
                self._put(error)
            self._put(None)

    def _read_lines(self, file: BinaryIO) -> None:
        number = 0
        while not self._is_closed and (data := file.readline(self._max_bytes + 1)):
            number += 1
            is_whole = len(data) <= self._max_bytes
            if not is_whole:
                _skip_line(file, data)
            elif not data.strip():
                continue
            self._room.acquire()
            self._put(BatchLine(number, data if is_whole else None))

    def _put(self, line: BatchLine | OSError | None) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, line)


def _skip_line(file: BinaryIO, data: bytes) -> None:
    while data and not data.endswith(b"\n"):
        data = file.readline(65536)


def parse(line: BatchLine, max_bytes: int) -> BatchItem:
    """The request of a line. Raises `BadBatchLine`."""
    if line.data is None:
        raise BadBatchLine(
            "line_too_long", f"line {line.number} is longer than {max_bytes} bytes; see --max-body-bytes"
        )
    try:
        fields = orjson.loads(line.data.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise BadBatchLine("invalid_json_line", f"line {line.number} is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadBatchLine("invalid_json_line", f"line {line.number} must be a JSON object")
    return _item(fields, line.number)


def _item(fields: dict[str, Any], number: int) -> BatchItem:
    custom_id, body = fields.get("custom_id"), fields.get("body")
    if not isinstance(custom_id, str):
        raise BadBatchLine("invalid_request_line", f"line {number}: custom_id must be a string")
    if fields.get("method", "POST") != "POST":
        raise BadBatchLine("invalid_method", f"line {number}: method must be POST", custom_id)
    if fields.get("url") not in URLS:
        raise BadBatchLine("invalid_url", f"line {number}: url must be one of {', '.join(URLS)}", custom_id)
    if not isinstance(body, dict):
        raise BadBatchLine("invalid_request_line", f"line {number}: body must be a JSON object", custom_id)
    for name in NOT_IN_A_BATCH:
        if body.get(name):
            raise BadBatchLine(
                "invalid_request_line", f"line {number}: body.{name} is not supported in a batch", custom_id
            )
    return BatchItem(custom_id, fields["url"], body)


def answered(custom_id: str, status: int, request_id: str, body: Any) -> bytes:
    """The output line of a request with an HTTP answer of any status."""
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(custom_id, response=response, error=None)


def failed(custom_id: str | None, code: str, message: str) -> bytes:
    """The output line of a request without an HTTP answer."""
    return _line(custom_id, response=None, error={"code": code, "message": message})


def _line(custom_id: str | None, **rest: Any) -> bytes:
    return orjson.dumps({"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id} | rest) + b"\n"

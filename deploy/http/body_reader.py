"""Reads and parses the JSON body of a request, within limits of type, length and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar

from aiohttp import web

from ...runtime.env.awake_time import AwakeTimeout
from ..config import ServerConfig
from ..errors import ApiError
from .json_limits import INLINE_BYTES, JsonLimits, parse_object, too_large
from .sized_threads import run_sized

T = TypeVar("T")

FORMS = ("application/x-www-form-urlencoded", "application/octet-stream")  # of `curl -d`, and of no type at all
_FROM_BROWSERS = frozenset({"Origin", "Referer", "Sec-Fetch-Site", "Sec-Fetch-Mode"})
BODY = web.RequestKey("body", bytes)  # set where it was read before its handler asks for it
MAX_CHUNKS = 16_384  # of a chunked body; each costs microseconds, even if it is one byte


async def read(
    request: web.Request,
    config: ServerConfig,
    threads: Executor,
    make: Callable[[Mapping[str, Any]], T],
    takes_forms: bool = False,
) -> T:
    """Returns `make(body)` for the JSON object in the request's body.

    `ApiError` 400, 408, 413 or 415. A body over `INLINE_BYTES` is parsed, and `make` called, in a thread. `make`
    must not touch objects of the loop. With `takes_forms`, the JSON may come as the content of a form, as `curl -d`
    labels it, though not from a browser: there a foreign page could send it without being asked first.
    """
    data = await _read_bytes(request, config, takes_forms and not _FROM_BROWSERS.intersection(request.headers))
    limits = JsonLimits(num_bytes=config.max_body_bytes)
    if len(data) <= INLINE_BYTES:
        return make(parse_object(data, limits))
    return await run_sized(threads, len(data), lambda: make(parse_object(data, limits)))


async def _read_bytes(request: web.Request, config: ServerConfig, takes_forms: bool) -> bytes:
    if request.content_type != "application/json" and not (takes_forms and request.content_type in FORMS):
        raise ApiError("unsupported_media_type", "the body must be sent as Content-Type: application/json")
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8", "us-ascii"):
        raise ApiError("unsupported_media_type", "the body must be UTF-8")
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError("unsupported_media_type", "the body must be sent without Content-Encoding")
    if (request.content_length or 0) > config.max_body_bytes:
        raise too_large(config.max_body_bytes)
    return request[BODY] if BODY in request else await _read_in_time(request, config)


async def read_ahead(request: web.Request, config: ServerConfig) -> bytes:
    """Reads the bytes of a body before its handler does, which gets them then.

    `ApiError` 400, 408 or 413.
    """
    if BODY not in request:
        request[BODY] = await _read_in_time(request, config)
    return request[BODY]


async def _read_in_time(request: web.Request, config: ServerConfig) -> bytes:
    try:
        async with AwakeTimeout(config.body_timeout_s):
            return await _read_all(request, config.max_body_bytes)
    except TimeoutError:
        raise ApiError("request_timeout", f"the body did not arrive within {config.body_timeout_s:g} s") from None
    except web.RequestPayloadError:
        raise ApiError("bad_request", "the body is not well-formed HTTP") from None


async def _read_all(request: web.Request, limit: int) -> bytes:
    if not request.can_read_body:
        return b""
    parts: list[bytes] = []
    num_bytes = num_chunks = 0
    async for part, is_end_of_chunk in request.content.iter_chunks():
        num_bytes += len(part)
        num_chunks += is_end_of_chunk
        if num_bytes > limit:
            raise too_large(limit)
        if num_chunks > MAX_CHUNKS:
            raise ApiError("body_too_large", f"the body has more than {MAX_CHUNKS} chunks: send longer ones")
        parts.append(part)
        if num_chunks % 1024 == 1023:
            await asyncio.sleep(0)  # reading buffered chunks never waits: let other tasks run
    return b"".join(parts)

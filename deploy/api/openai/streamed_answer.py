"""An answer as server-sent events."""

from __future__ import annotations

import asyncio

import orjson
from aiohttp import web

from ...http.request_context import ERROR_BODY
from ...http.sse import DONE, event_stream
from ..service import Service
from .answers import AnswerBuilder
from .chunks import ChunkIterator
from .prepared_request import PreparedRequest, ignored_headers, stream_error
from .sse_pump import send_all


async def stream_answer(
    request: web.Request, service: Service, order: PreparedRequest, answer: AnswerBuilder, chunks: ChunkIterator
) -> web.StreamResponse:
    """The answer as server-sent events.

    Nothing is sent before the first piece, so that an earlier error still gets its own HTTP status. After
    `sse_ping_interval_s` the headers are sent anyway, so that no proxy times out.
    """
    config = service.config
    first = asyncio.ensure_future(anext(chunks))
    headers = ignored_headers(order.ignored)
    stream = event_stream(request, config.stalled_reader_s, headers, config.sse_ping_interval_s)
    try:
        await asyncio.wait((first,), timeout=config.sse_ping_interval_s or None)
        if first.done():
            first.result()
        async with stream:
            try:
                await stream.send(await first)
                await send_all(chunks, stream)
            except ConnectionError:
                raise
            except Exception as error:
                failed = stream_error(order, error, answer.id)
                write_error = request.get(ERROR_BODY)
                await stream.send([orjson.dumps(failed.body() if write_error is None else write_error(failed))])
            if answer.HAS_DONE:
                await stream.send([DONE])
            return await stream.finish()
    except ConnectionError:
        raise asyncio.CancelledError from None  # the client is gone; aiohttp signals that by cancellation
    finally:
        first.cancel()
        if stream.has_stalled:
            service.close(answer.id, "stalled_reader")

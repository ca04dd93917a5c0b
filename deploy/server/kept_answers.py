"""`Idempotency-Key`: a request that is sent again gets the answer of the first one, and is not computed twice."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ...runtime.pipeline import Health
from ..api.service import CacheUse, Service
from ..errors import ApiError, describe, not_serving
from ..http.answer_record import KEY, KEY_HEADER, OVERHEAD_BYTES, RECORD, AnswerRecord
from ..http.body_reader import read_ahead
from ..http.request_context import OWNER
from ..http.sse import EventStream
from .middleware import log_unforeseen

AGAIN = "Idempotent-Replayed"
KEPT_S = 60.0  # after the end of an answer


class KeptAnswer(AnswerRecord):
    """The answer to the first request with its key, which goes on without that request's client."""

    def __init__(self, digest: bytes, count: Callable[[int], object]) -> None:
        super().__init__(count)
        self.digest = digest  # of what was asked
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None  # that drops it, once it is over
        self.is_too_long = False  # alone it has more bytes than may be kept


class KeptAnswers:
    """The answers by owner and key, while they are made and for `KEPT_S` after that.

    Together they have at most `response_store_bytes`: those that are over are dropped first, the oldest first, and an
    answer that alone has more ends with an error. Errors are not kept: the next request tries anew.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._kept: OrderedDict[tuple[str, str], KeptAnswer] = OrderedDict()  # the oldest first
        self._num_bytes = 0
        most = service.config.response_store_bytes
        service.caches.append(
            lambda: CacheUse("kept_answers", len(self._kept), most // OVERHEAD_BYTES, self._num_bytes, most)
        )

    def __len__(self) -> int:
        return len(self._kept)

    def middleware(self, handlers: Collection[Callable[..., object]]) -> Middleware:
        """Middleware of requests to these handlers that have the header."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            if KEY_HEADER not in request.headers or request.match_info.handler not in handlers:
                return await handler(request)
            return await self._answer(request, handler)

        return middleware

    async def stop(self, app: web.Application) -> None:
        """Ends the answers that are being made."""
        tasks = [kept.task for kept in self._kept.values() if kept.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        config, named = self._service.config, request.headers[KEY_HEADER]
        if not KEY.fullmatch(named):
            raise ApiError("invalid_value", f"{KEY_HEADER}: must have 1 to 255 visible ASCII characters")
        if not config.response_store_bytes:
            message = "this server keeps no answers (response_store_bytes = 0); send the request without it"
            raise ApiError("unsupported_parameter", f"{KEY_HEADER}: {message}")
        body = await read_ahead(request, config)
        digest = hashlib.sha256(b"\0".join([request.path_qs.encode(), request.content_type.encode(), body])).digest()
        place = (request[OWNER], named)
        kept, is_again = self._kept.get(place), True
        if kept is None:
            kept, is_again = self._begin(request, handler, place, digest), False
        elif kept.digest != digest:
            raise ApiError("idempotency_key_reused", f"{KEY_HEADER}: was sent with another request; use a new key")
        await kept.begun()
        headers = {**kept.headers, AGAIN: "true"} if is_again else kept.headers
        if not kept.is_stream:
            parts = [part async for part in kept.parts()]
            return web.Response(status=kept.status, body=b"".join(parts), headers=headers)
        stream = EventStream(request, config.stalled_reader_s, headers, config.sse_ping_interval_s)
        try:
            async with stream:
                async for part in kept.parts():
                    await stream.write(part)
                return await stream.finish()
        except ConnectionError:
            raise asyncio.CancelledError from None  # the client is gone; the answer is made to its end

    def _begin(self, request: web.Request, handler: Handler, place: tuple[str, str], digest: bytes) -> KeptAnswer:
        kept = self._kept[place] = KeptAnswer(digest, partial(self._count, place))
        request[RECORD] = kept
        self._num_bytes += kept.num_bytes
        kept.task = asyncio.create_task(self._make(request, handler, place, kept))
        return kept

    async def _make(self, request: web.Request, handler: Handler, place: tuple[str, str], kept: KeptAnswer) -> None:
        try:
            with self._service.handling():
                response = await handler(request)
            if not kept.is_stream:
                assert isinstance(response, web.Response)
                kept.begin(response.status, dict(response.headers), is_stream=False)
                body = response.body
                kept.add(body if isinstance(body, bytes) else b"")
        except asyncio.CancelledError:
            self._drop(place, kept)
            kept.end(not_serving(Health("draining")))
            raise
        except web.HTTPException as error:
            self._drop(place, kept)
            return kept.end(error)
        except Exception as error:
            self._drop(place, kept)
            # an unforeseen one is logged here, and once: there may be no client left, or several
            return kept.end(describe(error) or log_unforeseen(request, error))
        kept.end()
        kept.task = None
        if kept.status >= 400 or kept.is_too_long:
            self._drop(place, kept)
        else:
            kept.timer = asyncio.get_running_loop().call_later(KEPT_S, self._drop, place, kept)

    def _count(self, place: tuple[str, str], num_bytes: int) -> None:
        """Bytes have come to an answer. Raises `ApiError` if it alone has more than may be kept: once, so that a stream
        can end with that error."""
        most = self._service.config.response_store_bytes
        self._num_bytes += num_bytes
        for other, kept in list(self._kept.items()) if self._num_bytes > most else ():
            if kept.is_over and other != place and self._num_bytes > most:
                self._drop(other, kept)
        own = self._kept.get(place)
        if own is not None and own.num_bytes > most and not own.is_too_long:
            own.is_too_long = True
            message = f"the answer has more than {most} bytes, the most that is kept; send it without the header"
            raise ApiError("body_too_large", f"{KEY_HEADER}: {message}")

    def _drop(self, place: tuple[str, str], kept: KeptAnswer) -> None:
        if self._kept.get(place) is kept:
            del self._kept[place]
            self._num_bytes -= kept.num_bytes
            if kept.timer is not None:
                kept.timer.cancel()  # it would hold the answer

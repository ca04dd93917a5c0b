"""Middleware of all handlers: request ids, API keys, common headers and error responses."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from ...runtime.env.log import bound, get_logger
from ..api.dialects.tgi import TGI_STREAM_PATH, tgi_error
from ..api.messages.events import MESSAGES_PATH, error_body
from ..api.ollama.lines import OLLAMA_PREFIX, ollama_error
from ..api.service import Service
from ..errors import ApiError, describe, did_you_mean, not_serving, shorten, unforeseen
from ..http.api_keys import ApiKeys
from ..http.connections import error_response
from ..http.origin_check import OriginCheck
from ..http.request_context import ATTEMPTED, ERROR_BODY, HAS_BEGUN, OWNER, REQUEST_ID, TRACE, checked_request_id
from ..http.trace_context import CURRENT, read_traceparent

NO_KEYS = ApiKeys(())
SWITCHING_PROTOCOLS = 101

log = get_logger("millrace.deploy")


def identify(count_rejection: Callable[[str], object], root_path: str = "") -> Middleware:
    """Middleware that sets a request's id and trace, and turns exceptions into responses.

    The id and the trace id are bound to log lines; `count_rejection` gets the code of each error. `root_path` may stand
    before the paths of the APIs whose errors have shapes of their own. An exception after the headers of an answer ends
    the connection: a client would read a second answer as part of the first.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = checked_request_id(request.headers.get("X-Request-Id"))
        context = read_traceparent(request.headers.get("traceparent"))
        CURRENT.set(context)  # in the context of this request's task only
        request[TRACE] = context
        with bound(request_id=request[REQUEST_ID], trace_id=context.trace_id):
            try:
                return await handler(request)
            except web.HTTPException as error:
                api_error = _of_aiohttp(request, error)
            except Exception as error:
                api_error = describe(error) or log_unforeseen(request, error)
            count_rejection(api_error.code)
            if HAS_BEGUN in request:
                log.info("answer.broken_off", code=api_error.code)
                raise asyncio.CancelledError  # as aiohttp reports a disconnect: it closes the connection
            return error_response(api_error, _body(request, api_error, root_path))

    return middleware


def _body(request: web.Request, error: ApiError, root_path: str) -> Mapping[str, Any] | None:
    """The error body of an API with a shape of its own, by its path, or as its handler has set it; None elsewhere."""
    if (write_error := request.get(ERROR_BODY)) is not None:
        written: Mapping[str, Any] = write_error(error)
        return written
    path = request.path.removeprefix(root_path)
    if path == TGI_STREAM_PATH:
        return tgi_error(error)
    if path.startswith(MESSAGES_PATH):
        return error_body(error, request[REQUEST_ID])
    return ollama_error(error) if path.startswith(OLLAMA_PREFIX) else None


def log_unforeseen(request: web.Request, error: Exception) -> ApiError:
    """Logs an exception that is a bug. Returns what the client is told, with the id by which the log has it."""
    log.error("request.failed", path=shorten(request.path, 128), error=type(error).__name__, exc_info=error)
    return unforeseen(request[REQUEST_ID])


def _of_aiohttp(request: web.Request, error: web.HTTPException) -> ApiError:
    """The error for an exception of aiohttp itself, such as an unknown route or a wrong method."""
    match error.status:
        case 404:
            paths = [resource.canonical for resource in request.app.router.resources()]
            return ApiError("not_found", f"there is no such route{did_you_mean(request.path, paths)}")
        case 405:
            allowed = error.headers.get("Allow", "")
            return ApiError("method_not_allowed", f"this route accepts {allowed}", headers={"Allow": allowed})
        case 413:
            return ApiError("body_too_large", "the body is too long")
        case _:
            return ApiError("bad_request", "bad request")


def check_keys(
    keys: ApiKeys, others: Mapping[Callable[..., object], ApiKeys], open_paths: re.Pattern[str]
) -> Middleware:
    """Middleware that requires one of `keys`, or of `others[handler]` for handlers in `others`.

    The check uses the handler that the router found, not the path, so no spelling of a path bypasses it. The path
    matters in one case only: a wrong method on one of the `open_paths` is answered 405 without a key.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        match = request.match_info
        if match.http_exception is None:
            needed = others.get(match.handler, keys)
        else:
            is_open = match.http_exception.status == 405 and open_paths.fullmatch(request.path)
            needed = NO_KEYS if is_open else keys
        request[OWNER] = needed.check(request)
        return await handler(request)

    return check


def take_in(
    service: Service, new_work: Collection[Callable[..., object]], sockets: Collection[Callable[..., object]]
) -> Middleware:
    """Middleware that refuses the requests of the handlers in `new_work` while the server drains.

    The drain waits for all requests that came in before, except those of `sockets`, which it closes.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        called = request.match_info.handler
        if called in new_work:
            service.refuse_if_draining()
        if called in sockets:
            return await handler(request)
        with service.handling():
            try:
                return await handler(request)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not service.is_closing or request.writer.output_size or task is None or task.uncancel():
                    raise
                raise not_serving(service.health, retry_after_s=1.0) from None

    return middleware


def add_headers(service: Service, gate: OriginCheck) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    """A signal handler that adds the common headers to every response.

    Once the server is to end, it also closes connections: a balancer that keeps them open would send more requests.
    """

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        request[HAS_BEGUN] = True
        if REQUEST_ID in request:
            response.headers["X-Request-Id"] = request[REQUEST_ID]
        if ATTEMPTED in request and (attempts := request[ATTEMPTED].num_attempts):
            response.headers["X-Millrace-Attempts"] = str(attempts)
        if service.is_traced and TRACE in request:
            response.headers["traceresponse"] = request[TRACE].header
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Server"] = "millrace"
        response.headers.update(gate.cors_headers(request))
        if (service.is_draining or service.is_leaving) and response.status != SWITCHING_PROTOCOLS:
            response.force_close()
            response.headers["Connection"] = "close"  # aiohttp has chosen its own already

    return add

"""Every error that a client can see: its code, HTTP status and type, in one table.

The client never sees internal details: an unexpected error is described by the request's id alone.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..runtime.env.log import get_logger
from ..runtime.pipeline import Busy, Health, NotServing
from ..runtime.workers.thread_start import ThreadNotStarted
from ..stages.errors import (
    ErrorText,
    OutOfResources,
    Overloaded,
    RequestError,
    TimedOut,
    Unavailable,
    error_text,
    field_text,
)

MAX_COMPARED_CHARS = 128  # of a client's name: comparing takes time in proportion to its square
ALIKE = 0.75  # of two names, from 0 to 1

MAX_MESSAGE_CHARS = 512

log = get_logger("millrace.deploy")

# code -> (HTTP status, type). Codes are OpenAI's where it has one; types are as vLLM names them.
CODES: dict[str, tuple[int, str]] = {
    "invalid_json": (400, "BadRequestError"),
    "invalid_type": (400, "BadRequestError"),
    "invalid_value": (400, "BadRequestError"),
    "missing_required_parameter": (400, "BadRequestError"),
    "unknown_parameter": (400, "BadRequestError"),
    "unsupported_parameter": (400, "BadRequestError"),
    "unsupported_content_type": (400, "BadRequestError"),
    "unsupported_task": (400, "BadRequestError"),
    "cancelled": (400, "BadRequestError"),
    "empty_prompt": (400, "BadRequestError"),
    "template_limit": (400, "BadRequestError"),
    "bad_request": (400, "BadRequestError"),
    "invalid_api_key": (401, "AuthenticationError"),
    "host_not_allowed": (403, "PermissionDeniedError"),
    "origin_not_allowed": (403, "PermissionDeniedError"),
    "unsupported_operation": (403, "PermissionDeniedError"),
    "not_found": (404, "NotFoundError"),
    "model_not_found": (404, "NotFoundError"),
    "request_not_found": (404, "NotFoundError"),
    "response_not_found": (404, "NotFoundError"),
    "no_flight_recorder": (409, "ConflictError"),
    "no_profiler": (409, "ConflictError"),
    "idempotency_key_reused": (409, "ConflictError"),
    "profiler_busy": (409, "ConflictError"),
    "profiler_idle": (409, "ConflictError"),
    "method_not_allowed": (405, "MethodNotAllowedError"),
    "request_timeout": (408, "RequestTimeoutError"),
    "stalled_reader": (408, "RequestTimeoutError"),
    "body_too_large": (413, "RequestTooLargeError"),
    "unsupported_media_type": (415, "UnsupportedMediaTypeError"),
    "expectation_failed": (417, "BadRequestError"),
    "upgrade_required": (426, "BadRequestError"),
    "headers_too_large": (431, "BadRequestError"),
    "context_length_exceeded": (400, "BadRequestError"),
    "rate_limit_exceeded": (429, "overloaded_error"),
    "internal_error": (500, "InternalServerError"),
    "tokenizer_error": (500, "InternalServerError"),
    "detokenizer_error": (500, "InternalServerError"),
    "grammar_error": (500, "InternalServerError"),
    "model_error": (500, "InternalServerError"),
    "adapters_pinned": (409, "ConflictError"),
    "adapter_load_failed": (500, "InternalServerError"),
    "engine_died": (500, "InternalServerError"),
    "engine_version": (500, "InternalServerError"),
    "deadline_exceeded": (504, "GatewayTimeoutError"),
    "loading": (503, "ServiceUnavailableError"),
    "draining": (503, "ServiceUnavailableError"),
    "stalled": (503, "ServiceUnavailableError"),
    "dead": (503, "ServiceUnavailableError"),
    "out_of_resources": (503, "ServiceUnavailableError"),
    "too_many_connections": (503, "ServiceUnavailableError"),
}


class ApiError(Exception):
    """An error for the client. `code` is a key of `CODES`, unless `status` and `type` are given with it.

    `param` is the field at fault; if it is left out, the one that the message begins with.
    """

    def __init__(
        self,
        code: str,
        message: str | ErrorText,
        *,
        param: str | None = None,
        status: int | None = None,
        type: str | None = None,
        details: Mapping[str, Any] | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(str(message))
        known_status, known_type = CODES.get(code, (500, "InternalServerError"))
        self.code = code
        self.text = error_text(message)
        self.message = shorten(str(message), MAX_MESSAGE_CHARS)
        self.param = self.text.field if param is None else param
        self.status = known_status if status is None else status
        self.type = known_type if type is None else type
        self.details = details
        self.retry_after_s = retry_after_s
        self._headers = dict(headers or {})

    def named(self, name_of: Callable[[str], str]) -> ApiError:
        """The same error with the names of fields that an API has for them."""
        return ApiError(
            self.code,
            self.text.named(name_of),
            param=None if self.param is None else name_of(self.param),
            status=self.status,
            type=self.type,
            details=self.details,
            retry_after_s=self.retry_after_s,
            headers=self._headers,
        )

    @property
    def headers(self) -> dict[str, str]:
        """The response headers that belong to this error."""
        headers = dict(self._headers)
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.details is not None and (position := self.details.get("queue_depth")) is not None:
            headers["X-Queue-Position"] = str(position)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def body(self) -> dict[str, Any]:
        """`{"error": {...}}` as plain data."""
        error: dict[str, Any] = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        if self.details is not None:
            error["details"] = dict(self.details)
        return {"error": error}


def describe(error: BaseException) -> ApiError | None:
    """The client's view of `error`; None if it is unexpected: log it, then use `unforeseen`."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, Overloaded):
        details = {
            "stage": "schedule",
            "queue_depth": error.queue_depth,
            "estimated_wait_s": round(error.estimated_wait_s, 3),
        }
        if error.num_engines is not None:
            details["engines"] = error.num_engines
        return _of(error, details=details, retry_after_s=error.estimated_wait_s)
    if isinstance(error, TimedOut):
        return _of(error, details={"stage": error.stage})
    if isinstance(error, Unavailable):
        return _of(error, retry_after_s=1.0)
    if isinstance(error, RequestError):
        return _of(error)
    if isinstance(error, Busy):
        details = {"stage": "intake", "queue_depth": None, "estimated_wait_s": 1.0}
        message = "too many requests arrive at once; try again in a second"
        return ApiError("rate_limit_exceeded", message, details=details, retry_after_s=1.0)
    if isinstance(error, NotServing):
        return not_serving(error.health)
    if isinstance(error, ThreadNotStarted):
        log.error("thread.not_started", reason=str(error))
        return _of(OutOfResources(), retry_after_s=1.0)
    return None


def not_serving(health: Health, retry_after_s: float = 1.0) -> ApiError:
    """The error for a request that the server does not accept in this state."""
    code = health.state if health.state in CODES else "draining" if health.state == "stopped" else "loading"
    message = {
        "loading": "the model is loading; try again shortly",
        "draining": "the server is shutting down; send this request to another one",
        "stalled": "the engine makes no progress; send this request to another server, or try again later",
        "dead": "the engine has failed and accepts no more requests",
    }[code]
    if code == "loading" and health.stage == "engine" and health.reason:
        message = f"no engine takes requests now: {health.reason}; try again shortly"
    return ApiError(code, message, retry_after_s=retry_after_s)


def unforeseen(request_id: str) -> ApiError:
    """The error for a bug of the server: it names the request id to search the log for, and nothing else."""
    return ApiError("internal_error", f"internal error; see request id {request_id} in the server's log")


def wrong_field(name: str, problem: str, shown: str | None = None, code: str = "invalid_value") -> ApiError:
    """The error `name: problem`, or `name = shown: problem`; an API with another name of the field says that."""
    return ApiError(code, field_text(name, problem, shown))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` with the known name that is most like what a client sent, or the empty string."""
    found = nearest_name(name, known)
    return "" if found is None else f"; did you mean {found}?"


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like what a client sent; None: none is."""
    if len(name) > MAX_COMPARED_CHARS:
        return None
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=ALIKE)
    return found[0] if found else None


def shorten(text: str, limit: int) -> str:
    """`text`, cut to `limit` characters with an ellipsis."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _of(error: RequestError, **more: Any) -> ApiError:
    return ApiError(error.code, error.text, param=error.param, status=error.status, type=error.type, **more)

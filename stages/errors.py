"""How a request can fail, seen from its client. Each says whose turn it is.

`status` is the HTTP status a server answers with; nothing here knows HTTP otherwise.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """The engine can not start with these settings; names the setting, its value and what would do."""


class RequestError(Exception):
    """A request that ends without its answer. The message is shown to the client."""

    status: int = 500
    type: str = "InternalServerError"

    def __init__(self, message: str, *, code: str = "internal_error", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class Refused(RequestError):
    """A bad request: says what was wrong, and what would be right."""

    status = 400
    type = "BadRequestError"

    def __init__(self, message: str, *, code: str = "invalid_value", param: str | None = None) -> None:
        super().__init__(message, code=code, param=param)


class TimedOut(RequestError):
    """A time limit passed before the answer was complete (504), or before the request was served at all (408)."""

    def __init__(self, message: str, *, stage: str, has_begun: bool) -> None:
        super().__init__(message, code="deadline_exceeded" if has_begun else "request_timeout")
        self.stage = stage  # where it was then
        self.status = 504 if has_begun else 408
        self.type = "GatewayTimeoutError" if has_begun else "RequestTimeoutError"


class Overloaded(RequestError):
    """A full house: the same request may be served later."""

    status = 429
    type = "overloaded_error"

    def __init__(self, message: str, *, queue_depth: int, estimated_wait_s: float) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.queue_depth = queue_depth  # requests before this one
        self.estimated_wait_s = estimated_wait_s


class Unavailable(RequestError):
    """The engine loads, drains or has failed."""

    status = 503
    type = "ServiceUnavailableError"

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, code=code)


class Failed(RequestError):
    """Our own bug, as its client sees it: no inner detail."""

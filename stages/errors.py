"""Errors that a caller of the engine sees.

The class says whether the client, time or the engine is at fault. `status` is the HTTP status with which a server
answers.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """The engine cannot start with these settings.

    The message names the setting, its value and valid values.
    """


class NotStartedError(Exception):
    """The engine cannot start on this system now, whatever the settings. The message says what it lacks."""


class RequestError(Exception):
    """A request ended without its answer. The client sees the message."""

    status: int = 500
    type: str = "InternalServerError"

    def __init__(self, message: str, *, code: str = "internal_error", param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param


class Refused(RequestError):
    """The request is invalid. The message says what is wrong and what is valid."""

    status = 400
    type = "BadRequestError"

    def __init__(self, message: str, *, code: str = "invalid_value", param: str | None = None) -> None:
        super().__init__(message, code=code, param=param)


class TimedOut(RequestError):
    """A time limit passed before the request was served (408) or complete (504)."""

    def __init__(self, message: str, *, stage: str, has_begun: bool) -> None:
        super().__init__(message, code="deadline_exceeded" if has_begun else "request_timeout")
        self.stage = stage  # where the request was at that time
        self.status = 504 if has_begun else 408
        self.type = "GatewayTimeoutError" if has_begun else "RequestTimeoutError"


class Overloaded(RequestError):
    """The engine has no room for the request now. The same request may succeed later."""

    status = 429
    type = "overloaded_error"

    def __init__(self, message: str, *, queue_depth: int, estimated_wait_s: float) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.queue_depth = queue_depth  # waiting requests
        self.estimated_wait_s = estimated_wait_s


class Unavailable(RequestError):
    """The engine is loading, draining or dead."""

    status = 503
    type = "ServiceUnavailableError"

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message, code=code)


class OutOfResources(Unavailable):
    """The system allows no thread or process now, which this request needs. The same request may succeed later."""

    def __init__(self, what: str = "thread") -> None:
        super().__init__(
            f"the server could not start a {what} for this request: send it again in a second, or to another server",
            code="out_of_resources",
        )


class Failed(RequestError):
    """The engine has a bug. The message contains no internal detail; the log does."""

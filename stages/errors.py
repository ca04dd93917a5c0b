"""Errors that a caller of the engine sees.

The class says whether the client, time or the engine is at fault. `status` is the HTTP status with which a server
answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class ConfigError(ValueError):
    """The engine cannot start with these settings.

    The message names the setting, its value and valid values.
    """


class NotStartedError(Exception):
    """The engine cannot start on this system now, whatever the settings. The message says what it lacks."""


@dataclass(frozen=True, slots=True)
class ErrorText:
    """An error's text with places for the names of fields: the API that answers puts its own names there.

    `pieces` are a text and a name in turn: `("", "min_tokens", " = 9: is over ", "max_tokens", ", which is 8")`.
    """

    pieces: tuple[str, ...]

    @property
    def field(self) -> str | None:
        """The field at fault: the one that the text begins with."""
        return self.pieces[1] if len(self.pieces) > 1 and not self.pieces[0] else None

    @property
    def problem(self) -> str:
        """What stands behind the name of the field at fault."""
        return "".join(self.pieces if self.field is None else self.pieces[2:]).lstrip(" :")

    def named(self, name_of: Callable[[str], str]) -> ErrorText:
        """The text with other names in the same places."""
        return ErrorText(tuple(name_of(piece) if place % 2 else piece for place, piece in enumerate(self.pieces)))

    def __str__(self) -> str:
        return "".join(self.pieces)


def error_text(text: str | ErrorText) -> ErrorText:
    """`text` itself, or a text that names no field."""
    return text if isinstance(text, ErrorText) else ErrorText((text,))


def field_text(name: str, problem: str | ErrorText, shown: str | None = None) -> ErrorText:
    """`name: problem`, or `name = shown: problem` with the field's value."""
    first, *others = error_text(problem).pieces
    return ErrorText(("", name, f"{'' if shown is None else f' = {shown}'}: {first}", *others))


class RequestError(Exception):
    """A request ended without its answer. The client sees the message.

    `param` is the field at fault; if it is left out, the one that the message begins with.
    """

    status: int = 500
    type: str = "InternalServerError"

    def __init__(self, message: str | ErrorText, *, code: str = "internal_error", param: str | None = None) -> None:
        super().__init__(str(message))
        self.text = error_text(message)
        self.message = str(message)  # with the engine's names of fields
        self.code = code
        self.param = self.text.field if param is None else param


class Refused(RequestError):
    """The request is invalid. The message says what is wrong and what is valid."""

    status = 400
    type = "BadRequestError"

    def __init__(self, message: str | ErrorText, *, code: str = "invalid_value", param: str | None = None) -> None:
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

    def __init__(
        self, message: str, *, queue_depth: int, estimated_wait_s: float, num_engines: int | None = None
    ) -> None:
        super().__init__(message, code="rate_limit_exceeded")
        self.queue_depth = queue_depth  # waiting requests
        self.estimated_wait_s = estimated_wait_s
        self.num_engines = num_engines  # that might have taken it; None: there is one, or the request came to none


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

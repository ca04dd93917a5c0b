"""Items of a request that middleware sets: its id, the owner of its key, and its trace."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from aiohttp import web

from ..errors import ApiError
from .trace_context import TraceContext

REQUEST_ID = web.RequestKey("request_id", str)
OWNER = web.RequestKey("owner", str)
# makes the body of an error, if the API has its own shape
ERROR_BODY: web.RequestKey[Callable[[ApiError], Mapping[str, Any]]] = web.RequestKey("error_body")
TRACE = web.RequestKey("trace", TraceContext)
HAS_BEGUN = web.RequestKey("has_begun", bool)  # set once the headers of its answer are made

MAX_ID_CHARS = 128  # of an id that a client sets
MAX_SESSION_CHARS = 512  # of a session's name


class Attempted(Protocol):
    """What becomes of a request in the engines."""

    num_attempts: int  # times that it was sent to an engine of several, so far


ATTEMPTED: web.RequestKey[Attempted] = web.RequestKey("attempted")

_ID_PATTERN = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_ID_CHARS}}}")


def session_of(request: web.Request) -> str:
    """What the client calls its session in `X-Session-Id`; "" if nothing, or more than may be kept."""
    return session_in(request.headers)


def session_in(headers: Mapping[str, str]) -> str:
    """As `session_of`, of a request or the handshake of a WebSocket with these headers."""
    named = headers.get("X-Session-Id", "")
    return named if len(named) <= MAX_SESSION_CHARS else ""


def checked_request_id(wanted: str | None) -> str:
    """The client's request id; a new random one if it is missing or not allowed in a header."""
    return wanted if wanted is not None and _ID_PATTERN.fullmatch(wanted) else uuid.uuid4().hex

"""Items of a request that middleware sets: its id, the owner of its key, and its trace."""

from __future__ import annotations

import re
import uuid

from aiohttp import web

from .trace_context import TraceContext

REQUEST_ID = web.RequestKey("request_id", str)
OWNER = web.RequestKey("owner", str)
TRACE = web.RequestKey("trace", TraceContext)

MAX_ID_CHARS = 128  # of an id that a client sets

_ID_PATTERN = re.compile(rf"[A-Za-z0-9_.:/-]{{1,{MAX_ID_CHARS}}}")


def settled_id(wanted: str | None) -> str:
    """The client's request id; a new random one if it is missing or not allowed in a header."""
    return wanted if wanted is not None and _ID_PATTERN.fullmatch(wanted) else uuid.uuid4().hex

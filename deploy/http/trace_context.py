"""W3C trace context of requests (`traceparent`).

As the standard requires, a malformed header is ignored.
"""

from __future__ import annotations

import re
import secrets
from contextvars import ContextVar
from dataclasses import dataclass, field

_PATTERN = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The trace, the parent span and the own, new span id of a request."""

    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))
    parent_id: str | None = None  # the caller's span; None: the trace starts with this request
    is_sampled: bool = True
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def header(self) -> str:
        """The value of `traceparent` in outgoing calls, and of `traceresponse` to the caller."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.is_sampled):02x}"


# the context of the current handler's request; tasks that a handler starts inherit it
CURRENT: ContextVar[TraceContext | None] = ContextVar("trace_context", default=None)


def read_traceparent(header: str | None) -> TraceContext:
    """A context that continues the caller's trace, or starts a new one without a valid header."""
    match = None if header is None else _PATTERN.fullmatch(header)
    if match is None:
        return TraceContext()
    version, trace_id, parent_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or trace_id == _NO_TRACE or parent_id == _NO_SPAN:
        return TraceContext()
    return TraceContext(trace_id, parent_id, bool(int(flags, 16) & 1))

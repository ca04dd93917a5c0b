"""Client messages of `/v1/stream`: create, credit, cancel, resume; and error messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from ..api.schema.body import Body
from ..api.schema.validation import NoteIgnored, read_typed
from ..errors import ApiError
from ..http.json_limits import JsonLimits, parse_object
from ..http.request_context import MAX_ID_CHARS

MAX_CREDIT = 2**31 - 1

Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class Envelope(Body):
    """A client message.

    `id` is the client's name for the request, unique among the running requests of a socket.
    """

    type: str
    id: Id


class Create(Envelope):
    """Starts a request. The answer is `created`, then chunks."""

    endpoint: Literal["chat", "completions"]
    body: dict[str, Any]  # the body of the endpoint's HTTP request
    credit: Annotated[int | None, Field(ge=0, le=MAX_CREDIT)] = None  # initial chunks; None: no limit
    resume: bool = False  # whether the request survives a disconnect for a while
    stats: bool = False  # whether to send `stats` before `done`

    def check(self) -> None:
        super().check()
        if self.body.get("stream") not in (None, True):
            raise ApiError("invalid_value", "stream: a socket always streams; leave it out", param="stream")


class Credit(Envelope):
    """Grants `n` more chunks, and acknowledges all messages up to `last`."""

    n: Annotated[int, Field(ge=0, le=MAX_CREDIT)] = 0
    last: Annotated[int, Field(ge=0)] | None = None


class Cancel(Envelope):
    """Cancels the request. Chunks already sent stay valid; `usage` and `done` follow."""


class Resume(Envelope):
    """Continues a request on a new socket.

    `last` is the number of the last message that arrived; 0 if none did. Credit sent on the old socket may be lost, so
    `credit` sets anew how many chunks may follow.
    """

    token: Annotated[str, Field(max_length=64)]
    last: Annotated[int, Field(ge=0)]
    credit: Annotated[int | None, Field(ge=0, le=MAX_CREDIT)] = None  # None: unchanged


KINDS: dict[str, type[Envelope]] = {"create": Create, "credit": Credit, "cancel": Cancel, "resume": Resume}


def parse(data: bytes, max_bytes: int) -> dict[str, Any]:
    """Parses a message into a JSON object. `ApiError` if it is not one."""
    return parse_object(data, JsonLimits(num_bytes=max_bytes, depth=JsonLimits().depth + 1))


def is_utf8(data: bytes) -> bool:
    """Whether a text message is text."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_envelope(raw: Mapping[str, Any], strict_fields: bool, note: NoteIgnored | None = None) -> Envelope:
    """Validates a message. `ApiError` 400 names the wrong field; `note` is told of unknown ones."""
    return read_typed(KINDS, raw, strict_fields, note)


def members(fields: Mapping[str, Any]) -> bytes:
    """A JSON object without its braces."""
    return orjson.dumps(fields)[1:-1]


def error_members(error: ApiError) -> bytes:
    """The members of an error message: HTTP status, HTTP body and `retry_after_s`."""
    fields: dict[str, Any] = {"status": error.status, **error.body()}
    if error.retry_after_s is not None:
        fields["retry_after_s"] = round(error.retry_after_s, 3)
    return members(fields)


def error_message(error: ApiError, about: Mapping[str, Any]) -> bytes:
    """A whole error message; the fields of `about` name the message that caused it."""
    return b"{%b,%b}" % (members({"type": "error", **about}), error_members(error))

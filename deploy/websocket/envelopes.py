"""What clients of `/v1/stream` say: create, credit, cancel, resume; and errors as they are told.

Knows the fields of each message. What they do is the session's to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from ..api.schema.body import Body
from ..api.schema.validation import read_typed
from ..errors import ApiError
from ..http.json_limits import JsonLimits, parse_object
from ..http.request_context import MAX_ID_CHARS

MAX_CREDIT = 2**31 - 1

Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class Envelope(Body):
    """One message. `id` is the client's name for the request, unique among those on its socket."""

    type: str
    id: Id


class Create(Envelope):
    """A request. Answered with `created`, then chunks."""

    endpoint: Literal["chat", "completions"]
    body: dict[str, Any]  # as the endpoint takes it over HTTP
    credit: Annotated[int | None, Field(ge=0, le=MAX_CREDIT)] = None  # chunks it may send for now; none: no limit
    resume: bool = False  # whether it outlives its socket for a while
    stats: bool = False  # whether `stats` come before `done`

    def check(self) -> None:
        if self.body.get("stream") not in (None, True):
            raise ApiError("invalid_value", "stream: answers come in chunks on a socket; leave it out", param="stream")


class Credit(Envelope):
    """Room for `n` more chunks; and that all up to `last` have arrived, so that they need not be kept."""

    n: Annotated[int, Field(ge=0, le=MAX_CREDIT)] = 0
    last: Annotated[int, Field(ge=0)] | None = None


class Cancel(Envelope):
    """The request need not go on. What it has sent stays valid; `done` follows."""


class Resume(Envelope):
    """On a new socket: the request goes on behind `last`, the last message of it that has arrived; 0 if none.

    What was granted on the old one may not have arrived there, so `credit` says anew how many chunks may follow.
    """

    token: Annotated[str, Field(max_length=64)]
    last: Annotated[int, Field(ge=0)]
    credit: Annotated[int | None, Field(ge=0, le=MAX_CREDIT)] = None  # none: as before


KINDS: dict[str, type[Envelope]] = {"create": Create, "credit": Credit, "cancel": Cancel, "resume": Resume}


def parse(data: bytes, max_bytes: int) -> dict[str, Any]:
    """The JSON object that a message is. `ApiError` if it is none."""
    return parse_object(data, JsonLimits(num_bytes=max_bytes, depth=JsonLimits().depth + 1))


def read_envelope(raw: Mapping[str, Any], strict_fields: bool) -> Envelope:
    """What a message says. `ApiError` 400 names the field that is wrong."""
    return read_typed(KINDS, raw, strict_fields)


def members(said: Mapping[str, Any]) -> bytes:
    """The inside of a JSON object."""
    return orjson.dumps(said)[1:-1]


def error_members(error: ApiError) -> bytes:
    """An error as HTTP would tell it: status, body, and when to try again."""
    said: dict[str, Any] = {"status": error.status, **error.body()}
    if error.retry_after_s is not None:
        said["retry_after_s"] = round(error.retry_after_s, 3)
    return members(said)


def error_message(error: ApiError, about: Mapping[str, Any]) -> bytes:
    """A whole message of it; `about` says what it is about."""
    return b"{%b,%b}" % (members({"type": "error", **about}), error_members(error))

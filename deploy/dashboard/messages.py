"""What a viewer of the dashboard says: hello, what it wants to see, which request to cancel, and where to go in a
recording.

Knows the fields of each message. What they do is the feed's to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ..api.schema.body import Body
from ..api.schema.validation import read_typed
from ..http.api_keys import MAX_KEY_CHARS
from ..http.request_context import MAX_ID_CHARS

MAX_OFFSET = 2**31 - 1
MAX_TIME_S, MAX_SPEED = 1e9, 1_000.0

Key = Annotated[str, Field(max_length=MAX_KEY_CHARS)]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class Hello(Body):
    """The first message. A browser can send no headers with a WebSocket, so the keys come here."""

    type: Literal["hello"]
    key: Key | None = None
    admin_key: Key | None = None  # lets it cancel requests


class Window(Body):
    """Which of the live requests are shown."""

    offset: Annotated[int, Field(ge=0, le=MAX_OFFSET)] = 0
    limit: Annotated[int, Field(ge=0, le=200)] = 50
    newest_first: bool = False


class Of(Body):
    """Which request is shown."""

    id: Id


class Nothing(Body):
    """A topic of which there is nothing to choose."""


class Topics(Body):
    """What a viewer wants to see; nothing while nobody looks at it."""

    overview: Nothing | None = None
    pipeline: Nothing | None = None
    steps: Nothing | None = None
    blocks: Nothing | None = None
    requests: Window | None = None
    request: Of | None = None
    recent: Nothing | None = None
    incidents: Nothing | None = None
    latency: Nothing | None = None
    loop: Nothing | None = None
    config: Nothing | None = None
    preemptions: Nothing | None = None  # of a recording


class Subscribe(Body):
    """All that is wanted from now on; what was wanted before and is not here any more ends."""

    type: Literal["subscribe"]
    topics: Topics


class Cancel(Body):
    """Ends a request, whoever's it is. Takes the admin key."""

    type: Literal["cancel"]
    id: Id


class Seek(Body):
    """Of a recording: goes to a moment, in seconds since it began; or by so many steps, back for less than 0."""

    type: Literal["seek"]
    time_s: Annotated[float, Field(ge=0, le=MAX_TIME_S, allow_inf_nan=False)] | None = None
    steps: Annotated[int, Field(ge=-MAX_OFFSET, le=MAX_OFFSET)] | None = None


class Play(Body):
    """Of a recording: goes on by itself, so many times as fast as it was; 0: stands still."""

    type: Literal["play"]
    speed: Annotated[float, Field(ge=0, le=MAX_SPEED, allow_inf_nan=False)] = 1.0


KINDS: dict[str, type[Body]] = {"hello": Hello, "subscribe": Subscribe, "cancel": Cancel}
OF_RECORDING: dict[str, type[Body]] = {"hello": Hello, "subscribe": Subscribe, "seek": Seek, "play": Play}


def read_message(raw: Mapping[str, Any], strict_fields: bool, kinds: Mapping[str, type[Body]] = KINDS) -> Body:
    """What a message says, of one of these kinds. `ApiError` 400 names the field that is wrong."""
    return read_typed(kinds, raw, strict_fields)

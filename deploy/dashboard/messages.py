"""What a viewer of the dashboard says: hello, what it wants to see, and which request to cancel.

Knows the fields of each message. What they do is the feed's to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ..bodies import Body
from ..keys import MAX_KEY_CHARS
from ..sockets.envelopes import MAX_ID_CHARS
from ..validation import read_typed

MAX_OFFSET = 2**31 - 1

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


class Subscribe(Body):
    """All that is wanted from now on; what was wanted before and is not here any more ends."""

    type: Literal["subscribe"]
    topics: Topics


class Cancel(Body):
    """Ends a request, whoever's it is. Takes the admin key."""

    type: Literal["cancel"]
    id: Id


KINDS: dict[str, type[Body]] = {"hello": Hello, "subscribe": Subscribe, "cancel": Cancel}


def read_message(raw: Mapping[str, Any], strict_fields: bool) -> Body:
    """What a message says. `ApiError` 400 names the field that is wrong."""
    return read_typed(KINDS, raw, strict_fields)

"""The messages of a dashboard viewer: hello, subscribe, cancel, seek, and play for a recording."""

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
SortField = Literal[
    "arrival", "id", "state", "adapter", "prompt", "cached", "answer", "ttft", "blocks", "priority", "preempted"
]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class Hello(Body):
    """The first message. It carries the keys, as a browser's WebSocket cannot send headers."""

    type: Literal["hello"]
    key: Key | None = None
    admin_key: Key | None = None  # allows to see and cancel all requests


class RequestWindow(Body):
    """The shown part of the list of live requests, its order and its filters. A filter that is None keeps all."""

    offset: Annotated[int, Field(ge=0, le=MAX_OFFSET)] = 0
    limit: Annotated[int, Field(ge=0, le=200)] = 50
    sort: SortField = "arrival"
    descending: bool = False
    newest_first: bool = False  # short for descending, of arrival
    search: Annotated[str, Field(max_length=MAX_ID_CHARS)] = ""  # in their ids, or in the names of their adapters
    state: Annotated[str, Field(max_length=20)] | None = None
    adapter: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None  # "": the base model
    priority: Annotated[int, Field(ge=-MAX_OFFSET, le=MAX_OFFSET)] | None = None

    @property
    def arrangement(self) -> tuple[Any, ...]:
        """All but the shown part."""
        filters = (self.search, self.state, self.adapter, self.priority)
        return (self.sort, self.descending, self.newest_first, *filters)

    @property
    def is_plain(self) -> bool:
        """Whether the order is that of arrival, and only `search` is a filter."""
        return self.sort == "arrival" and self.state is None and self.adapter is None and self.priority is None


class RequestSelection(Body):
    """The id of the shown request."""

    id: Id


class NoSelection(Body):
    """A topic without parameters."""


class Topics(Body):
    """The topics of a viewer; None: not subscribed."""

    overview: NoSelection | None = None
    pipeline: NoSelection | None = None
    steps: NoSelection | None = None
    blocks: NoSelection | None = None
    requests: RequestWindow | None = None
    request: RequestSelection | None = None
    recent: NoSelection | None = None
    incidents: NoSelection | None = None
    latency: NoSelection | None = None
    quantiles: NoSelection | None = None  # of latencies, over time
    loop: NoSelection | None = None
    config: NoSelection | None = None
    prefixes: NoSelection | None = None  # the tree of the prefix cache
    fleet: NoSelection | None = None  # engines and fronts
    history: NoSelection | None = None  # of the last minutes, of a running server
    preemptions: NoSelection | None = None  # of a recording


class Subscribe(Body):
    """Replaces the viewer's topics."""

    type: Literal["subscribe"]
    topics: Topics


class CancelRequest(Body):
    """Cancels a request of any client. Needs the admin key."""

    type: Literal["cancel"]
    id: Id


class Seek(Body):
    """Goes to a time, or by a number of steps, backwards if negative.

    In a recording: seconds from its start. On a running server: the engine's clock, and steps are frames of its
    history; without both it returns to the present.
    """

    type: Literal["seek"]
    time_s: Annotated[float, Field(ge=0, le=MAX_TIME_S, allow_inf_nan=False)] | None = None
    steps: Annotated[int, Field(ge=-MAX_OFFSET, le=MAX_OFFSET)] | None = None


class Play(Body):
    """Recordings only: plays at `speed` times the recorded speed; 0 pauses."""

    type: Literal["play"]
    speed: Annotated[float, Field(ge=0, le=MAX_SPEED, allow_inf_nan=False)] = 1.0


KINDS: dict[str, type[Body]] = {"hello": Hello, "subscribe": Subscribe, "cancel": CancelRequest, "seek": Seek}
OF_RECORDING: dict[str, type[Body]] = {"hello": Hello, "subscribe": Subscribe, "seek": Seek, "play": Play}


def read_message(raw: Mapping[str, Any], strict_fields: bool, kinds: Mapping[str, type[Body]] = KINDS) -> Body:
    """Parses a message of one of these kinds. `ApiError` 400 names the wrong field."""
    return read_typed(kinds, raw, strict_fields)

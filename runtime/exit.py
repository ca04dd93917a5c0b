"""The exit of a pipeline: the only place where a request ends.

It tracks which requests are live and ends each once. A pipeline's own exit defines the events in `make_outbox` and
`deliver`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Never, Protocol, TypeVar

from .stage import Crash, Outlet, Stage

Event_co = TypeVar("Event_co", covariant=True)


class Outbox(Protocol[Event_co]):
    """The client's end of a request. It merges events, so adding one never waits."""

    request_id: str

    def end(self, cause: str, error: BaseException | None) -> None:
        """Adds the terminal event. The exit calls it once."""

    def __aiter__(self) -> AsyncIterator[Event_co]:
        """Yields the events in order.

        Stops after the terminal one; raises the error if the request failed.
        """


OutboxT = TypeVar("OutboxT", bound=Outbox[Any])


class Exit(Stage[Any, Never], Generic[OutboxT]):
    """The sink of a pipeline.

    Delivers items to outboxes and writes each request's one terminal event.

    Finishes, stage failures, cancels and deadlines all arrive here. The first one ends the request; later ones have no
    effect. `on_end` callbacks run at that moment, synchronously.
    """

    inputs: ClassVar = {"in": Any}
    outputs: ClassVar = {}
    on_crash: ClassVar[Crash] = Crash.ISOLATE

    def __init__(self) -> None:
        self.live: dict[str, OutboxT] = {}
        self.on_end: list[Callable[[OutboxT, str, BaseException | None], None]] = []
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._emptied = asyncio.Event()

    @property
    def name(self) -> str:
        return "exit"

    def make_outbox(self, request: Any) -> OutboxT:
        """Makes the outbox of a request that is about to enter. Subclasses override it."""
        raise NotImplementedError(f"{type(self).__name__}: write make_outbox(request)")

    def requests_of(self, item: Any) -> Iterable[str]:
        """The ids of the requests that a stage's message belongs to.

        By default its `request_id`, if it has one.
        """
        request_id = getattr(item, "request_id", None)
        return () if request_id is None else (request_id,)

    def note_service(self, request_id: str, stage: str, service_us: int) -> None:
        """Records how long a stage held a message of this request.

        The request may have ended meanwhile.
        """

    def find_request(self, key: str | int) -> Any:
        """The live request with this id, or of the unfinished sequence with this id, as it entered; None if none is.

        This exit knows no requests; a pipeline's own may.
        """
        return None

    def number_of(self, request_id: str) -> int | None:
        """The number of a live request in trace records.

        None: it is not live, or this exit numbers no requests.
        """
        return None

    def open(self, request: Any, deadline_s: float | None = None) -> OutboxT:
        """Admits a request: it is live until it ends. `deadline_s` counts from now.

        ValueError: the id is in use.
        """
        outbox = self.make_outbox(request)
        request_id = outbox.request_id
        if request_id in self.live:
            raise ValueError(f"request {request_id} is already live: give each request its own id")
        self.live[request_id] = outbox
        self._emptied.clear()
        if deadline_s is not None:
            loop = asyncio.get_running_loop()
            self._deadlines[request_id] = loop.call_later(deadline_s, self.end, request_id, "deadline")
        return outbox

    def is_live(self, request_id: str) -> bool:
        """Whether the request has not ended yet."""
        return request_id in self.live

    def end(self, request_id: str, cause: str, error: BaseException | None = None) -> bool:
        """Ends a request. Returns False and does nothing if it is not live."""
        outbox = self.live.pop(request_id, None)
        if outbox is None:
            return False
        timer = self._deadlines.pop(request_id, None)
        if timer is not None:
            timer.cancel()
        outbox.end(cause, error)
        for callback in self.on_end:
            callback(outbox, cause, error)
        if not self.live:
            self._emptied.set()
        return True

    def fail(self, item: Any, error: BaseException) -> None:
        """Ends every request that `item` belongs to with `error`. `item` may be a request id."""
        request_ids = (item,) if isinstance(item, str) else tuple(self.requests_of(item))
        for request_id in request_ids:
            self.end(request_id, "error", error)

    async def wait_until_empty(self) -> None:
        """Waits until no request is live."""
        while self.live:
            self._emptied.clear()
            await self._emptied.wait()

    async def handle(self, batch: Sequence[Any], out: Outlet[Never]) -> None:
        for item in batch:
            self.deliver(item)

    def deliver(self, item: Any) -> None:
        """Puts the content of `item` into the outboxes of its requests.

        Subclasses override it; rows of ended requests are dropped.
        """
        raise NotImplementedError(f"{type(self).__name__}: write deliver(item)")

"""The one place where a request ends.

Knows which requests are alive and that each ends once. Refuses to know what their events look like: a pipeline's own
exit says that in `make_outbox` and `handle`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, Never, Protocol, TypeVar

from .stage import Crash, Outlet, Stage

Event_co = TypeVar("Event_co", covariant=True)


class Outbox(Protocol[Event_co]):
    """A client's end of a request. It coalesces, so putting something in never waits."""

    request_id: str

    def end(self, cause: str, error: BaseException | None) -> None:
        """Puts the terminal event in. Called once, by the exit."""

    def __aiter__(self) -> AsyncIterator[Event_co]:
        """The events in order; stops after the terminal one, and raises the error if the request failed."""


OutboxT = TypeVar("OutboxT", bound=Outbox[Any])


class Exit(Stage[Any, Never], Generic[OutboxT]):
    """The sink of a pipeline: hands what arrives to outboxes, and writes each request's one terminal event.

    Finishes, failures of any stage, cancels and deadlines all come here; the first one ends the request, later ones
    find nobody. `on_end` callbacks run at that moment, synchronously.
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
        """The outbox for a request that is about to enter."""
        raise NotImplementedError(f"{type(self).__name__}: write make_outbox(request)")

    def requests_of(self, item: Any) -> Iterable[str]:
        """The requests that a message of any stage belongs to. Messages of one request carry `request_id`."""
        request_id = getattr(item, "request_id", None)
        return () if request_id is None else (request_id,)

    def note_service(self, request_id: str, stage: str, service_us: int) -> None:
        """A stage had a message of this request for so long; the request may have ended meanwhile."""

    def number_of(self, request_id: str) -> int | None:
        """What trace records call a live request; None: it is not live, or nobody numbers requests here."""
        return None

    def open(self, request: Any, deadline_s: float | None = None) -> OutboxT:
        """Takes a request in; from now on it is live until it ends. `deadline_s` counts from now."""
        outbox = self.make_outbox(request)
        request_id = outbox.request_id
        if request_id in self.live:
            raise ValueError(f"request {request_id} is already under way: give each request an id of its own")
        self.live[request_id] = outbox
        self._emptied.clear()
        if deadline_s is not None:
            loop = asyncio.get_running_loop()
            self._deadlines[request_id] = loop.call_later(deadline_s, self.end, request_id, "deadline")
        return outbox

    def is_live(self, request_id: str) -> bool:
        """Whether somebody still waits for this request."""
        return request_id in self.live

    def end(self, request_id: str, cause: str, error: BaseException | None = None) -> bool:
        """Ends a request. False, and nothing happens, if it is not live any more."""
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
        """Returns once no request is live."""
        while self.live:
            self._emptied.clear()
            await self._emptied.wait()

    async def handle(self, batch: Sequence[Any], out: Outlet[Never]) -> None:
        for item in batch:
            self.deliver(item)

    def deliver(self, item: Any) -> None:
        """Puts what `item` carries into the outboxes it is for. Rows of ended requests are dropped."""
        raise NotImplementedError(f"{type(self).__name__}: write deliver(item)")

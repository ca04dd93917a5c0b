"""The engine process's stand-in for the exit, which is in the front process.

It tracks which requests are live, and reports failures and service times to the front process. Only the front process
ends a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Never

from ...runtime.exit import Exit
from ...runtime.pipeline import NotServing
from ..messages import TokenRequest
from .protocol import RequestFailed, ServiceTimes


class CoreOutbox:
    """The outbox of a request, whose answer is read in the front process."""

    def __init__(self, request_id: str, first_sequence_id: int, post: Callable[[Any], object]) -> None:
        self.request_id = request_id
        self.first_sequence_id = first_sequence_id
        self.sequence_ids: list[int] = []
        self._post = post

    def end(self, cause: str, error: BaseException | None) -> None:
        """Reports a failure of the request to the front process.

        A dead pipeline is not the request's failure.
        """
        if cause == "error" and not isinstance(error, NotServing):
            self._post(RequestFailed.of(self.request_id, error))

    def __aiter__(self) -> Never:
        raise TypeError("answers are read in the front process")


class CoreExit(Exit[CoreOutbox]):
    """The live requests of the engine process.

    Call `take` before a request is scheduled, and `forget` when the front process reports its end.
    """

    def __init__(self, post: Callable[[Any], object]) -> None:
        super().__init__()
        self._post = post
        self._request_ids: dict[int, str] = {}  # by sequence id
        self._times_us: dict[str, dict[str, int]] = {}  # by stage and request, since the last report

    def take(self, item: TokenRequest) -> None:
        """Registers a prompt of a request; a request may have several."""
        outbox = self.live.get(item.request_id)
        if outbox is None:
            first = item.first_sequence_id - item.prompt_index * item.params.n
            outbox = self.live[item.request_id] = CoreOutbox(item.request_id, first, self._post)
        ids = range(item.first_sequence_id, item.first_sequence_id + item.params.n)
        outbox.sequence_ids += ids
        self._request_ids.update(dict.fromkeys(ids, item.request_id))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drops requests that the front process has ended."""
        for request_id in request_ids:
            self.end(request_id, "over")

    def end(self, request_id: str, cause: str, error: BaseException | None = None) -> bool:
        outbox = self.live.get(request_id)
        if outbox is not None:
            for sequence_id in outbox.sequence_ids:
                self._request_ids.pop(sequence_id, None)
        return super().end(request_id, cause, error)

    def requests_of(self, item: Any) -> Iterable[str]:
        """The ids of an item's requests: its own, or those of the sequences in the rows of a step."""
        if hasattr(item, "request_id"):
            return (item.request_id,)
        pooled = getattr(item, "pooled", None)
        pooled = pooled.values() if isinstance(pooled, Mapping) else ()
        ids = [*getattr(item, "sequence_ids", ()), *(one.sequence_id for one in pooled)]
        return self.of_sequences(ids)

    def of_sequences(self, sequence_ids: Iterable[Any]) -> tuple[str, ...]:
        """The ids of the live requests of these sequences."""
        found = (self._request_ids.get(int(sequence_id)) for sequence_id in sequence_ids)
        return tuple(dict.fromkeys(request_id for request_id in found if request_id is not None))

    def number_of(self, request_id: str) -> int | None:
        outbox = self.live.get(request_id)
        return None if outbox is None else outbox.first_sequence_id

    def note_service(self, request_id: str, stage: str, service_us: int) -> None:
        if not self._times_us:
            self._schedule_report()
        times = self._times_us.setdefault(stage, {})
        times[request_id] = times.get(request_id, 0) + service_us

    def _schedule_report(self) -> None:
        """Schedules one report for all service times of a batch."""
        asyncio.get_running_loop().call_soon(self._report_times)

    def _report_times(self) -> None:
        times, self._times_us = self._times_us, {}
        for stage, by_request in times.items():
            self._post(ServiceTimes(stage, by_request))

    def make_outbox(self, request: Any) -> CoreOutbox:
        raise TypeError("requests are submitted in the front process")

    def deliver(self, item: Any) -> None:
        raise TypeError("texts are delivered in the front process")

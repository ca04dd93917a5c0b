"""Admission control: limits on load, and an estimate of the waiting time.

Reads no clock: the caller passes the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import Overloaded

RATE_MEMORY_S = 30.0  # time constant with which old work fades from the service rate
QUEUE_SHARE = 0.75  # of `max_queue_s` that a predicted wait may be: one that is off by less ends no admitted request
LEAST_WAIT_S = 1.0  # lower bound of the estimate: never suggest an immediate retry


@dataclass(slots=True)
class _Admitted:
    num_tokens: int  # estimate: prompt plus the longest requested answer
    is_waiting: bool = True  # has no token yet


class EngineQueues(NamedTuple):
    """The queues of the engines to which requests may go. One that is full is no reason to refuse a request."""

    num_engines: int
    num_waiting: int  # requests in the queue that takes least time
    wait_s: float  # predicted for that queue
    has_room: bool  # whether there are fewer than `max_waiting` requests in some queue


AskQueues = Callable[[int, int], EngineQueues | None]  # of requests in progress and `max_waiting`; None: not known


class Admission:
    """Counts requests: `admit` adds one, `start` reports its first token, `release` its end.

    The estimated wait is the tokens of all waiting requests divided by the rate at which requests finished. Both use
    the same token estimate per request, so a constant error factor cancels out.

    In front of several engines, `ask_queues` tells of their queues: then `max_waiting` is of each of them, and a
    request is refused as well if the shortest queue takes longer than `QUEUE_SHARE` of `max_queue_s`.
    """

    def __init__(self, max_admitted: int, max_waiting: int, max_queue_s: float | None = None) -> None:
        self.max_admitted = max_admitted
        self.max_waiting = max_waiting
        self.max_queue_s = max_queue_s
        self.ask_queues: AskQueues | None = None
        self.num_waiting = 0
        self.num_refused = 0
        self._admitted: dict[str, _Admitted] = {}
        self._queued_tokens = 0
        self._served_tokens = 0.0  # this and the next fade with RATE_MEMORY_S
        self._served_s = 0.0
        self._counted_s = 0.0  # the time up to which the rate is counted

    @property
    def num_admitted(self) -> int:
        """Requests in progress, waiting ones included."""
        return len(self._admitted)

    def admit(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """Admits a request of about `num_tokens` tokens, or raises `Overloaded`.

        No effect on an admitted request.
        """
        if request_id in self._admitted:
            return
        queues = None if self.ask_queues is None else self.ask_queues(self.num_admitted, self.max_waiting)
        if self.num_admitted >= self.max_admitted:
            raise self._refuse(f"{self.num_admitted} requests are in progress, which is the limit", queues)
        if queues is not None:
            self._check_queues(queues)
        elif self.num_waiting >= self.max_waiting:
            raise self._refuse(f"{self.num_waiting} requests wait for their first token, which is the limit")
        if not self._admitted:
            self._counted_s = now_s  # idle time must not lower the rate
        self._admitted[request_id] = _Admitted(num_tokens)
        self._queued_tokens += num_tokens
        self.num_waiting += 1

    def start(self, request_id: str) -> None:
        """Records that the request has its first token. Further calls have no effect."""
        admitted = self._admitted.get(request_id)
        if admitted is not None and admitted.is_waiting:
            admitted.is_waiting = False
            self.num_waiting -= 1
            self._queued_tokens -= admitted.num_tokens

    def release(self, request_id: str, now_s: float, *, is_served: bool) -> None:
        """Removes a request that has ended, complete if `is_served`.

        Has no effect on one that was not admitted.
        """
        self.start(request_id)
        admitted = self._admitted.pop(request_id, None)
        if admitted is not None and is_served:
            self._count(admitted.num_tokens, now_s)

    def estimate_wait_s(self) -> float:
        """Estimated seconds until the waiting requests are served; LEAST_WAIT_S if unknown."""
        return max(LEAST_WAIT_S, self.work_waiting_s()) if self._served_tokens else LEAST_WAIT_S

    def work_waiting_s(self) -> float:
        """Estimated seconds of work in the waiting requests; LEAST_WAIT_S for each until one has been served."""
        if not self._served_tokens:
            return LEAST_WAIT_S * self.num_waiting
        rate = self._served_tokens / max(self._served_s, 1e-3)
        return self._queued_tokens / rate

    def _count(self, num_tokens: int, now_s: float) -> None:
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        kept = math.exp(-passed_s / RATE_MEMORY_S)
        self._served_tokens = self._served_tokens * kept + num_tokens
        self._served_s = self._served_s * kept + passed_s

    def is_refused_by(self, queues: EngineQueues) -> bool:
        """Whether a request would be refused if it could go to the engines of these queues alone."""
        return not queues.has_room or self._is_too_late(queues)

    def _is_too_late(self, queues: EngineQueues) -> bool:
        return self.max_queue_s is not None and queues.wait_s > QUEUE_SHARE * self.max_queue_s

    def _check_queues(self, queues: EngineQueues) -> None:
        if not queues.has_room:
            raise self._refuse(f"{self.max_waiting} requests or more wait in each engine, which is the limit", queues)
        if self.max_queue_s is not None and self._is_too_late(queues):
            reason = (
                f"the shortest queue takes about {queues.wait_s:.1f} s, too close to max_queue_s = {self.max_queue_s:g}"
            )
            raise self._refuse(reason, queues)

    def _refuse(self, reason: str, queues: EngineQueues | None = None) -> Overloaded:
        self.num_refused += 1
        wait_s = self.estimate_wait_s() if queues is None else max(LEAST_WAIT_S, queues.wait_s)
        return Overloaded(
            f"{reason}: try again in about {math.ceil(wait_s)} s",
            queue_depth=self.num_waiting if queues is None else queues.num_waiting,
            estimated_wait_s=wait_s,
            num_engines=None if queues is None else queues.num_engines,
        )

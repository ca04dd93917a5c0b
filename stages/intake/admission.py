"""Who may come in: counts of requests under way and waiting, and how long the wait would be.

Knows counts, tokens and seconds. Refuses to know what a request asks, and reads no clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import Overloaded

RATE_MEMORY_S = 30.0  # the service rate is that of about the last half minute of work
LEAST_WAIT_S = 1.0  # nobody is told to come back at once


@dataclass(slots=True)
class _Admitted:
    num_tokens: int  # estimate: prompt and the longest answer asked for
    is_waiting: bool = True  # has no token yet


class Admission:
    """The door. `admit` counts a request in, `start` says that it has its first token, `release` that it is over.

    The wait is estimated from what those who wait may still need and from the rate at which requests got done, both in
    the same estimated tokens: an estimate that is wrong by a factor is wrong by it in both.
    """

    def __init__(self, max_admitted: int, max_waiting: int) -> None:
        self.max_admitted = max_admitted
        self.max_waiting = max_waiting
        self.num_waiting = 0
        self.num_refused = 0
        self._admitted: dict[str, _Admitted] = {}
        self._queued_tokens = 0
        self._served_tokens = 0.0  # both fade with RATE_MEMORY_S
        self._served_s = 0.0
        self._counted_s = 0.0  # until when time was counted

    @property
    def num_admitted(self) -> int:
        """Requests under way, those that wait included."""
        return len(self._admitted)

    def admit(self, request_id: str, num_tokens: int, now_s: float) -> None:
        """Counts a request of about `num_tokens` in; raises `Overloaded` when the house is full. Once is enough: a
        request that is in stays in."""
        if request_id in self._admitted:
            return
        if self.num_admitted >= self.max_admitted:
            raise self._refuse(f"{self.num_admitted} requests are under way, which is all that are admitted")
        if self.num_waiting >= self.max_waiting:
            raise self._refuse(f"{self.num_waiting} requests wait for their first token, which is all that may wait")
        if not self._admitted:
            self._counted_s = now_s  # the time nobody was here says nothing about the rate
        self._admitted[request_id] = _Admitted(num_tokens)
        self._queued_tokens += num_tokens
        self.num_waiting += 1

    def start(self, request_id: str) -> None:
        """The request has its first token; saying it again changes nothing."""
        admitted = self._admitted.get(request_id)
        if admitted is not None and admitted.is_waiting:
            admitted.is_waiting = False
            self.num_waiting -= 1
            self._queued_tokens -= admitted.num_tokens

    def release(self, request_id: str, now_s: float, *, is_served: bool) -> None:
        """The request is over, with its answer if `is_served`. One that was never admitted changes nothing."""
        self.start(request_id)
        admitted = self._admitted.pop(request_id, None)
        if admitted is not None and is_served:
            self._count(admitted.num_tokens, now_s)

    def estimate_wait_s(self) -> float:
        """Seconds until those who wait now may have been served; LEAST_WAIT_S while no rate is known."""
        if not self._served_tokens:
            return LEAST_WAIT_S
        rate = self._served_tokens / max(self._served_s, 1e-3)
        return max(LEAST_WAIT_S, self._queued_tokens / rate)

    def _count(self, num_tokens: int, now_s: float) -> None:
        passed_s, self._counted_s = now_s - self._counted_s, now_s
        kept = math.exp(-passed_s / RATE_MEMORY_S)
        self._served_tokens = self._served_tokens * kept + num_tokens
        self._served_s = self._served_s * kept + passed_s

    def _refuse(self, reason: str) -> Overloaded:
        self.num_refused += 1
        wait_s = self.estimate_wait_s()
        return Overloaded(
            f"{reason}: try again in about {math.ceil(wait_s)} s",
            queue_depth=self.num_waiting,
            estimated_wait_s=wait_s,
        )

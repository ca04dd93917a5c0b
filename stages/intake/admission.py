"""Admission control: limits on load, and an estimate of the waiting time.

Reads no clock: the caller passes the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import Overloaded

RATE_MEMORY_S = 30.0  # time constant with which old work fades from the service rate
LEAST_WAIT_S = 1.0  # lower bound of the estimate: never suggest an immediate retry


@dataclass(slots=True)
class _Admitted:
    num_tokens: int  # estimate: prompt plus the longest requested answer
    is_waiting: bool = True  # has no token yet


class Admission:
    """Counts requests: `admit` adds one, `start` reports its first token, `release` its end.

    The estimated wait is the tokens of all waiting requests divided by the rate at which requests finished. Both use
    the same token estimate per request, so a constant error factor cancels out.
    """

    def __init__(self, max_admitted: int, max_waiting: int) -> None:
        self.max_admitted = max_admitted
        self.max_waiting = max_waiting
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
        if self.num_admitted >= self.max_admitted:
            raise self._refuse(f"{self.num_admitted} requests are in progress, which is the limit")
        if self.num_waiting >= self.max_waiting:
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

    def _refuse(self, reason: str) -> Overloaded:
        self.num_refused += 1
        wait_s = self.estimate_wait_s()
        return Overloaded(
            f"{reason}: try again in about {math.ceil(wait_s)} s",
            queue_depth=self.num_waiting,
            estimated_wait_s=wait_s,
        )

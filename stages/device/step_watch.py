"""Finds a device that hangs in a step which never fails: begins a check when a step takes longer than any should.

Used on the event loop. Does not depend on torch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from ...runtime.env.env import Alarm, Env
from ..messages import StepGrant
from .device_guard import DeviceGuard

STUCK_S = 1.0  # in a step until the device is checked; as the check takes 0.9 s at most, health is told within 2 s
CHECK_SHARE = 0.9  # of that time, in which the device must answer
USUAL_FACTOR = 2  # a step may take twice as long as the longest of the last ones
LEAST_RATE = 256  # tokens/s: a device that computes prompts more slowly than that may be taken for lost
COPIED_TOKENS = 16  # a block that is copied from or to the host counts as so many tokens: 32 MB/s of blocks of 2 MB


@dataclass(frozen=True, slots=True, eq=False)
class _Running:
    step: int
    num_tokens: int
    result: asyncio.Future[Any]
    submitted_s: float


class StepWatch:
    """The steps in flight of a device, oldest first, with one alarm for the oldest.

    A step runs since it was submitted, or since the step before it ended. A check that finds the device well is
    repeated later and later while the step goes on: the host may be slow, as in a user's logits processor.
    """

    def __init__(self, guard: DeviceGuard, env: Env) -> None:
        self._guard, self._env = guard, env
        self._running: deque[_Running] = deque()
        self._progress_s = 0.0  # when a step ended last
        self._longest_s = 0.0  # of the last steps
        self._patience = 1  # grows while the oldest step is checked in vain
        self._alarm: Alarm | None = None

    def begin(self, step: int, num_tokens: int, result: asyncio.Future[Any]) -> None:
        """A step is submitted; it ends with its `result`."""
        self._running.append(_Running(step, num_tokens, result, self._env.now()))
        result.add_done_callback(self._note_end)
        if self._alarm is None:
            self._wait()

    def _note_end(self, result: asyncio.Future[Any]) -> None:
        now_s, began_s = self._env.now(), self._began_s
        while self._running and self._running[0].result.done():
            self._running.popleft()
        if not result.cancelled() and result.exception() is None:
            self._longest_s = max(now_s - began_s, self._longest_s * (1 - 1 / 64))
        self._progress_s, self._patience = now_s, 1

    @property
    def num_tokens(self) -> int:
        """Of all steps in flight: a check waits for all of them."""
        return sum(step.num_tokens for step in self._running)

    @property
    def _began_s(self) -> float:
        """When the oldest step in flight began."""
        return max(self._running[0].submitted_s, self._progress_s) if self._running else self._progress_s

    @property
    def _limit_s(self) -> float:
        """Seconds that the oldest step may take until the device is checked."""
        return max(STUCK_S, USUAL_FACTOR * self._longest_s, self.num_tokens / LEAST_RATE)

    @property
    def _due_s(self) -> float:
        """When the device is checked, if the oldest step goes on."""
        return self._began_s + self._patience * self._limit_s

    def _wait(self) -> None:
        """Until the oldest step is due, but not longer than one that begins meanwhile may take."""
        self._alarm = self._env.call_at(min(self._due_s, self._env.now() + STUCK_S), self._look)

    def _look(self) -> None:
        self._alarm = None
        if not self._running or self._guard.lost is not None or self._guard.is_closed:
            return
        limit_s, oldest = self._limit_s, self._running[0]
        if self._env.now() >= self._due_s:  # NOTE: a difference of the two is rounded, and may be 0 before that
            took_s = self._env.now() - self._began_s
            self._patience *= 2
            self._guard.begin_stuck(oldest.step, took_s, CHECK_SHARE * limit_s, oldest.result.done)
        self._wait()


def work_of(grant: StepGrant) -> int:
    """The tokens of a step with prompts, and of the blocks that it copies, as `StepWatch.begin` counts them.

    A decode step reads the weights and the cache once, which takes a part of a second at most.
    """
    num_tokens = 0 if grant.is_decode else grant.num_computed
    return num_tokens + COPIED_TOKENS * sum(len(copy.sources) for copy in grant.copies)

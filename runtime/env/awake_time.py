"""Time limits that count only time in which this process ran.

A machine may stand still: a suspended VM, a stopped group of processes, a host with too much to do. After that nothing
that was waited for has had its chance, so a limit may not end at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TypeVarTuple

Ts = TypeVarTuple("Ts")

NUM_STEPS = 8  # of a limit: a standstill lengthens it by the step in which it began
LATE_S = 1.0  # a step that ends later than this counts nothing: the loop stood still
MAX_LATE_STEPS = 16  # then late steps count too, so that each limit ends: after three times its time, and what was late


class AwakeTimer:
    """Calls `callback(*args)` on the running loop once it has run for `limit_s`; `cancel` prevents that.

    It always has had a step of `limit_s / NUM_STEPS` without a standstill just before.
    """

    def __init__(self, limit_s: float, callback: Callable[[*Ts], object], *args: *Ts) -> None:
        self._loop = asyncio.get_running_loop()
        self._step_s = limit_s / NUM_STEPS
        self._num_steps, self._num_late = 0, 0
        self._call: Callable[[], object] = partial(callback, *args)
        self._wait()

    def cancel(self) -> None:
        """Idempotent, also after the call."""
        self._timer.cancel()

    def _wait(self) -> None:
        self._due_s = self._loop.time() + self._step_s
        self._timer = self._loop.call_at(self._due_s, self._end_step)

    def _end_step(self) -> None:
        if self._loop.time() - self._due_s >= LATE_S and self._num_late < MAX_LATE_STEPS:
            self._num_late += 1
        else:
            self._num_steps += 1
        if self._num_steps < NUM_STEPS:
            self._wait()
        else:
            self._call()


class AwakeTimeout:
    """As `asyncio.timeout`, with the time of an `AwakeTimer`. None: no limit."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._timer: AwakeTimer | None = None
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> AwakeTimeout:
        await self._timeout.__aenter__()
        if self._limit_s is not None:
            self._timer = AwakeTimer(self._limit_s, self._timeout.reschedule, 0.0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, trace)

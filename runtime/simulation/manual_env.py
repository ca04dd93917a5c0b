"""An env whose time is set by whoever drives it: for stages that are called one after another, without an event loop.

`env.py` has the one for whole pipelines.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from ..env.env import Alarm, Env
from ..workers.side_thread import SideThread
from ..workers.worker import Worker

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class VirtualEnv(Env):
    """Time stands still until somebody sets `time_s`, who then calls those that asked for it. There are no threads, no
    faults and no waiting."""

    injects_faults = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.time_s = 0.0
        self._alarms: dict[_Alarm, None] = {}

    @property
    def next_alarm_s(self) -> float:
        """When somebody next wants to be called; infinite if nobody does."""
        return min((alarm.when_s for alarm in self._alarms), default=math.inf)

    def ring(self) -> None:
        """Calls those whose time has come."""
        due = [alarm for alarm in self._alarms if alarm.when_s <= self.time_s]
        for alarm in sorted(due, key=lambda alarm: alarm.when_s):
            if alarm in self._alarms:  # none before it has cancelled it
                alarm.cancel()
                alarm.callback()

    def call_at(self, when_s: float, callback: Callable[[], object]) -> Alarm:
        alarm = _Alarm(when_s, callback, self._alarms)
        self._alarms[alarm] = None
        return alarm

    def now(self) -> float:
        return self.time_s

    def now_ns(self) -> int:
        return round(self.time_s * 1e9)

    def wall_time(self) -> float:
        return self.time_s

    async def sleep(self, delay_s: float) -> NoReturn:
        raise RuntimeError("nobody may wait where time is set from outside: run such a stage in a SimEnv")

    async def run_in_thread(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        return fn(*args)

    def worker(self, name: str, threads: int = 1) -> Worker:
        raise RuntimeError(f"worker {name!r}: there are no threads where time is set from outside")

    def side_thread(self, name: str) -> SideThread:
        raise RuntimeError(f"side thread {name!r}: there are no threads where time is set from outside")

    def yield_to(self, name: str, own_cpu: int | None = None) -> None:
        pass

    def give_way(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    def fault(self, name: str, probability: float | None = None) -> bool:
        return False

    def note(self, *fields: object) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class _Alarm:
    when_s: float
    callback: Callable[[], object]
    others: dict[_Alarm, None]  # all that are to come, this one too

    def cancel(self) -> None:
        self.others.pop(self, None)


def run_at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing, as a stage's `handle` whose work is plain code."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waits for something: it can not be run without an event loop")

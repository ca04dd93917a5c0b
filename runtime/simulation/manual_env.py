"""An env whose time the caller sets, for calling stages without an event loop.

`env.py` has the env for whole pipelines.
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


class ManualEnv(Env):
    """An env with manual time: set `time_s`, then call `ring` to run the due alarms.

    No threads, no faults, no waiting.
    """

    injects_faults = False

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.time_s = 0.0
        self._alarms: dict[_Alarm, None] = {}

    @property
    def next_alarm_s(self) -> float:
        """The time of the next alarm; infinite if there is none."""
        return min([alarm.when_s for alarm in self._alarms]) if self._alarms else math.inf

    def ring(self) -> None:
        """Calls the alarms that are due, in order of time."""
        if not self._alarms:
            return
        due = [alarm for alarm in self._alarms if alarm.when_s <= self.time_s]
        for alarm in sorted(due, key=lambda alarm: alarm.when_s):
            if alarm in self._alarms:  # not cancelled by an earlier one
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
        raise RuntimeError("a stage cannot sleep in a VirtualEnv: run it in a SimEnv")

    async def run_in_thread(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        return fn(*args)

    def worker(self, name: str, threads: int = 1) -> Worker:
        raise RuntimeError(f"worker {name!r}: a VirtualEnv has no threads; use a SimEnv")

    def side_thread(self, name: str) -> SideThread:
        raise RuntimeError(f"side thread {name!r}: a VirtualEnv has no threads; use a SimEnv")

    def yield_to(self, name: str, own_cpu: int | None = None) -> None:
        pass

    def yield_this_thread(self) -> None:
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
    others: dict[_Alarm, None]  # all pending alarms, this one included

    def cancel(self) -> None:
        self.others.pop(self, None)


def run_at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never waits, such as `handle` of a stage with plain code.

    RuntimeError if it waits.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        value: T = done.value
        return value
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waits for something: run it on an event loop")

"""How long a helper process may take for a job: counted in what it could have used, and not by the clock alone."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import NamedTuple

from ..env.awake_time import LATE_S, MAX_LATE_STEPS

LOOK_S = 0.25  # between two looks at the process
MOST_FACTOR = 6.0  # times `idle_s`: what a job may take if its process gets no CPU or no memory, or is stopped


class HelperStuck(Exception):
    """A helper had time to answer, and did not, though its job does not take long. The message says what it did."""


class Activity(NamedTuple):
    """What a process does, as the system tells it."""

    state: str  # R runs or waits for a CPU, S sleeps, D waits for a disk or for memory, T is stopped, Z has ended
    cpu_ticks: int  # that it has used so far, all threads together


def activity_of(pid: int) -> Activity | None:
    """None where the system does not tell, or if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # behind the name, which may have spaces
    except OSError:
        return None
    return Activity(fields[0].decode(), int(fields[11]) + int(fields[12]))


class HelperWatch:
    """Watches one job, as an `async with` around the wait for its answer. Raises `HelperStuck` there.

    A helper is stuck that sleeps for `idle_s` without using any CPU. One that gets no CPU, or is stopped, is not; but
    no job takes longer than `MOST_FACTOR * idle_s`. What counts is time in which this process runs, too: a machine that
    stands still takes nothing from a job.
    """

    def __init__(self, pid: int, idle_s: float) -> None:
        self._pid, self._idle_s = pid, idle_s
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._num_late = 0
        self._seen: Activity | None = None
        self._passed_s = self._asleep_s = 0.0
        self._how = ""

    @property
    def stood_still(self) -> bool:
        """Whether this process did not run for a while during the job."""
        return self._num_late > 0 or self._is_late

    @property
    def _is_late(self) -> bool:
        return self._loop.time() - self._due_s >= LATE_S

    async def __aenter__(self) -> HelperWatch:
        self._wait()
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._timer is not None
        self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            raise HelperStuck(self._how) from None

    def _wait(self) -> None:
        self._due_s = self._loop.time() + LOOK_S
        self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        if self._is_late and self._num_late < MAX_LATE_STEPS:
            self._num_late += 1
        else:
            self._count(activity_of(self._pid))
        if self._how:
            self._timeout.reschedule(0.0)
        else:
            self._wait()

    def _count(self, now: Activity | None) -> None:
        before, self._seen = self._seen, now
        is_asleep = now is not None and now.state == "S" and now == before
        self._passed_s += LOOK_S
        self._asleep_s = self._asleep_s + LOOK_S if is_asleep else 0.0
        if self._asleep_s >= self._idle_s:
            self._how = f"it did nothing for {self._idle_s:g} s"
        elif self._passed_s >= MOST_FACTOR * self._idle_s:
            state = "" if now is None else f"; its process is in state {now.state}"
            self._how = f"no answer in {self._passed_s:g} s{state}"

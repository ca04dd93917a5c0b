"""Time, randomness and threads, injected. Stages reach them only through an `Env`, so the same code runs live
(`LiveEnv`) and under virtual time with a seeded order of everything (`SimEnv` in `runtime/simulation/env.py`).

This file knows clocks, random streams and the event loop. It knows no stage and no channel.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Protocol, TypeVar, TypeVarTuple

from ..device_streams.interface import Streams
from ..workers.side_thread import LiveSideThread, SideThread
from ..workers.thread_worker import Handover, ThreadWorker
from ..workers.worker import Worker
from .cpus import keep_off, lower_priority

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

POOL_THREADS = 4  # of `run_in_thread`: file reads, template renders; a stage with steady work owns a Worker


class Alarm(Protocol):
    """A call that is to come."""

    def cancel(self) -> None:
        """It does not come. May be said again, and afterwards."""


class Env(ABC):
    """What a stage may know of the world. Belongs to the one event loop it is first used on."""

    is_live: ClassVar[bool] = False  # True: time passes by itself, so something may look around now and then
    injects_faults: ClassVar[bool] = True  # False: `fault` is never true, and need not be asked
    streams: Streams | None = None  # a device to be used in the place of the real one; set before an engine starts

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, random.Random] = {}
        self._pool: Worker | None = None

    @abstractmethod
    def now(self) -> float:
        """Monotonic seconds, the clock of the event loop's timers."""

    @abstractmethod
    def now_ns(self) -> int:
        """The same clock in nanoseconds."""

    @abstractmethod
    def wall_time(self) -> float:
        """Seconds since 1970. Never for deadlines: it may jump."""

    def random(self, name: str) -> random.Random:
        """The stream of random numbers called `name`: the same object each time, and for one seed the same numbers in
        every process, whatever other streams there are. Give each user its own name."""
        if name not in self._streams:
            self._streams[name] = seeded_stream(self.seed, name)
        return self._streams[name]

    def secret(self, name: str, num_bytes: int) -> bytes:
        """Bytes that nobody outside the process can know; in simulation those of the stream `name`."""
        return self.random(name).randbytes(num_bytes)

    def call_at(self, when_s: float, callback: Callable[[], object]) -> Alarm:
        """Calls `callback` on the loop when this env's clock has come to `when_s`, unless what is returned is cancelled
        before."""
        return asyncio.get_running_loop().call_at(when_s, callback)

    async def sleep(self, delay_s: float) -> None:
        """Waits `delay_s` seconds of this env's clock."""
        await asyncio.sleep(delay_s)

    async def run_in_thread(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """`fn(*args)` in a small shared pool, in the caller's contextvars. A cancelled caller leaves at once: a call
        that has not begun never runs, one that has begun runs on unseen."""
        if self._pool is None:
            self._pool = self.worker("pool", POOL_THREADS)
        context = contextvars.copy_context()
        return await self._pool.submit(lambda: context.run(fn, *args))

    @abstractmethod
    def worker(self, name: str, threads: int = 1) -> Worker:
        """A worker of its own, threads named `millrace-<name>`. Close it, or let `aclose` of this env."""

    @abstractmethod
    def side_thread(self, name: str) -> SideThread:
        """A thread named `millrace-<name>`, started by its first job and ended by `aclose` of this env. Made from any
        thread."""

    @abstractmethod
    def yield_to(self, name: str, own_cpu: int | None = None) -> None:
        """From now on the thread of the worker `name` goes first: all other workers of this env, begun or not, run at a
        lower priority where the system has such, and on other CPUs than `own_cpu`, where it computes or another thread
        does for it; None: it has no CPU of its own. In simulation nothing."""

    @abstractmethod
    def give_way(self) -> None:
        """The calling thread, and what it starts from now on, does as those other workers do."""

    @abstractmethod
    async def aclose(self) -> None:
        """Closes every worker, the pool and the side threads, in the order they were made. May be called again."""

    @abstractmethod
    def fault(self, name: str, probability: float | None = None) -> bool:
        """Whether the fault point `name` strikes now. Always false live; in simulation drawn from the run's seed, with
        `probability` or, if that is None, one that the run drew for this point."""

    @abstractmethod
    def note(self, *fields: object) -> None:
        """Adds a fact to the run's event trace, by `repr`. Nothing live."""


def seeded_stream(seed: int, name: str) -> random.Random:
    """The random stream `name` of a run: a function of both only, so equal in processes of any PYTHONHASHSEED."""
    return random.Random(hashlib.sha256(f"{seed}/{name}".encode()).digest())


class LiveEnv(Env):
    """Real clocks and threads. `seed` fixes the random streams; None draws one from the system.

    Worker round trip, `await worker.submit(fn)` on an idle loop: 75 to 80 us at the median, 120 at p99 (2 cores, Python
    3.11; the default executor takes 135); 256 jobs submitted together: 16 us a job, as results that are ready together
    reach the loop in one wake-up. A loop that never waits for I/O keeps the interpreter lock, and then a thread may
    wait for `sys.getswitchinterval()` (5 ms).
    """

    is_live: ClassVar[bool] = True
    injects_faults: ClassVar[bool] = False
    now = staticmethod(time.monotonic)
    now_ns = staticmethod(time.monotonic_ns)
    wall_time = staticmethod(time.time)

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(int.from_bytes(os.urandom(8), "little") if seed is None else seed)
        self._handover = Handover()
        self._workers: dict[ThreadWorker, None] = {}
        self._side_threads: list[LiveSideThread] = []
        self._first: str | None = None  # the worker whose threads go first
        self._own_cpu: int | None = None  # of that one, or of whoever computes for it

    def secret(self, name: str, num_bytes: int) -> bytes:
        return os.urandom(num_bytes)  # a seed may be known: it is a setting, and 0 unless somebody says

    def worker(self, name: str, threads: int = 1) -> Worker:
        worker = ThreadWorker(name, threads, self._handover, lambda closed: self._workers.pop(closed, None))
        worker.on_start = self._stand_back if self._first not in (None, name) else None
        self._workers[worker] = None
        return worker

    def side_thread(self, name: str) -> SideThread:
        thread = LiveSideThread(name)
        self._side_threads.append(thread)
        return thread

    def yield_to(self, name: str, own_cpu: int | None = None) -> None:
        self._first, self._own_cpu = name, own_cpu
        for worker in self._workers:
            if worker.name != name:
                worker.on_start = self._stand_back
                for other in worker.native_ids:
                    self._stand_back(other)

    def give_way(self) -> None:
        self._stand_back(threading.get_native_id())

    def _stand_back(self, thread: int) -> None:
        lower_priority(thread)
        if self._own_cpu is not None:
            keep_off(self._own_cpu, thread)

    async def aclose(self) -> None:
        used = [thread for thread in self._side_threads if thread.is_used]
        self._side_threads.clear()
        for thread in used:
            await self.run_in_thread(thread.close)
        while self._workers:  # others may be made meanwhile
            await next(iter(self._workers)).aclose()
        self._pool = None
        self._handover.close()

    def fault(self, name: str, probability: float | None = None) -> bool:
        return False

    def note(self, *fields: object) -> None:
        pass

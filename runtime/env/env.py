"""The `Env`: time, randomness and threads, injected into stages.

Stages reach them only through an `Env`. So the same code runs live (`LiveEnv`) and in virtual time with a seeded order
of all callbacks (`SimEnv` in `runtime/simulation/env.py`).
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

from ..device_streams.interface import DeviceStreams
from ..workers.side_thread import LiveSideThread, SideThread
from ..workers.thread_start import ThreadNotStarted
from ..workers.thread_worker import Handover, ThreadWorker
from ..workers.worker import Worker
from .cpus import keep_off, lower_priority

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

POOL_THREADS = 4  # of `run_in_thread`, for file reads and template renders; a stage with steady work owns a Worker


class Alarm(Protocol):
    """A scheduled call."""

    def cancel(self) -> None:
        """Cancels the call. Idempotent, also after the call."""


class Env(ABC):
    """The clock, randomness and threads of a stage.

    Belongs to the event loop it is first used on.
    """

    is_live: ClassVar[bool] = False  # True: time passes by itself, so periodic checks may run
    injects_faults: ClassVar[bool] = True  # False: `fault` always returns False, so callers may skip it
    streams: DeviceStreams | None = None  # a device that replaces the real one; set before an engine starts

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
        """Seconds since 1970. Not for deadlines: it may jump."""

    def random(self, name: str) -> random.Random:
        """The random stream called `name`: the same object at each call.

        For one seed it gives the same numbers in every process, whatever other streams exist. Give each user its own
        name.
        """
        if name not in self._streams:
            self._streams[name] = seeded_stream(self.seed, name)
        return self._streams[name]

    def secret(self, name: str, num_bytes: int) -> bytes:
        """Bytes that cannot be guessed outside the process; in simulation from the stream `name`."""
        return self.random(name).randbytes(num_bytes)

    def call_at(self, when_s: float, callback: Callable[[], object]) -> Alarm:
        """Calls `callback` on the loop when this env's clock reaches `when_s`.

        The alarm can be cancelled.
        """
        return asyncio.get_running_loop().call_at(when_s, callback)

    async def sleep(self, delay_s: float) -> None:
        """Waits `delay_s` seconds of this env's clock."""
        await asyncio.sleep(delay_s)

    async def run_in_thread(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Runs `fn(*args)` in a small shared pool, in the caller's contextvars.

        A cancelled caller returns at once: a call that has not begun never runs; one that has begun runs on and its
        result is dropped. Raises `ThreadNotStarted` while the system allows no thread.
        """
        if self._pool is None:
            self._pool = self.worker("pool", POOL_THREADS)
        context = contextvars.copy_context()
        return await self._pool.submit(lambda: context.run(fn, *args))

    @abstractmethod
    def worker(self, name: str, threads: int = 1) -> Worker:
        """A new worker with threads named `millrace-<name>`.

        Close it, or let `aclose` of this env do so.
        """

    @abstractmethod
    def side_thread(self, name: str) -> SideThread:
        """A thread named `millrace-<name>`. Its first job starts it; `aclose` of this env ends it.

        May be called from any thread.
        """

    @abstractmethod
    def yield_to(self, name: str, own_cpu: int | None = None) -> None:
        """Gives the threads of the worker `name` precedence.

        All other workers of this env, present and future, run at a lower priority where the system has priorities. They
        also avoid `own_cpu`, the CPU on which the worker or its compute thread runs (None: not pinned). In simulation
        it does nothing.
        """

    @abstractmethod
    def yield_this_thread(self) -> None:
        """Applies the restrictions of `yield_to` to the calling thread and threads it starts later."""

    @abstractmethod
    async def aclose(self) -> None:
        """Closes every worker, the pool and the side threads, in the order of creation.

        May be called again.
        """

    @abstractmethod
    def fault(self, name: str, probability: float | None = None) -> bool:
        """Whether the fault point `name` strikes now. Always False live.

        In simulation it is drawn from the run's seed with `probability`; None: a probability that the run drew for this
        point.
        """

    @abstractmethod
    def note(self, *fields: object) -> None:
        """Adds a fact to the run's event trace, by `repr`. Does nothing live."""


def seeded_stream(seed: int, name: str) -> random.Random:
    """The random stream `name` of a run.

    It depends on both arguments only, not on PYTHONHASHSEED.
    """
    return random.Random(hashlib.sha256(f"{seed}/{name}".encode()).digest())


class LiveEnv(Env):
    """Real clocks and threads. `seed` fixes the random streams; None draws one from the system.

    Results that are ready together reach the loop in one wakeup. NOTE: a loop that never waits for I/O keeps the
    interpreter lock; then a thread may wait for `sys.getswitchinterval()` (5 ms).
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
        self._first: str | None = None  # the worker whose threads have precedence
        self._own_cpu: int | None = None  # of that worker or its compute thread

    def secret(self, name: str, num_bytes: int) -> bytes:
        return os.urandom(num_bytes)  # not from the seed: it may be known, as it is a setting with default 0

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

    def yield_this_thread(self) -> None:
        self._stand_back(threading.get_native_id())

    def _stand_back(self, thread: int) -> None:
        lower_priority(thread)
        if self._own_cpu is not None:
            keep_off(self._own_cpu, thread)

    async def aclose(self) -> None:
        used = [thread for thread in self._side_threads if thread.is_used]
        self._side_threads.clear()
        for thread in used:
            try:
                await self.run_in_thread(thread.close)
            except ThreadNotStarted:  # then here: its last job is short
                thread.close()
        while self._workers:  # more may be made meanwhile
            await next(iter(self._workers)).aclose()
        self._pool = None
        self._handover.close()

    def fault(self, name: str, probability: float | None = None) -> bool:
        return False

    def note(self, *fields: object) -> None:
        pass

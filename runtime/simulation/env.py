"""The `Env` of a simulated run: virtual time, and threads and faults from one seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, TypedDict, TypeVar, TypeVarTuple

from ..env.env import Env
from ..workers.side_thread import SideThread
from ..workers.thread_start import ThreadNotStarted
from ..workers.worker import Job, WhenDone, Worker, run_job
from .faults import FaultPoints
from .loop import MAX_CALLBACKS, START_S, SimLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

START_WALL_S = 1_700_000_000.0


class SimSettings(TypedDict, total=False):
    """Settings of a run besides its seed and policy.

    `SimEnv` documents them and has the defaults.
    """

    fault_probability: float
    fault_names: Collection[str] | None
    thread_delay_s: tuple[float, float]
    worker_delay_s: Mapping[str, tuple[float, float]] | None
    max_callbacks: int
    keep_trace: bool


class SimEnv(Env):
    """The env of one simulated run; it makes the loop of that run.

    seed               of everything: order, delays, faults, streams
    policy             what runs next: "uniform" (any), "pct" (priorities per task, which sometimes change), "fifo" (as
                       a live loop), "starve:<pattern>" (matching tasks only when nothing else is ready)
    fault_probability  0 for none. Each fault point is on in every second run, with a probability of its own up to this
    fault_names        only these points, and in every run; a mapping gives each its probability
    thread_delay_s     how long a job takes, drawn from [low, high]; `worker_delay_s` overrides it by worker's name
    """

    def __init__(
        self,
        seed: int,
        *,
        policy: str = "uniform",
        fault_probability: float = 0.0,
        fault_names: Collection[str] | None = None,
        thread_delay_s: tuple[float, float] = (0.0, 0.002),
        worker_delay_s: Mapping[str, tuple[float, float]] | None = None,
        max_callbacks: int = MAX_CALLBACKS,
        keep_trace: bool = False,
    ) -> None:
        super().__init__(seed)
        self.loop = SimLoop(seed, policy, max_callbacks, keep_trace)
        self.faults = FaultPoints(seed, fault_probability, fault_names)
        self._thread_delay_s = thread_delay_s
        self._worker_delay_s = dict(worker_delay_s or {})
        self._workers: dict[Worker, None] = {}
        self._wall_offset_s = START_WALL_S - START_S

    def now(self) -> float:
        return self.loop._now

    def now_ns(self) -> int:
        return round(self.loop._now * 1e9)

    def wall_time(self) -> float:
        """Follows virtual time.

        The fault point `env.wall_clock_jump` makes it jump by up to an hour.
        """
        if self.fault("env.wall_clock_jump"):
            self._wall_offset_s += self.random("env.wall_clock_jump").uniform(-3_600, 3_600)
        return self.loop.time() + self._wall_offset_s

    def worker(self, name: str, threads: int = 1) -> Worker:
        delay_s = self._worker_delay_s.get(name, self._thread_delay_s)
        worker = _SimWorker(name, threads, lambda closed: self._workers.pop(closed, None), self, delay_s)
        self._workers[worker] = None
        return worker

    def side_thread(self, name: str) -> SideThread:
        return _SimSideThread(name, self)

    def yield_to(self, name: str, own_cpu: int | None = None) -> None:
        pass

    def yield_this_thread(self) -> None:
        pass

    async def aclose(self) -> None:
        for worker in list(self._workers):
            await worker.aclose()
        self._pool = None

    def fault(self, name: str, probability: float | None = None) -> bool:
        strikes = self.faults.strikes(name, probability)
        if strikes:
            self.note("fault", name)
        return strikes

    def note(self, *fields: object) -> None:
        """Fields must be plain values: a `repr` with an address in it differs from run to run."""
        self.loop.note(repr(fields))


class JobHangs(BaseException):
    """Raised by a job of a simulated worker: it blocks for ever, as in a wait for a device that hangs."""


class JobBlocks(BaseException):
    """Raised by a job of a simulated worker: it blocks for so many seconds, and is then called again."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class _SimSideThread(SideThread):
    """A side thread whose jobs run at once, in `submit`. It may fail to start, as a worker's threads may."""

    def __init__(self, name: str, env: SimEnv) -> None:
        self._name, self._env = name, env
        self._has_started = False

    def submit(self, fn: Callable[[*Ts], T], *args: *Ts) -> Future[T]:
        self._has_started = self._has_started or _start(self._name, self._env)
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args))
        except BaseException as error:
            done.set_exception(error)
        return done


class _SimWorker(Worker):
    """A worker without threads.

    A job begins, in order, when one of `threads` is free; it takes a drawn delay and runs as a whole, on the loop, at
    the end of it. At the fault point `thread.start` its threads do not start.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        on_closed: Callable[[Any], object],
        env: SimEnv,
        delay_s: tuple[float, float],
    ) -> None:
        super().__init__(name, threads, on_closed)
        self._env = env
        self.delay_s = delay_s  # [least, most] of a job; may be changed during a run
        self._has_started = False
        self._num_running = 0
        self._all_ended: asyncio.Future[None] | None = None

    def start(self) -> None:
        self._has_started = self._has_started or _start(self.name, self._env)

    def _enqueue(self, fn: Callable[..., Any], args: tuple[Any, ...], when_done: WhenDone) -> Job:
        self.start()
        job = Job.of(self._env.loop, fn, args, self._waiting, when_done)
        self._env.loop.call_soon(self._begin_jobs)
        return job

    def deliver(self) -> None:
        """Does nothing: every result was reported when its job ended."""

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._all_ended = self._env.loop.create_future()
            for job in list(self._waiting):
                job.cancel()
            self._note_end()
        assert self._all_ended is not None
        await asyncio.shield(self._all_ended)
        self._on_closed(self)

    def _begin_jobs(self) -> None:
        while self._waiting and self._num_running < self._num_threads:
            job = next(iter(self._waiting))
            job.begin()
            self._num_running += 1
            delay_s = self._env.random(f"worker/{self.name}").uniform(*self.delay_s)
            self._env.loop.call_later(delay_s, self._run, job)

    def _run(self, job: Job) -> None:
        call = job.fn, job.args
        result, error = run_job(job)
        if isinstance(error, JobBlocks):
            job.fn, job.args = call
            self._env.loop.call_later(error.seconds, self._run, job)
            return
        if isinstance(error, JobHangs):
            return  # its thread is blocked from now on
        self._num_running -= 1
        if not job.done():  # else it was cancelled while it ran
            if error is None:
                job.set_result(result)
            else:
                job.set_exception(error)
        self._begin_jobs()
        self._note_end()

    def abandon(self) -> None:
        super().abandon()
        self._note_end()

    def _note_end(self) -> None:
        is_idle = not self._num_running or self._is_abandoned
        if self._all_ended is not None and is_idle and not self._all_ended.done():
            self._all_ended.set_result(None)


def _start(name: str, env: SimEnv) -> bool:
    if env.fault("thread.start"):
        raise ThreadNotStarted(f"millrace-{name}", RuntimeError("can't start new thread"))
    return True

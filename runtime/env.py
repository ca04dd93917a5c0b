"""Time, randomness and threads, injected. Stages reach them only through an `Env`, so the same code runs live
(`LiveEnv`) and under virtual time with a seeded order of everything (`SimEnv` in `simenv.py`).

This file knows clocks, threads and the event loop. It knows no stage and no channel.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import hashlib
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, ClassVar, Protocol, Self, TypeVar, TypeVarTuple

from .cpus import keep_off, lower_priority
from .side_thread import LiveSideThread, SideThread, name_of
from .streams import Streams
from .waking import LoopWaker

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

POOL_THREADS = 4  # of `run_in_thread`: file reads, template renders; a stage with steady work owns a Worker


class WorkerClosed(RuntimeError):
    """A job was submitted to a worker whose `aclose` has begun."""


class AskedTooLate(RuntimeError):
    """Somebody waits for what came of a job that was forgotten before."""


_TOO_LATE = "nobody had asked for this by when it was said that nobody would: ask before"


class Told(enum.Enum):
    """When the loop hears what came of a job. To be woken takes the interpreter lock, and a thread that goes on with
    its next job then waits for it: for all that the loop has to do, a millisecond a step of 16 streams."""

    AT_ONCE = enum.auto()
    BEFORE_WAITING = enum.auto()  # when the next job says `tell`, or ends, or there is none
    IF_ASKED = enum.auto()  # with the next that is told, or when somebody waits; an error nobody asks for is lost
    NEVER = enum.auto()  # nobody has asked in time, see `Worker.forget`


AT_ONCE, BEFORE_WAITING, IF_ASKED, NEVER = Told  # a member of an enum takes longer to find, and a step looks six times


class Worker(ABC):
    """An ordered queue of jobs, served by its own thread or threads.

    Jobs start in the order of `submit`; with one thread they also end in it. Cancelling the future of a job that has
    not begun removes the job; one that has begun runs to its end and its result is dropped.
    """

    def __init__(self, name: str, threads: int, on_closed: Callable[[Any], object]) -> None:
        if threads < 1:
            raise ValueError(f"worker {name!r}: threads = {threads}, needs at least 1")
        self.name = name
        self._num_threads = threads
        self._on_closed = on_closed
        self._waiting: dict[Job, bool] = {}
        self._is_closed = False

    def submit(self, fn: Callable[[*Ts], T], *args: *Ts, told: Told = AT_ONCE) -> asyncio.Future[T]:
        """Queues `fn(*args)`; call it on the loop. The future resolves on the loop, with whatever the job raised if it
        raised, be it a `BaseException` (a Rust panic is one). Raises `WorkerClosed` after `aclose`. A free thread may
        hear of the job at the loop's next turn only: who blocks the loop until it has begun may wait for ever."""
        if self._is_closed:
            raise WorkerClosed(f"worker {self.name!r} is closed: {name_of(fn)} was submitted too late")
        return self._enqueue(fn, args, told)

    @abstractmethod
    def _enqueue(self, fn: Callable[..., Any], args: tuple[Any, ...], told: Told) -> Job:
        """The job, which begins when a thread is free."""

    @abstractmethod
    def tell(self) -> None:
        """Called by a job that goes on without the interpreter lock: now is the time to tell what came of those before
        it."""

    def forget(self, result: asyncio.Future[Any]) -> None:
        """Of a job of this worker that is told if asked: if nobody has asked so far, what comes of it is not kept, and
        who asks when it has ended gets `AskedTooLate`, or the error that it has ended with. Called on the loop. What
        came of it before may be kept a while, and in simulation all of it is."""
        assert isinstance(result, Job), f"{result}: not a job"
        if result.told is IF_ASKED:
            result.told = NEVER

    @property
    def num_waiting(self) -> int:
        """Jobs that have not begun, cancelled ones not counted."""
        return len(self._waiting)

    @abstractmethod
    async def aclose(self) -> None:
        """Cancels the jobs that have not begun, waits for those that have, and ends the threads. The loop is never
        blocked. May be called again, also while a first call is under way."""


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
        self._handover = _Handover()
        self._workers: dict[_ThreadWorker, None] = {}
        self._side_threads: list[LiveSideThread] = []
        self._first: str | None = None  # the worker whose threads go first
        self._own_cpu: int | None = None  # of that one, or of whoever computes for it

    def secret(self, name: str, num_bytes: int) -> bytes:
        return os.urandom(num_bytes)  # a seed may be known: it is a setting, and 0 unless somebody says

    def worker(self, name: str, threads: int = 1) -> Worker:
        worker = _ThreadWorker(name, threads, self._handover, lambda closed: self._workers.pop(closed, None))
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


class Job(asyncio.Future[Any]):
    """A call and its future in one. It is waiting while it is a key of `waiting`; who pops it owns it, and as
    `dict.pop` is atomic neither the thread that begins a job nor the loop that cancels it needs a lock."""

    __slots__ = ("args", "fn", "is_hushed", "told", "waiting")

    fn: Callable[..., Any] | None
    args: tuple[Any, ...]
    waiting: dict[Job, bool]
    told: Told
    is_hushed: bool  # nobody has to ask for its error

    @classmethod
    def of(
        cls,
        loop: asyncio.AbstractEventLoop,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        waiting: dict[Job, bool],
        told: Told = AT_ONCE,
    ) -> Self:
        """`fn(*args)`, waiting. In the place of an `__init__`, which would take as long again as all of it."""
        job = cls(loop=loop)
        job.fn, job.args, job.waiting, job.told, job.is_hushed = fn, args, waiting, told, False
        waiting[job] = True
        return job

    def begin(self) -> bool:
        """Called by the thread: true if the job is still wanted, and from now on it runs."""
        return self.waiting.pop(self, False)

    def set_exception(self, exception: type | BaseException) -> None:
        super().set_exception(exception)
        if self.is_hushed or self.told is IF_ASKED or self.told is NEVER:
            self.exception()  # else it is logged that nobody asked

    def cancel(self, msg: Any | None = None) -> bool:
        is_cancelled = super().cancel(msg)
        if is_cancelled and self.waiting.pop(self, False):
            self.fn, self.args = None, ()  # its shell stays in the queue, what it holds need not
        return is_cancelled


class _QuietJob(Job):
    """One that is told if asked: who waits for it asks."""

    __slots__ = ("handover",)

    handover: _Handover

    def add_done_callback(self, fn: Callable[[Any], object], *, context: contextvars.Context | None = None) -> None:
        super().add_done_callback(fn, context=context)
        self.told = AT_ONCE
        self.handover.hurry()


class _Handover:
    """Results on their way from threads to the loop: one wake-up for all that are ready by the time it is served."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waker: LoopWaker | None = None
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._is_woken = False

    def bind(self) -> asyncio.AbstractEventLoop:
        """The loop that owns this env; the first caller's running loop becomes it."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise RuntimeError("this LiveEnv was first used on another event loop: make one LiveEnv per loop")
            self._loop = loop
        if self._waker is None:
            self._waker = LoopWaker(loop, self._deliver)
        return loop

    def close(self) -> None:
        """No thread has anything to tell any more. Binding it again opens it."""
        if self._waker is not None:
            self._waker.close()
            self._waker = None
            self._deliver()

    def put(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        """Called by threads, who `wake` the loop afterwards. NOTE: who waits for a quiet job changes how it is told,
        and looks here for it then; a thread puts it here, and looks then how it is told."""
        self._done.append((future, result, error))

    def wake(self) -> None:
        """Called by threads. NOTE: put before reading the flag, and `_deliver` clears it before popping; in this order
        no result is left behind."""
        if not self._is_woken:
            self._is_woken = True
            waker = self._waker
            if waker is not None:  # else the env is closed: nobody waits for results any more
                waker.wake()

    def hurry(self) -> None:
        """Called on the loop: what is there is waited for."""
        if self._done and not self._is_woken:
            assert self._loop is not None, "a result without a loop that asked for it"
            self._is_woken = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False
        while self._done:
            future, result, error = self._done.popleft()
            if future.done():  # cancelled while it ran
                continue
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)


class _ThreadWorker(Worker):
    """A worker with real threads. They are daemons: a process may end under a job that hangs."""

    def __init__(self, name: str, threads: int, handover: _Handover, on_closed: Callable[[Any], object]) -> None:
        super().__init__(name, threads, on_closed)
        self._handover = handover
        self._threads: dict[threading.Thread, asyncio.Future[None]] = {}  # with what resolves when the thread has ended
        self._jobs: deque[Job | None] = deque()  # None: a thread is to end
        self._calls: SimpleQueue[None] = SimpleQueue()  # to threads that have nothing to do: there are jobs
        self._is_call_due = False
        self._has_untold = False  # of its one thread: results that the loop was not woken for, and is to be
        self.on_start: Callable[[int], object] | None = None  # is called by each of its threads, with that one's id

    @property
    def native_ids(self) -> list[int]:
        """Of its threads that have started."""
        return [thread.native_id for thread in tuple(self._threads) if thread.native_id is not None]

    def _enqueue(self, fn: Callable[..., Any], args: tuple[Any, ...], told: Told) -> Job:
        loop = self._handover.bind()
        if told is IF_ASKED:
            quiet = _QuietJob.of(loop, fn, args, self._waiting, told)
            quiet.handover = self._handover
            job: Job = quiet
        else:
            job = Job.of(loop, fn, args, self._waiting, told if self._num_threads == 1 else AT_ONCE)
        self._jobs.append(job)
        if not self._threads:
            self._start(loop)
        if not self._is_call_due:
            self._is_call_due = True
            loop.call_soon(self._call)
        return job

    def _call(self) -> None:
        """Wakes threads for the jobs that none has taken yet. A turn of the loop later than they came: until then the
        loop has the interpreter lock, so a thread that is woken sooner only waits again, for that. Each wake-up takes
        the loop 8 us where the thread's core has gone idle (2 cores of an EPYC, in a virtual machine)."""
        self._is_call_due = False
        for _ in range(min(len(self._jobs), self._num_threads) - self._calls.qsize()):
            self._calls.put(None)

    def tell(self) -> None:
        if self._has_untold:
            self._has_untold = False
            self._handover.wake()

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            for job in list(self._waiting):
                job.cancel()
            self._jobs.extend(None for _ in self._threads)
            self._call()
        for thread, ended in list(self._threads.items()):
            await asyncio.shield(ended)
            thread.join()  # it has said its last word, so this is a matter of microseconds
        self._on_closed(self)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        for i in range(self._num_threads):
            name = f"millrace-{self.name}" if self._num_threads == 1 else f"millrace-{self.name}-{i}"
            ended: asyncio.Future[None] = loop.create_future()
            thread = threading.Thread(target=self._serve, args=(ended,), name=name, daemon=True)
            self._threads[thread] = ended
            thread.start()

    def _serve(self, ended: asyncio.Future[None]) -> None:
        if self.on_start is not None:
            self.on_start(threading.get_native_id())
        handover = self._handover
        while (job := self._next()) is not None:
            if job.begin():
                result, error = run_job(job)
                if job.told is NEVER and error is None:
                    result, error = None, AskedTooLate(_TOO_LATE)
                handover.put(job, result, error)
                del result, error
                if job.told is AT_ONCE:
                    self._has_untold = False
                    handover.wake()
                else:
                    self.tell()
                    self._has_untold = job.told is BEFORE_WAITING
            del job  # an idle thread must not keep the last job's arguments alive
            if self._has_untold and not self._jobs:
                self.tell()
        handover.put(ended, None, None)
        handover.wake()

    def _next(self) -> Job | None:
        """The job that has waited longest. NOTE: a call that comes when its job has gone is no harm; and one that was
        not taken yet is as good as a new one, as who takes it looks for jobs afterwards."""
        while True:
            try:
                return self._jobs.popleft()
            except IndexError:
                self._calls.get()


def run_job(job: Job) -> tuple[Any, BaseException | None]:
    """Runs the job that has begun: its result or its error. What a future refuses to carry is wrapped, and so is what
    would read as the cancellation of whoever waits."""
    assert job.fn is not None
    fn, args, job.fn, job.args = job.fn, job.args, None, ()
    try:
        return fn(*args), None
    except (StopIteration, asyncio.CancelledError) as error:
        wrapped = RuntimeError(f"{name_of(fn)} raised {type(error).__name__} in a worker thread")
        wrapped.__cause__ = error
        return None, wrapped
    except BaseException as error:  # KeyboardInterrupt and SystemExit too: the thread lives on, the awaiter decides
        return None, error

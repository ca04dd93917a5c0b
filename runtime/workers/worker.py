"""Workers: jobs in the order in which they were submitted, and what comes of them told to the event loop.

This file knows what a worker is and what a job is. It knows no thread: `thread_worker.py` serves jobs with real ones,
`runtime/simulation/env.py` with none.
"""

from __future__ import annotations

import asyncio
import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self, TypeVar, TypeVarTuple

from .side_thread import name_of

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class WorkerClosed(RuntimeError):
    """A job was submitted to a worker whose `aclose` has begun."""


class AskedTooLate(RuntimeError):
    """Somebody waits for what came of a job that was forgotten before."""


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

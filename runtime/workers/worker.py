"""The interface of workers: jobs run in order, and results are delivered to the event loop.

`thread_worker.py` implements it with real threads, `runtime/simulation/env.py` without any.
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


class ResultForgotten(RuntimeError):
    """The result of a job is awaited after it was dropped by `Worker.forget`."""


class WhenDone(enum.Enum):
    """When a job's result is delivered to the loop.

    Waking the loop gives it the interpreter lock. A thread that goes on with its next job then waits for all that the
    loop has to do: 1 ms per step with 16 streams.
    """

    IMMEDIATELY = enum.auto()
    BEFORE_BLOCKING = enum.auto()  # when the next job calls `tell` or ends, or there is no next job
    ON_REQUEST = enum.auto()  # with the next delivery, or when awaited; an error that is never awaited is dropped
    NEVER = enum.auto()  # dropped, see `Worker.forget`


IMMEDIATELY, BEFORE_BLOCKING, ON_REQUEST, NEVER = (
    WhenDone  # faster to look up than enum members; each step does so six times
)


class Worker(ABC):
    """An ordered queue of jobs, served by its own thread or threads.

    Jobs start in the order of `submit`; with one thread they also end in it. Cancelling the future of a job that has
    not begun removes the job. A job that has begun runs to its end, and its result is dropped.
    """

    def __init__(self, name: str, threads: int, on_closed: Callable[[Any], object]) -> None:
        if threads < 1:
            raise ValueError(f"worker {name!r}: threads = {threads}: must be at least 1")
        self.name = name
        self._num_threads = threads
        self._on_closed = on_closed
        self._waiting: dict[Job, bool] = {}
        self._is_closed = False
        self._is_abandoned = False

    def submit(self, fn: Callable[[*Ts], T], *args: *Ts, when_done: WhenDone = IMMEDIATELY) -> asyncio.Future[T]:
        """Queues `fn(*args)`. Call it on the loop.

        The future resolves on the loop with the result or the error, which may be any `BaseException` (a Rust panic is
        one). Raises `WorkerClosed` after `aclose`, and `ThreadNotStarted` while the system allows no thread; the job is
        not queued then. NOTE: a free thread may be woken only at the loop's next turn, so do not block the loop until
        the job has begun.
        """
        if self._is_closed:
            raise WorkerClosed(f"worker {self.name!r} is closed: {name_of(fn)} was submitted too late")
        return self._enqueue(fn, args, when_done)

    @abstractmethod
    def start(self) -> None:
        """Starts the threads now instead of at the first job. Raises `ThreadNotStarted` if there would be none.

        For the set-up of a stage that cannot fail later. May be called again.
        """

    @abstractmethod
    def _enqueue(self, fn: Callable[..., Any], args: tuple[Any, ...], when_done: WhenDone) -> Job:
        """Makes the job, which begins when a thread is free."""

    @abstractmethod
    def deliver(self) -> None:
        """Delivers the results of earlier jobs now.

        Called by a job that is about to release the interpreter lock.
        """

    def forget(self, result: asyncio.Future[Any]) -> None:
        """Drops the result of an `ON_REQUEST` job of this worker that is not awaited yet.

        A later await raises `ResultForgotten`, or the job's own error. Called on the loop. A result that came before
        may be kept for a while; in simulation all are kept.
        """
        assert isinstance(result, Job), f"{result}: not a job"
        if result.when_done is ON_REQUEST:
            result.when_done = NEVER

    def abandon(self) -> None:
        """Declares that a job may never end. Call it on the loop.

        `aclose` then does not wait for jobs that run. Their threads are daemons, so the process can end.
        """
        self._is_abandoned = True

    @property
    def num_waiting(self) -> int:
        """Jobs that have not begun, without cancelled ones."""
        return len(self._waiting)

    @abstractmethod
    async def aclose(self) -> None:
        """Cancels the jobs that have not begun, waits for the others, and ends the threads.

        Never blocks the loop. May be called again, also during a first call. See also `abandon`.
        """


class Job(asyncio.Future[Any]):
    """A call and its future in one. It waits while it is a key of `waiting`.

    A thread that begins it and the loop that cancels it pop it first; `dict.pop` is atomic, so neither needs a lock.
    """

    __slots__ = ("args", "fn", "is_error_ignored", "when_done", "waiting")

    fn: Callable[..., Any] | None
    args: tuple[Any, ...]
    waiting: dict[Job, bool]
    when_done: WhenDone
    is_error_ignored: bool  # an error that is never retrieved is not logged

    @classmethod
    def of(
        cls,
        loop: asyncio.AbstractEventLoop,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        waiting: dict[Job, bool],
        when_done: WhenDone = IMMEDIATELY,
    ) -> Self:
        """`fn(*args)` as a waiting job. Replaces an `__init__`, which would double the time."""
        job = cls(loop=loop)
        job.fn, job.args, job.waiting, job.when_done, job.is_error_ignored = fn, args, waiting, when_done, False
        waiting[job] = True
        return job

    def begin(self) -> bool:
        """Called by the thread. Returns whether the job was not cancelled; from then on it runs."""
        return self.waiting.pop(self, False)

    def set_exception(self, exception: type | BaseException) -> None:
        super().set_exception(exception)
        if self.is_error_ignored or self.when_done is ON_REQUEST or self.when_done is NEVER:
            self.exception()  # marks it as retrieved, so that asyncio does not log it

    def cancel(self, msg: Any | None = None) -> bool:
        is_cancelled = super().cancel(msg)
        if is_cancelled and self.waiting.pop(self, False):
            self.fn, self.args = None, ()  # the job stays in the queue, but its arguments are freed
        return is_cancelled


def run_job(job: Job) -> tuple[Any, BaseException | None]:
    """Runs a job that has begun, and returns its result and error.

    Errors that a future rejects, or that would look like a cancellation of the waiter, are wrapped.
    """
    assert job.fn is not None
    fn, args, job.fn, job.args = job.fn, job.args, None, ()
    try:
        return fn(*args), None
    except (StopIteration, asyncio.CancelledError) as error:
        wrapped = RuntimeError(f"{name_of(fn)} raised {type(error).__name__} in a worker thread")
        wrapped.__cause__ = error
        return None, wrapped
    except BaseException as error:  # also KeyboardInterrupt and SystemExit: the thread goes on, the waiter gets it
        return None, error

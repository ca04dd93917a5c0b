"""A thread that takes jobs from another thread, which fetches the results later.

It uses no event loop. Each step uses it twice, so it is cheap: a job is one lock, not a `Future`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple, cast

from .thread_start import ThreadNotStarted, start_thread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Ts = TypeVarTuple("Ts")


class Pending(Protocol[T_co]):
    """A job on another thread."""

    def result(self) -> T_co:
        """Waits for the job. Returns its result or raises its error. May be called again."""


class SideThread(ABC):
    """One thread that runs jobs from any thread, in the order of `submit`.

    For callers without an event loop.
    """

    @abstractmethod
    def submit(self, fn: Callable[[*Ts], T], *args: *Ts) -> Pending[T]:
        """Queues `fn(*args)`. Raises `ThreadNotStarted` while the system allows no thread; a later call tries again."""

    def submit_or_run(self, fn: Callable[[*Ts], T], *args: *Ts) -> Pending[T]:
        """As `submit`. While the system allows no thread, it runs the job in the caller's thread, before it returns."""
        try:
            return self.submit(fn, *args)
        except ThreadNotStarted:
            job: _Job[T] = _Job(fn, args)
            job.run(is_closed=False)
            return job


class SideThreadClosed(RuntimeError):
    """A job was not run, as its thread was closed."""


class LiveSideThread(SideThread):
    """A side thread with a real thread.

    It is a daemon, so a job that hangs does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_closed = False
        self._lock = threading.Lock()  # so that no job is queued after the end

    @property
    def is_used(self) -> bool:
        """Whether its thread was started, by a first job."""
        return self._thread is not None

    def submit(self, fn: Callable[[*Ts], T], *args: *Ts) -> Pending[T]:
        job: _Job[T] = _Job(fn, args)
        with self._lock:
            if self.is_closed:
                raise SideThreadClosed(f"side thread {self._name!r} is closed: {name_of(fn)} was submitted too late")
            if self._thread is None:
                thread = threading.Thread(target=self._serve, name=f"millrace-{self._name}", daemon=True)
                start_thread(thread)
                self._thread = thread  # only now: `close` waits for it
            self._jobs.put(job)
        return job

    def close(self) -> None:
        """Drops the jobs that have not begun, waits for the current one, and ends the thread."""
        with self._lock:
            self.is_closed = True
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run(self.is_closed)
            del job  # an idle thread must not keep the last job's arguments alive


class _Job(Generic[T]):
    """A job. Its lock is held until it is done."""

    __slots__ = ("_args", "_error", "_fn", "_is_under_way", "_value")

    def __init__(self, fn: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._fn: Callable[..., T] | None = fn
        self._args = args
        self._value: T | None = None
        self._error: BaseException | None = None
        self._is_under_way = threading.Lock()
        self._is_under_way.acquire()

    def run(self, is_closed: bool) -> None:
        assert self._fn is not None
        fn, args, self._fn, self._args = self._fn, self._args, None, ()
        try:
            if is_closed:
                raise SideThreadClosed(f"{name_of(fn)} was not run: its thread was closed")
            self._value = fn(*args)
        except BaseException as error:  # the thread goes on; `result` raises it
            self._error = error
        finally:
            self._is_under_way.release()

    def result(self) -> T:
        with self._is_under_way:
            if self._error is not None:
                raise self._error
            return cast(T, self._value)


def name_of(fn: Callable[..., Any]) -> str:
    """The name of a job in error messages."""
    return getattr(fn, "__qualname__", None) or repr(fn)

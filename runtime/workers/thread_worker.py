"""Workers with real threads, for the live env: how a job comes to a thread, and its result back to the loop.

This file knows threads and how the loop is woken. It knows no clock and no stage.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from .loop_waker import LoopWaker
from .worker import AT_ONCE, BEFORE_WAITING, IF_ASKED, NEVER, AskedTooLate, Job, Told, Worker, run_job

_TOO_LATE = "nobody had asked for this by when it was said that nobody would: ask before"


class _QuietJob(Job):
    """One that is told if asked: who waits for it asks."""

    __slots__ = ("handover",)

    handover: Handover

    def add_done_callback(self, fn: Callable[[Any], object], *, context: contextvars.Context | None = None) -> None:
        super().add_done_callback(fn, context=context)
        self.told = AT_ONCE
        self.handover.hurry()


class Handover:
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


class ThreadWorker(Worker):
    """A worker with real threads. They are daemons: a process may end under a job that hangs."""

    def __init__(self, name: str, threads: int, handover: Handover, on_closed: Callable[[Any], object]) -> None:
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

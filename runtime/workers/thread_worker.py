"""Workers with real threads, for the live env, and the delivery of results to the loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from .loop_waker import LoopWaker
from .thread_start import ThreadNotStarted, start_thread
from .worker import BEFORE_BLOCKING, IMMEDIATELY, NEVER, ON_REQUEST, Job, ResultForgotten, WhenDone, Worker, run_job

_TOO_LATE = "the result of this job was dropped, as nothing awaited it before the next phase: await it earlier"


class _QuietJob(Job):
    """A job whose result is delivered if awaited: a waiter hurries the delivery."""

    __slots__ = ("handover",)

    handover: Handover

    def add_done_callback(self, fn: Callable[[Any], object], *, context: contextvars.Context | None = None) -> None:
        super().add_done_callback(fn, context=context)
        self.when_done = IMMEDIATELY
        self.handover.hurry()


class Handover:
    """Passes results from threads to the loop, with one wakeup for all that are ready."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waker: LoopWaker | None = None
        self._done: deque[tuple[asyncio.Future[Any], Any, BaseException | None]] = deque()
        self._is_woken = False

    def bind(self) -> asyncio.AbstractEventLoop:
        """The loop that owns this env: the running loop of the first caller."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None:
                raise RuntimeError("this LiveEnv was first used on another event loop: make one LiveEnv per loop")
            self._loop = loop
        if self._waker is None:
            self._waker = LoopWaker(loop, self._deliver)
        return loop

    def close(self) -> None:
        """Ends the delivery, after a last one. `bind` opens it again."""
        if self._waker is not None:
            self._waker.close()
            self._waker = None
            self._deliver()

    def put(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        """Called by threads, which then `wake` the loop.

        NOTE: a waiter of a quiet job changes `when_done` and then reads this queue; a thread puts the result here and
        then reads `when_done`. In this order no result is missed.
        """
        self._done.append((future, result, error))

    def wake(self) -> None:
        """Called by threads.

        NOTE: `put` comes before reading the flag, and `_deliver` clears it before popping; in this order no result is
        left behind.
        """
        if not self._is_woken:
            self._is_woken = True
            waker = self._waker
            if waker is not None:  # else the env is closed, and results have no waiters
                waker.wake()

    def hurry(self) -> None:
        """Called on the loop when a result is awaited."""
        if self._done and not self._is_woken:
            assert self._loop is not None, "a result for an env that no loop has used"
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
    """A worker with real threads.

    They are daemons, so a job that hangs does not keep the process alive.
    """

    def __init__(self, name: str, threads: int, handover: Handover, on_closed: Callable[[Any], object]) -> None:
        super().__init__(name, threads, on_closed)
        self._handover = handover
        self._threads: dict[threading.Thread, asyncio.Future[None]] = {}  # with a future that resolves at its end
        self._jobs: deque[Job | None] = deque()  # None: a thread is to end
        self._calls: SimpleQueue[None] = SimpleQueue()  # wakes idle threads: there are jobs
        self._is_call_due = False
        self._has_untold = False  # with one thread: there are results for which the loop was not woken yet
        self.on_start: Callable[[int], object] | None = None  # called by each thread with its native id

    @property
    def native_ids(self) -> list[int]:
        """Native ids of its started threads."""
        return [thread.native_id for thread in tuple(self._threads) if thread.native_id is not None]

    def _enqueue(self, fn: Callable[..., Any], args: tuple[Any, ...], when_done: WhenDone) -> Job:
        loop = self._handover.bind()
        if when_done is ON_REQUEST:
            quiet = _QuietJob.of(loop, fn, args, self._waiting, when_done)
            quiet.handover = self._handover
            job: Job = quiet
        else:
            job = Job.of(loop, fn, args, self._waiting, when_done if self._num_threads == 1 else IMMEDIATELY)
        self._jobs.append(job)
        if len(self._threads) < self._num_threads:
            try:
                self._start(loop)
            except ThreadNotStarted:
                self._jobs.remove(job)
                job.cancel()
                raise
        if not self._is_call_due:
            self._is_call_due = True
            loop.call_soon(self._call)
        return job

    def _call(self) -> None:
        """Wakes threads for jobs that none has taken yet.

        One turn of the loop after the jobs came: until then the loop holds the interpreter lock, and a woken thread
        would only wait for it. Waking a thread on an idle core takes the loop 8 us.
        """
        self._is_call_due = False
        for _ in range(min(len(self._jobs), self._num_threads) - self._calls.qsize()):
            self._calls.put(None)

    def deliver(self) -> None:
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
            if not self._is_abandoned:
                thread.join()  # it has run its last job, so this takes microseconds
        self._on_closed(self)

    def abandon(self) -> None:
        super().abandon()
        for ended in self._threads.values():
            if not ended.done():
                ended.set_result(None)

    def start(self) -> None:
        loop = self._handover.bind()
        if len(self._threads) < self._num_threads:
            self._start(loop)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the missing threads. With some of them it works on; later jobs try again to start the others."""
        for i in range(len(self._threads), self._num_threads):
            name = f"millrace-{self.name}" if self._num_threads == 1 else f"millrace-{self.name}-{i}"
            ended: asyncio.Future[None] = loop.create_future()
            thread = threading.Thread(target=self._serve, args=(ended,), name=name, daemon=True)
            try:
                start_thread(thread)
            except ThreadNotStarted:
                if not self._threads:
                    raise
                return
            self._threads[thread] = ended  # only now: `aclose` waits for each of these

    def _serve(self, ended: asyncio.Future[None]) -> None:
        if self.on_start is not None:
            self.on_start(threading.get_native_id())
        handover = self._handover
        while (job := self._next()) is not None:
            if job.begin():
                result, error = run_job(job)
                if job.when_done is NEVER and error is None:
                    result, error = None, ResultForgotten(_TOO_LATE)
                handover.put(job, result, error)
                del result, error
                if job.when_done is IMMEDIATELY:
                    self._has_untold = False
                    handover.wake()
                else:
                    self.deliver()
                    self._has_untold = job.when_done is BEFORE_BLOCKING
            del job  # an idle thread must not keep the last job's arguments alive
            if self._has_untold and not self._jobs:
                self.deliver()
        handover.put(ended, None, None)
        handover.wake()

    def _next(self) -> Job | None:
        """The oldest job. NOTE: a call may come after its job was taken, which is harmless.

        A call that was not taken yet serves as a new one, as a woken thread then takes jobs until there are none.
        """
        while True:
            try:
                return self._jobs.popleft()
            except IndexError:
                self._calls.get()

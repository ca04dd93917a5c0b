"""Threads for the work on bodies and prompts, in which short jobs pass long ones."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

from ...runtime.workers.thread_start import ThreadPool

T = TypeVar("T")
Job = tuple[float, int, Future[Any], Callable[[], Any]]  # its place in the queue, number, result, and function

LONG_BYTES = 64 * 1024  # of the text that a job reads: 20 ms to tokenize
BYTES_PER_S = 1 << 20  # a shorter job passes a longer one that came earlier by less than their difference at this pace


class SizedThreads(Executor):
    """Two threads for short jobs, in order of arrival, and one for jobs of at least `LONG_BYTES`.

    A long job waits for every shorter one that came soon after it, but for none that came much later.
    """

    def __init__(self, name: str) -> None:
        self._short = ThreadPool(2, thread_name_prefix=name)
        self._long = ThreadPool(1, thread_name_prefix=f"{name}-long")
        self._waiting: list[Job] = []  # a heap of long jobs
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """A short job."""
        return self._short.submit(fn, *args, **kwargs)

    def submit_sized(self, num_bytes: int, fn: Callable[..., T], *args: Any) -> Future[T]:
        """A job that reads `num_bytes` of text."""
        if num_bytes < LONG_BYTES:
            return self._short.submit(fn, *args)
        future: Future[T] = Future()
        job: Job = (time.monotonic() + num_bytes / BYTES_PER_S, next(self._numbers), future, partial(fn, *args))
        with self._lock:
            heapq.heappush(self._waiting, job)
        try:
            self._long.submit(self._run_first)
        except RuntimeError:  # no thread can be started, or it is shut down
            with self._lock:
                self._waiting.remove(job)
                heapq.heapify(self._waiting)
            raise
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._short.shutdown(wait, cancel_futures=cancel_futures)
        self._long.shutdown(wait, cancel_futures=cancel_futures)
        if cancel_futures:
            with self._lock:
                waiting, self._waiting = self._waiting, []
            for _, _, future, _ in waiting:
                future.cancel()

    def _run_first(self) -> None:
        """Runs one job. Called once for each."""
        with self._lock:
            if not self._waiting:
                return  # cancelled
            _, _, future, run = heapq.heappop(self._waiting)
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = run()
        except BaseException as error:  # the caller's, as in a ThreadPoolExecutor
            future.set_exception(error)
        else:
            future.set_result(result)


async def run_sized(threads: Executor, num_bytes: int, fn: Callable[..., T], *args: Any) -> T:
    """The result of `fn(*args)`, which reads `num_bytes` of text, from a thread."""
    if isinstance(threads, SizedThreads):
        return await asyncio.wrap_future(threads.submit_sized(num_bytes, fn, *args))
    return await asyncio.get_running_loop().run_in_executor(threads, fn, *args)

"""Children that the kernel ends with their parent, in whatever state they are: also one that is stopped."""

from __future__ import annotations

import ctypes
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ..workers.thread_start import start_thread

T = TypeVar("T")

SET_DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


class LastingStarter:
    """A thread that starts children, and lives until `close` or the end of its process.

    NOTE: to the kernel a child's parent is the thread that started it. One of a pool may end long before the process.
    """

    def __init__(self) -> None:
        """Raises `ThreadNotStarted`."""
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="millrace-starter", daemon=True)
        start_thread(self._thread)

    def start(self, make: Callable[[], T]) -> T:
        """What `make` returns or raises, called on the thread."""
        made: Future[T] = Future()
        self._calls.put((make, made))
        return made.result()

    def close(self) -> None:
        """Ends the thread, and with it all children that called `end_with_starter` and still live."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            make, made = call
            try:
                made.set_result(make())
            except BaseException as error:
                made.set_exception(error)


def end_with_starter() -> None:
    """Has the kernel kill this process when the thread that started it ends. Does nothing but on Linux.

    A parent that has ended before is found by `end_with_parent` of `child.py`.
    """
    _at_end_of_starter(signal.SIGKILL)


def continue_with_starter() -> None:
    """As `end_with_starter`, for a process that ends by itself once its link does: it is continued if it is stopped."""
    _at_end_of_starter(signal.SIGCONT)


def _at_end_of_starter(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, number, 0, 0, 0)

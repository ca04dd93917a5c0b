"""Starting threads, and the error where the system allows no more of them.

A thread that did not start is recorded nowhere, so nothing waits for it.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

_REFUSED = "can't start new thread"  # Python's words


class ThreadNotStarted(RuntimeError):
    """The system allows no further thread now. A later try may succeed."""

    def __init__(self, name: str, cause: BaseException) -> None:
        super().__init__(
            f"thread {name} cannot be started ({cause}): this process has {threading.active_count()} threads; raise "
            "the limit of threads (ulimit -u, or pids.max of the container) or end other processes"
        )


def start_thread(thread: threading.Thread) -> None:
    """Starts `thread`. Raises `ThreadNotStarted` if the system refuses."""
    try:
        thread.start()
    except (RuntimeError, OSError, MemoryError) as error:
        raise ThreadNotStarted(thread.name, error) from error


def is_thread_shortage(error: BaseException) -> bool:
    """Whether `error` says that no thread could be started, here or in a library."""
    return isinstance(error, ThreadNotStarted) or (isinstance(error, RuntimeError) and _REFUSED in str(error))


class ThreadPool(ThreadPoolExecutor):
    """An executor that works with fewer threads where the system allows no more.

    Without any thread, `submit` raises `ThreadNotStarted` and drops the job; the next call tries again.
    """

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except (RuntimeError, OSError, MemoryError) as error:
            if self._threads:
                return  # one of these takes the job
            item = self._work_queue.get_nowait()  # `submit` has just queued it: it must not run at a later call
            if item is not None:
                item.future.cancel()
            raise ThreadNotStarted(f"{self._thread_name_prefix}_0", error) from error

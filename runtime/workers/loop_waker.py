"""Wakes an event loop from another thread without releasing the interpreter lock.

`call_soon_threadsafe` releases the lock to write a byte. An idle loop wakes at that byte and takes the lock; the
calling thread then waits until the loop has done all that follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import weakref
from collections.abc import Callable

ONE = (1).to_bytes(8, "little")


class LoopWaker:
    """Calls `call()` on a loop after `wake`. Several calls of `wake` before that need only one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        self._loop, self._call = loop, call
        self._file: int | None = None  # an eventfd that the loop watches; None: the system has none
        if hasattr(os, "eventfd"):
            self._file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # NOTE: not in `close`, as a thread may still call `wake`; nor at exit, while daemon threads run on
            weakref.finalize(self, os.close, self._file).atexit = False
            self._write = ctypes.PyDLL(None).write  # unlike os.write and CDLL, it keeps the interpreter lock
            loop.add_reader(self._file, self._on_woken)

    def wake(self) -> None:
        """Called by any thread. Does nothing after `close` or once the loop is closed."""
        if self._file is not None:
            self._write(self._file, ONE, len(ONE))
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._call)

    def close(self) -> None:
        """Stops listening. Called on the loop."""
        if self._file is not None:
            self._loop.remove_reader(self._file)

    def _on_woken(self) -> None:
        assert self._file is not None
        os.eventfd_read(self._file)
        self._call()

"""Wakes an event loop from another thread, which keeps the interpreter lock meanwhile.

`call_soon_threadsafe` lets go of it to write a byte. On an idle loop that byte is what it waits for: it takes the lock,
and the thread that only wanted to say something stands still until the loop has done all that follows.
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
    """Calls `call()` on a loop, after each `wake`; once for all those that it did not come to in between."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        self._loop, self._call = loop, call
        self._file: int | None = None  # an eventfd that the loop looks at; None: the system has none
        if hasattr(os, "eventfd"):
            self._file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            # NOTE: not sooner, as a late thread may still wake; nor at exit, while threads that nobody waits for run on
            weakref.finalize(self, os.close, self._file).atexit = False
            self._write = ctypes.PyDLL(None).write  # unlike os.write and CDLL, it keeps the lock
            loop.add_reader(self._file, self._on_woken)

    def wake(self) -> None:
        """Called by any thread. Once the loop is closed, or this is, nothing."""
        if self._file is not None:
            self._write(self._file, ONE, len(ONE))
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._call)

    def close(self) -> None:
        """Called on the loop, which listens no more."""
        if self._file is not None:
            self._loop.remove_reader(self._file)

    def _on_woken(self) -> None:
        assert self._file is not None
        os.eventfd_read(self._file)
        self._call()

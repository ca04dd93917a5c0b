"""Limits of this process, as `ulimit` shows them: memory that is left, files that it may open, and errors at them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import sys
from pathlib import Path

from .cgroups import read

LIMIT_FLAGS = "ulimit -v or -d"
WANTED_FILES = 65_536
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# name in /proc/self/limits -> the column of /proc/self/statm that counts against it, in pages
MEMORY_LIMITS = {"Max address space": 0, "Max data size": 5}


def address_space_left(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process may still map, by `ulimit -v` and `ulimit -d`; None: no limit.

    Never negative.
    """
    used = [int(pages) * PAGE_BYTES for pages in read(root / "proc/self/statm").split()]
    left = []
    for line in read(root / "proc/self/limits").splitlines():
        for name, column in MEMORY_LIMITS.items():
            soft = line.removeprefix(name).split()[0] if line.startswith(name) else ""
            if soft.isdigit() and column < len(used):
                left.append(max(0, int(soft) - used[column]))
    return min(left, default=None)


def give_back_freed_memory() -> None:
    """Returns freed memory of the C heap to the system, where the C library can: it keeps it for itself otherwise."""
    with contextlib.suppress(AttributeError, OSError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)


def open_files() -> int:
    """The number of files that this process may open, sockets included."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> int:
    """Raises the number of files that this process may open to `WANTED_FILES`, if this user may. Returns the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return open_files()


def resource_problem(error: BaseException) -> str | None:
    """What this process could not get, and what to do, if that is what `error` or one of its causes says; else None."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if (problem := _problem_of(cause)) is not None:
            return problem
        cause = cause.__cause__ or cause.__context__
    return None


def _problem_of(error: BaseException) -> str | None:
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or _is_mapping_problem(error, text):
        return f"there is not enough memory{f' ({text})' if text else ''}: {_more_memory()}"
    if number in (errno.EMFILE, errno.ENFILE):
        return f"no more files can be opened ({text}): this process may open {open_files()}; raise that with ulimit -n"
    if isinstance(error, RuntimeError) and "start new thread" in text:
        return f"no thread can be started: {_more_memory()}; or raise ulimit -u, or the container's limit of processes"
    return None


def _is_mapping_problem(error: BaseException, text: str) -> bool:
    return isinstance(error, ImportError | OSError) and ("map segment" in text or "llocate memory" in text)


def _more_memory() -> str:
    left = address_space_left()
    if left is None:
        return "free memory, or raise the container's memory limit"
    return f"this process may map {left >> 20} MiB more; raise that with {LIMIT_FLAGS}"

"""The child's side of `helper_pool.py`: frames in, frames out, and the limits of each job. Loads little, to start
fast."""

from __future__ import annotations

import contextlib
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO


def serve(load: Callable[[bytes], Callable[[bytes], bytes]], cpu_s: float, memory_bytes: int) -> None:
    """A child's life: `load` makes of the opening what answers questions, until there are no more.

    A job that takes more than `cpu_s` of CPU ends the process; `memory_bytes` is what it may take beyond what is there
    after loading, and then memory runs out.
    """
    source, target = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = load(_read(source) or b"")
    _limit_memory(memory_bytes)
    _write(target, b"")
    while (question := _read(source)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        made = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(target, made)


def _limit_memory(num_bytes: int) -> None:
    """Where the system says how much there is; elsewhere the limit on time stands alone."""
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _read(source: BinaryIO) -> bytes | None:
    header = source.read(4)
    if len(header) < 4:
        return None
    (size,) = struct.unpack("<I", header)
    frame = source.read(size)
    return frame if len(frame) == size else None


def _write(target: BinaryIO, frame: bytes) -> None:
    target.write(struct.pack("<I", len(frame)) + frame)
    target.flush()

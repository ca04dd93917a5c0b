"""The child's side of `helper_pool.py`: frames in, frames out, and limits per job.

Imports little, to start fast.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import BinaryIO

from .oom_score import HELPER, raise_oom_score


def serve(load: Callable[[bytes], Callable[[bytes], bytes]], cpu_s: float, memory_bytes: int) -> None:
    """Answers requests until the input ends.

    `load` makes the answering function from the first frame.

    A job that takes more than `cpu_s` of CPU time ends the process. A job may take `memory_bytes` beyond the memory
    used after loading; then allocation fails.
    """
    raise_oom_score(HELPER)
    source, target = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
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
    """Limits memory where /proc says how much is in use; elsewhere only the time limit applies."""
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

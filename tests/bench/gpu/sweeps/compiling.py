"""Candidates tried in processes beside each other, before any is timed: compiling takes longer than all the timing.

A process has one job at a time, so that whatever becomes of it is known by the job's name: it may raise, end its
process, lose its device or never return, and the others go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from tests.bench.gpu.place import is_device_lost, why

Key = TypeVar("Key")
Job = TypeVar("Job")


def compile_all(
    jobs: Mapping[Key, Job], compile_one: Callable[[Job], object], num_processes: int, end_s: float
) -> dict[Key, str]:
    """What went wrong with each job that has begun, by its key: nothing, "", if it works. Jobs begin in their order.
    Those under way at `end_s` of the monotonic clock are given up, and that is wrong with them."""
    waiting, said = deque(jobs.items()), dict[Key, str]()
    if time.monotonic() >= end_s:
        return said
    idle = [_Process.started(compile_one) for _ in range(min(num_processes, len(jobs)))]
    busy: dict[Any, tuple[_Process, Key, float]] = {}  # by pipe: whose it is, with which job, and since when
    try:
        while busy or waiting:
            while idle and waiting and time.monotonic() < end_s:
                process, (key, job) = idle.pop(), waiting.popleft()
                process.give(job)
                busy[process.pipe] = process, key, time.monotonic()
            ready = connection.wait(list(busy), max(0.0, end_s - time.monotonic()))
            if not ready:
                late = {key: f"not done after {time.monotonic() - since_s:.1f} s" for _, key, since_s in busy.values()}
                return said | late
            for pipe in ready:
                process, key, _ = busy.pop(pipe)
                said[key], goes_on = process.answer()
                if not goes_on:
                    process.stop()
                    process = _Process.started(compile_one)
                idle.append(process)
    finally:
        for process in (*idle, *(process for process, _, _ in busy.values())):
            process.stop()
    return said


@dataclass(frozen=True, slots=True, eq=False)
class _Process:
    """Answers one job after the other."""

    process: BaseProcess
    pipe: Connection

    @classmethod
    def started(cls, compile_one: Callable[[Any], object]) -> _Process:
        spawning = get_context("spawn")  # a CUDA context does not survive a fork
        here, there = spawning.Pipe()
        process = spawning.Process(target=_answer_jobs, args=(there, compile_one), daemon=True)
        process.start()
        there.close()
        return cls(process, here)

    def give(self, job: object) -> None:
        with suppress(BrokenPipeError):  # it has ended already, which `answer` will find
            self.pipe.send(job)

    def answer(self) -> tuple[str, bool]:
        """What went wrong with the job, if anything, and whether the process takes another."""
        try:
            said, goes_on = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return f"its process ended with status {self.process.exitcode}", False
        return said, goes_on

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _answer_jobs(pipe: Connection, compile_one: Callable[[Any], object]) -> None:
    with suppress(EOFError, BrokenPipeError):  # the process that gave jobs is gone
        while True:
            job, said = pipe.recv(), ""
            try:
                compile_one(job)
            except Exception as error:  # a candidate that does not work is not one
                said = why(error)
            pipe.send((said, not (said and is_device_lost())))

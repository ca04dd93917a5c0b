"""Runs parts within a budget: each in a process that it may share with its neighbours, each with a limit of its own.

A part may take its limit, and what those before it have left, but nothing that is promised to those behind it; twice
its limit at the most. One that raises, ends its process or takes longer is told of, and the next one begins, in another
process if need be. While a process runs parts, the next one already imports what it will need.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tests.bench.gpu.timed_run import health
from tests.bench.gpu.timed_run.parts import Part
from tests.bench.gpu.timed_run.rows import RowFile

ROOT = Path(__file__).parents[4]
LOG = "log.txt"  # what the processes print
END_S = 2.0  # between what a part is told of its end and its end
POLL_S = 0.2


class Options(Protocol):
    """What the command line says."""

    out: Path
    seed: int
    dry: bool
    only: list[str]


class Worker:
    """A process that takes one part at a time."""

    def __init__(self, options: Options, began_s: float, warm: Sequence[str], environment: dict[str, str]) -> None:
        command = [sys.executable, "-m", "tests.bench.gpu.timed_run.worker", "--out", str(options.out)]
        command += ["--seed", str(options.seed), "--began", str(began_s)] + ["--dry"] * options.dry
        command += [argument for module in warm for argument in ("--warm", module)]
        command += [argument for name in options.only for argument in ("--only", name)]
        with (options.out / LOG).open("ab") as log:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True
            )
        self._answers = selectors.DefaultSelector()
        self._answers.register(self._pipe, selectors.EVENT_READ)

    @property
    def _pipe(self) -> BinaryIO:
        assert self.process.stdout is not None
        return self.process.stdout  # type: ignore[return-value]

    def give(self, part: Part, end_s: float) -> None:
        job = {"part": part.name, "function": part.function, "end_s": end_s - END_S, "has_place": part.has_place}
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which `answer` will find
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """None if there is none yet. Raises EOFError if there will be none."""
        if not self._answers.select(timeout_s):
            return None
        line = self._pipe.readline()  # an answer is one short write, so whole
        if not line.endswith(b"\n"):
            raise EOFError
        said: dict[str, Any] = json.loads(line)
        return said

    def kill(self) -> int:
        """Ends it and what it has started; its exit status."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self._answers.close()
            for pipe in (self.process.stdin, self.process.stdout):
                with suppress(BrokenPipeError):
                    assert pipe is not None
                    pipe.close()
        return self.process.wait()


class Conductor:
    """One run."""

    def __init__(self, parts: Sequence[Part], options: Options, budget_s: float, warm: Sequence[str]) -> None:
        self.parts, self.options, self.budget_s = list(parts), options, budget_s
        self.began_s = time.monotonic()
        self.end_s = self.began_s + budget_s
        self.rows = RowFile(options.out, self.began_s)
        self._warm = warm
        self._worker: Worker | None = None
        self._group = ""  # of the worker
        self._standby: Worker | None = None
        self._beside: dict[str, tuple[Worker, float, float]] = {}  # by part: when it began, and must end

    def run(self) -> None:
        """Runs all parts. Whatever happens, no process is left."""
        try:
            for index, part in enumerate(self.parts):
                self._run_part(part, self.parts[index + 1 :])
            for name in list(self._beside):
                self._await_beside(name)
        finally:
            for worker in (self._worker, self._standby, *(each[0] for each in self._beside.values())):
                if worker is not None:
                    worker.kill()
            health.wait()
            self.rows.write("run", "end", round(time.monotonic() - self.began_s, 1))

    def _run_part(self, part: Part, later: Sequence[Part]) -> None:
        for name in part.after:
            self._await_beside(name)
        left_s = self.end_s - time.monotonic()
        if left_s < part.least_s:
            self.rows.write(
                part.name, "skipped", f"{left_s:.0f} s are left of {self.budget_s:g}, it takes {part.least_s:g}"
            )
            return
        free_s = left_s - sum(each.limit_s for each in later if not each.is_beside)
        limit_s = min(left_s, max(part.limit_s, min(free_s, 2 * part.limit_s)))
        began_s = time.monotonic()
        self.rows.write(part.name, "began", round(limit_s, 1))
        if part.is_beside:
            worker = Worker(self.options, self.began_s, (), self._environment(part))
            self._beside[part.name] = worker, began_s, began_s + limit_s
            worker.give(part, began_s + limit_s)
            return
        if self._worker is None or part.group != self._group:
            self._change_worker(part, later)
        assert self._worker is not None
        self._worker.give(part, began_s + limit_s)
        while (goes_on := self._ended(part.name, self._worker, began_s, began_s + limit_s)) is None:
            pass
        if not goes_on:
            self._worker = None
        if not self.options.dry:
            health.note(self.rows, part.name)

    def _change_worker(self, part: Part, later: Sequence[Part]) -> None:
        """The memory of the one before is free when the next one begins."""
        if self._worker is not None:
            self._worker.kill()
        self._worker = self._standby or Worker(self.options, self.began_s, self._warm, self._environment(part))
        self._group, self._standby = part.group, None
        if any(each.group != part.group and not each.is_beside for each in later):
            self._standby = Worker(self.options, self.began_s, self._warm, self._environment(part))

    def _await_beside(self, name: str) -> None:
        while name in self._beside:
            worker, began_s, end_s = self._beside[name]
            if self._ended(name, worker, began_s, end_s) is not None:
                worker.kill()
                del self._beside[name]

    def _ended(self, part: str, worker: Worker, began_s: float, end_s: float) -> bool | None:
        """Whether its process goes on; None: it has not ended yet."""
        try:
            answer = worker.answer(min(POLL_S, max(0.0, end_s - time.monotonic())))
        except EOFError:
            self.rows.write(part, "failed", f"its process ended with status {worker.kill()}")
            return False
        took_s = round(time.monotonic() - began_s, 1)
        if answer is not None:
            self.rows.write(part, "ended", took_s)
            return bool(answer["goes_on"])
        if time.monotonic() < end_s:
            return None
        worker.kill()
        self.rows.write(part, "stopped", f"after {took_s:g} s")
        return False

    def _environment(self, part: Part) -> dict[str, str]:
        """Kernels that one process has compiled are there for all. Compiling itself needs no interpreter.

        They are thousands of files, so not beside the results: a lent machine gives back few files.
        """
        folder = self.options.out.resolve() if self.options.dry else ROOT / "build"
        environment = dict(os.environ) | {"TRITON_CACHE_DIR": str(folder / "triton"), "PYTHONUNBUFFERED": "1"}
        if self.options.dry:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0" if part.is_beside else "1"}
            environment["OMP_NUM_THREADS"] = "1"  # its matrices are tiny
        return environment

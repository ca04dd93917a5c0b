"""The processes of a fleet under chaos: each ends with this process, whatever happens to it."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ....stages.errors import NotStartedError

START_S = 600.0  # also on a machine that is busy, or stands still for a while
PR_SET_PDEATHSIG = 1
LAST_LINES = 20  # of a log, for the error of a process that did not start


def make_preexec() -> Callable[[], None] | None:
    """What a child runs first: the system kills it when this process ends. None where there is no such thing."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    return die_with_parent


class FleetMember:
    """One process of the fleet, and those that replace it. Their logs lie in one folder, a file each.

    `command` is what `millrace` is told; `environment` is added to that of this process, without its settings.
    """

    def __init__(
        self, name: str, command: Sequence[str], logs: Path, environment: dict[str, str] | None = None
    ) -> None:
        self.name, self.command, self._logs = name, list(command), logs
        self.environment = {key: value for key, value in os.environ.items() if not key.startswith("MILLRACE_")}
        self.environment |= environment or {}
        self._preexec = make_preexec()
        self.process: asyncio.subprocess.Process | None = None
        self.ready: dict[str, Any] = {}  # its ready line
        self.log_files: list[Path] = []
        self.old: list[asyncio.subprocess.Process] = []  # that were replaced; they may live on for a while
        self.num_starts = 0
        self.killed: set[int] = set()  # process ids that were sent SIGKILL

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """Starts a process in place of the last one, and waits until it is ready. Raises `NotStartedError`."""
        if self.is_alive:
            assert self.process is not None
            self.old.append(self.process)
        process, ready = await self._launch()
        self.process, self.ready = process, ready

    async def _launch(self) -> tuple[asyncio.subprocess.Process, dict[str, Any]]:
        path = self._logs / f"{self.name}-{self.num_starts}.log"
        self.num_starts += 1
        self.log_files.append(path)
        with path.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "millrace.deploy", *self.command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=self.environment,
                start_new_session=True,
                preexec_fn=self._preexec,
            )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
        except BaseException as error:
            _kill_group(process.pid)
            if isinstance(error, TimeoutError):
                raise NotStartedError(f"{self.name} was not ready in {START_S:g} s") from None
            raise
        if not line:
            _kill_group(process.pid)
            last = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
            raise NotStartedError("\n  ".join([f"{self.name} did not start:", *last]))
        return process, json.loads(line)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the process, if it lives."""
        assert self.process is not None
        if number is signal.SIGKILL:
            self.killed.add(self.process.pid)
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def limit_files(self, num_bytes: int | None) -> None:
        """No file of the process may grow beyond this, as if the disk were full; None: no limit again."""
        if hasattr(resource, "prlimit"):
            hard = resource.RLIM_INFINITY
            with suppress(ProcessLookupError):
                resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))

    def end_all(self) -> None:
        """Kills all its processes, and those that they started."""
        for process in (*self.old, *([] if self.process is None else [self.process])):
            _kill_group(process.pid)

    def left_over(self) -> list[int]:
        """Process groups of which a process is left."""
        pids = [process.pid for process in (*self.old, *([] if self.process is None else [self.process]))]
        return [pid for pid in pids if _has_group(pid)]


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _has_group(pid: int) -> bool:
    try:
        os.killpg(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True

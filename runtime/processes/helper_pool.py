"""A pool of child processes for expensive jobs.

Each job has limits; a child that exceeds them is replaced.

The child reads frames from its standard input and writes one answer for each to its standard output;
`helper_child.py` is its side.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextvars import Context

from ..env.log import get_logger
from .helper_watch import HelperStuck, HelperWatch

PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "TMPDIR", "LANG")  # no keys, no settings
MAX_ANSWER_BYTES = 1 << 20
START_IDLE_S = 30.0  # as `idle_s`, while a child loads and reads the opening

log = get_logger("millrace.runtime")


class HelperDied(Exception):
    """The child ended before it answered.

    `signal` is the number of the signal that ended it, or None.
    """

    def __init__(self, signal_number: int | None) -> None:
        super().__init__(f"a helper process ended, signal {signal_number}")
        self.signal = signal_number

    @property
    def is_over_cpu(self) -> bool:
        """Whether a job used up its time."""
        return self.signal == signal.SIGPROF

    @property
    def is_crash(self) -> bool:
        """Whether the job itself ended the process: out of memory, or a crash.

        A kill from outside does not count.
        """
        return self.signal in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL)


class HelperNotStarted(Exception):
    """The system allows no further process now, or no files for it. A later try may succeed."""


class HelperPool:
    """A few children that run `python -m <module>`, started on demand and replaced at their end.

    `opening` is the first frame that each gets. `ask` serves its callers in order, one per child. Cancelling a caller
    ends its child. Belongs to one event loop. A child limits the CPU time of its jobs; here `HelperWatch` ends a job
    that does nothing for `idle_s`.
    """

    def __init__(self, module: str, opening: bytes, num: int = 1, idle_s: float = 10.0) -> None:
        self.idle_s = idle_s
        self._module = module
        self._opening = opening
        self._idle: list[_Helper] = []
        self._permits = asyncio.Semaphore(num)
        self._refills: set[asyncio.Task[None]] = set()
        self._all: set[_Helper] = set()
        self._is_closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return sorted(helper.process.pid for helper in self._all)

    async def ask(self, question: bytes) -> bytes:
        """The child's answer to `question`.

        A job whose child ends after the machine stood still is tried once more: a suspended machine may count that time
        as CPU time of the child. Raises `HelperDied` if the child ends first, `HelperStuck`, and `HelperNotStarted`.
        """
        async with self._permits:
            helper = await self._take()
            try:
                return await self._answer(helper, question)
            except HelperDied:
                if not helper.stood_still:
                    raise
                log.warning("helper.tried_again", module=self._module)
            return await self._answer(await self._take(), question)

    async def _answer(self, helper: _Helper, question: bytes) -> bytes:
        is_well = False
        try:
            answer = await helper.ask(question, self.idle_s)
            is_well = True
            return answer
        finally:
            if is_well:
                self._idle.append(helper)
            else:
                self._replace(helper)

    async def _take(self) -> _Helper:
        while not self._idle and self._refills:
            await asyncio.wait(self._refills, return_when=asyncio.FIRST_COMPLETED)
        return self._idle.pop() if self._idle else await self._start()

    async def aclose(self) -> None:
        """Ends the children, with or without jobs."""
        self._is_closed = True
        for task in list(self._refills):
            task.cancel()
        await asyncio.gather(*self._refills, return_exceptions=True)
        for helper in list(self._all):
            await self._end(helper)
        self._idle.clear()

    def _replace(self, helper: _Helper) -> None:
        # NOTE: not in the context of the request whose job ended the helper, which would mark the log lines
        task = asyncio.get_running_loop().create_task(self._refill(helper), context=Context())
        self._refills.add(task)
        task.add_done_callback(self._refills.discard)

    async def _refill(self, ended: _Helper) -> None:
        await self._end(ended)
        if not self._is_closed:
            try:
                self._idle.append(await self._start())
            except (HelperDied, HelperStuck, HelperNotStarted) as error:  # `ask` tries again
                log.error("helper.failed", module=self._module, error=str(error))

    async def _start(self) -> _Helper:
        if self._is_closed:
            raise HelperDied(None)
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        command = (sys.executable, "-P", "-m", self._module)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment
            )
        except (OSError, RuntimeError, MemoryError) as error:  # asyncio's own loop starts a thread for each child
            raise HelperNotStarted(f"{self._module} cannot be started: {error}") from error
        helper = _Helper(process)
        self._all.add(helper)
        try:
            await helper.ask(self._opening, START_IDLE_S)
        except BaseException:
            await self._end(helper)
            raise
        log.debug("helper.started", module=self._module, pid=process.pid)
        return helper

    async def _end(self, helper: _Helper) -> None:
        self._all.discard(helper)
        with contextlib.suppress(ProcessLookupError):
            helper.process.kill()
        assert helper.process.stdin is not None
        helper.process.stdin.close()
        try:
            await helper.process.wait()
        except asyncio.CancelledError:  # it was killed, so this wait is short
            await helper.process.wait()
            raise


class _Helper:
    """One child."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.stood_still = False  # this process did, during the last job

    async def ask(self, question: bytes, idle_s: float) -> bytes:
        """The answer. Raises `HelperDied`, and `HelperStuck`."""
        watch = HelperWatch(self.process.pid, idle_s)
        try:
            async with watch:
                return await self._ask(question)
        finally:
            self.stood_still = watch.stood_still

    async def _ask(self, question: bytes) -> bytes:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(struct.pack("<I", len(question)) + question)
            await self.process.stdin.drain()
            (size,) = struct.unpack("<I", await self.process.stdout.readexactly(4))
            if size > MAX_ANSWER_BYTES:
                raise HelperDied(None)
            return await self.process.stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self.process.wait()
            raise HelperDied(-code if code < 0 else None) from None

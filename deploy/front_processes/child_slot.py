"""One child of the supervisor, a front or an engine, and its successors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...model.errors import ModelError
from ...runtime.env.log import get_logger
from ...runtime.processes.child import Child, child_environment
from ...runtime.processes.frames import LinkError
from ...runtime.processes.link import Link
from ...stages.errors import ConfigError, NotStartedError
from .restarts import Restarts
from .words import CODEC, LINK_TIMEOUT_S, EndProcess, StartFailed

DEATH_S = 1.0  # from the end of the link to that of the process; then it is killed
KINDS: Mapping[str, type[Exception]] = {"ConfigError": ConfigError, "ModelError": ModelError}

log = get_logger("millrace.deploy")


class ChildSlot:
    """Runs one child after another: call `run` once, as a task. It returns after `stop`, or once a child is given up.

    `make_setup` makes the first messages to each, `on_word` gets what each sends, and `on_change` is called when a
    child is ready, or has ended. The first child that cannot start is not replaced: `failure` says why.
    """

    def __init__(
        self,
        name: str,
        module: str,
        make_setup: Callable[[], Sequence[Any]],
        on_word: Callable[[Any], None],
        on_change: Callable[[], None],
        restarts: Restarts,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self._module = name, module
        self._make_setup, self._on_word, self._on_change = make_setup, on_word, on_change
        self._restarts, self._environment = restarts, dict(environment or {})
        self._child: Child | None = None
        self._link: Link | None = None
        self._stopping = asyncio.Event()
        self._not_started: list[Exception] = []  # what the last process said, at most one
        self.state = "loading"
        self.reason: str | None = "it starts"
        self.num_restarts = 0
        self.was_ready = False  # one of its processes
        self.failure: Exception | None = None  # why it is given up
        self.ready = asyncio.Event()

    @property
    def pid(self) -> int:
        """Of the process; 0: there is none."""
        return 0 if self._child is None else self._child.pid

    def post(self, word: Any) -> None:
        """Sends a message, if there is a process."""
        if self._link is not None:
            self._link.post(word)

    def note_ready(self) -> None:
        """The child has said that it does its work."""
        self._restarts.note_ready()
        self.state, self.reason, self.was_ready = "ready", None, True
        self.ready.set()
        self._on_change()

    def kill(self) -> None:
        """Kills the process: a successor takes its place, unless it is stopping."""
        if self._child is not None:
            self._child.kill()

    def stop(self) -> None:
        """Has the process end by itself; none takes its place. Idempotent."""
        self._stopping.set()
        self.post(EndProcess())
        if self._link is not None:
            self._link.flush()

    async def run(self) -> None:
        """Runs processes until the end."""
        while not self._stopping.is_set():
            how = await self._run_one()
            self.ready.clear()
            if self._stopping.is_set():
                break
            pause_s = self._restarts.note_end(time.monotonic())
            if not self.was_ready or pause_s is None:
                self._give_up(how)
                break
            self.num_restarts += 1
            self.state, self.reason = "loading", f"its process has ended ({how}); another one starts"
            log.error("front_processes.child_ended", child=self.name, how=how, pause_s=round(pause_s, 3))
            self._on_change()
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._stopping.wait()
        self.state, self.reason = "stopped", self.reason or "it has been stopped"
        self._on_change()

    def _give_up(self, how: str) -> None:
        if not self.was_ready:
            unknown = NotStartedError(f"{self.name} cannot start: its process ended: {how}")
            self.failure = next(iter(self._not_started), unknown)
        else:
            self.failure = NotStartedError(f"{self.name} is given up: {self._restarts.describe()}, last by {how}")
        self.reason = str(self.failure)
        log.error("front_processes.given_up", child=self.name, reason=self.reason)

    async def _run_one(self) -> str:
        """Runs one process to its end, and says how it ended."""
        try:
            child = self._child = await Child.start(self._module, (), child_environment() | self._environment)
        except OSError as error:
            return f"it cannot be started: {error.strerror or error}"
        lost = asyncio.Event()
        self._not_started.clear()
        broken: list[str] = []

        def note_lost(error: LinkError | None) -> None:
            if error is not None:
                broken.append(f"a broken link ({error})")
            lost.set()

        link = self._link = Link(child.transport, CODEC, self._receive, note_lost, timeout_s=LINK_TIMEOUT_S)
        link.start()
        for word in self._make_setup():
            link.post(word)
        if self._stopping.is_set():
            link.post(EndProcess())
        ended, gone = asyncio.ensure_future(child.wait()), asyncio.ensure_future(lost.wait())
        try:
            await asyncio.wait([ended, gone], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await asyncio.wait([ended], timeout=DEATH_S)
            if not ended.done():
                child.kill()
            how = await ended
        finally:
            gone.cancel()
            if not ended.done():  # the supervisor ends
                child.kill()
                with suppress(asyncio.CancelledError):
                    await ended
            self._child = self._link = None
            link.close()
        return next(map(str, [*self._not_started, *broken]), how)

    def _receive(self, word: Any) -> None:
        if isinstance(word, StartFailed):
            self._not_started.append(KINDS.get(word.kind, NotStartedError)(word.reason))
        else:
            self._on_word(word)

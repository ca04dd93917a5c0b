"""The client of one engine process: starts it, sends it messages, and notices its end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...model.errors import ModelError
from ...runtime.env.log import get_logger
from ...runtime.fault_injection import Fault
from ...runtime.processes.child import Child, child_environment
from ...runtime.processes.frames import LinkError
from ...runtime.processes.link import Link
from ...runtime.processes.link_channels import InboundChannel, OutboundChannel
from ...runtime.processes.wire import WireError
from ..errors import ConfigError, NotStartedError
from ..executor.engine_host import EngineHost, StartHost
from ..messages import StepTokens, TokenRequest
from .protocol import (
    CODEC,
    AdapterCard,
    EngineReady,
    NotStarted,
    ReadAdapter,
    Setup,
    StatusQuery,
    StatusReply,
    Stop,
)

MODULE = "millrace.stages.split.engine_process"
ANSWER_S = 2.0  # that an engine may take to answer a question; then the caller uses the last known state

log = get_logger("millrace.stages")


class EngineDied(NotStartedError):
    """The engine process ended by itself, or could not be started. The message says how."""


class EngineClient:
    """One engine process. Call `start` once.

    `died` resolves with how it ended, unless `stop` was called. `on_lost` is called before, when nothing comes from it
    any more, and `on_answer` with each answer to a question. `environment` is added to that of this process. `engine`
    is its index, for the log. `start_host` starts the process in another way than as a child of this one.
    """

    def __init__(
        self,
        requests: OutboundChannel[TokenRequest],
        tokens: InboundChannel[StepTokens],
        on_message: Callable[[Any], None],
        module: str = MODULE,
        *,
        on_answer: Callable[[], object] = lambda: None,
        on_lost: Callable[[], object] = lambda: None,
        environment: Mapping[str, str] = MappingProxyType({}),
        engine: int = 0,
        start_host: StartHost | None = None,
    ) -> None:
        self._requests = requests
        self._tokens = tokens
        self._on_message = on_message
        self._module = module
        self._on_answer, self._on_lost = on_answer, on_lost
        self._environment = environment
        self._engine = engine
        self._start_host = start_host
        self._numbers = itertools.count()
        self._pending_answers: dict[int, asyncio.Future[Any]] = {}
        self._child: EngineHost | None = None
        self._link: Link | None = None
        self._broken: LinkError | None = None
        self._is_stopping = False
        self._started: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._end_task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it has started."""
        return None if self._child is None else self._child.pid

    @property
    def is_open(self) -> bool:
        """Whether messages reach the process, as far as is known."""
        return self._link is not None and self._link.is_open

    async def start(self, setup: Setup, files: Sequence[int]) -> EngineReady:
        """Starts the process, and returns when its stages run.

        Raises what its start raised, or `EngineDied`.
        """
        try:
            if self._start_host is not None:
                self._child = await self._start_host()
            else:
                self._child = await Child.start(self._module, files, child_environment() | dict(self._environment))
        except OSError as error:
            raise EngineDied(f"the engine process cannot be started: {error.strerror or error}") from error
        timeout_s = self._child.link_timeout_s
        self._link = Link(self._child.transport, CODEC, self._receive, self._lost, timeout_s=timeout_s)
        self._link.add_outbound(self._requests)
        self._link.add_inbound(self._tokens)
        self._link.start()
        self._link.post(setup)
        return await self._started

    def post(self, word: Any) -> None:
        """Sends a message. Does nothing once the engine process has ended."""
        if self._link is not None:
            try:
                self._link.post(word)
            except WireError as error:
                log.error("link.refused", word=type(word).__name__, reason=str(error))

    async def ask(self, what: str, faults: Sequence[Fault] = (), timeout_s: float = ANSWER_S) -> Any:
        """Sends a question, and waits for its answer.

        Raises `EngineDied`, or `TimeoutError` after `timeout_s`.
        """
        return await self._ask(lambda number: StatusQuery(number, what, tuple(faults)), timeout_s)

    async def read_adapter(self, path: str, name: str, digest: str) -> AdapterCard:
        """Has an adapter read by the process. Raises `EngineDied`."""
        card = await self._ask(lambda number: ReadAdapter(number, path, name, digest), None)
        assert isinstance(card, AdapterCard)
        return card

    async def _ask(self, question: Callable[[int], Any], timeout_s: float | None) -> Any:
        """Sends the question of a number, and waits for the answer with that number."""
        if self._link is None or not self._link.is_open:
            raise EngineDied("the engine process has ended")
        number = next(self._numbers)
        answer = self._pending_answers[number] = asyncio.get_running_loop().create_future()
        self.post(question(number))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            del self._pending_answers[number]

    def kill(self) -> None:
        """Kills the process."""
        if self._child is not None:
            self._child.kill()

    def cut(self) -> None:
        """Closes the link, by plan, and ends the process: nothing of it comes any more. Call `stop` afterwards."""
        self._is_stopping = True
        if self._link is not None:
            self._link.close()  # first: so an engine elsewhere is not taken for stuck
        self.kill()

    def leave(self, reason: str) -> None:
        """Closes the link, as if it had broken. Nothing of the process comes any more, also if it goes on."""
        if self._link is not None and self._link.is_open:
            self._link.close()
            self._lost(LinkError(reason))

    async def stop(self, timeout_s: float) -> None:
        """Asks the process to end, and kills it after `timeout_s`. Idempotent, also after its death."""
        self._is_stopping = True
        if self._child is None:
            return
        self.post(Stop())
        try:
            async with asyncio.timeout(timeout_s):
                await self._child.wait()
        except TimeoutError:
            reason = f"it did not stop within {timeout_s:g} s"
            log.warning("engine_process.killed", engine=self._engine, pid=self._child.pid, reason=reason)
            self._child.kill()
            await self._child.wait()
        if self._link is not None:
            self._link.close()
        if self._end_task is not None:
            await self._end_task
        self._give_up("the engine was stopped")

    def _receive(self, word: Any) -> None:
        match word:
            case StatusReply():
                self._on_answer()
                answer = self._pending_answers.get(word.number)
                if answer is not None and not answer.done():
                    if word.error is None:
                        answer.set_result(word.value)
                    else:
                        answer.set_exception(EngineDied(word.error))
            case EngineReady() if not self._started.done():
                self._started.set_result(word)
            case NotStarted() if not self._started.done():
                kinds = {"ConfigError": ConfigError, "ModelError": ModelError}
                self._started.set_exception(kinds.get(word.kind, EngineDied)(word.reason))
            case _:
                self._on_message(word)

    def _lost(self, error: LinkError | None) -> None:
        if error is not None:
            log.error("link.broken", end="front", engine=self._engine, reason=str(error))
        self._broken = error
        self._end_task = asyncio.ensure_future(self._end())
        self._on_lost()

    async def _end(self) -> None:
        """The link is closed: waits for the process to end, or kills it."""
        assert self._child is not None
        try:
            async with asyncio.timeout(self._child.death_s):
                how = await self._child.wait()
        except TimeoutError:
            self._child.kill()
            how = await self._child.wait()
        if self._broken is not None:
            how = f"a broken link ({self._broken})"
        self._give_up(how)

    def _give_up(self, how: str) -> None:
        for answer in self._pending_answers.values():
            if not answer.done():
                answer.set_exception(EngineDied(f"the engine process ended: {how}"))
        if not self._started.done():
            self._started.set_exception(EngineDied(f"the engine process ended before it was ready: {how}"))
        if not self.died.done() and not self._is_stopping:
            self.died.set_result(how)

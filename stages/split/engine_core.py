"""One engine process and its successors, as the front process sees them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from ...runtime.env import log as logs
from ...runtime.env.awake_time import AwakeTimeout
from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.fault_injection import Fault
from ...runtime.health.stalls import Stall
from ...runtime.processes.child import shared_file
from ...runtime.processes.link_channels import InboundChannel, OutboundChannel
from ...runtime.processes.wire import WireError
from ...runtime.trace.tracer import ring_bytes
from ..config import EngineConfig
from ..engine.engine_status import CoreReport
from ..executor.engine_host import StartHost
from ..messages import StepTokens, TokenRequest
from ..pipeline import ENTRY_CAPACITY, TEXT_CAPACITY, TO_DETOKENIZE, TO_SCHEDULE
from ..traffic.labels import Labels, known_labels
from .inflight_requests import InflightRequests
from .model_digest import digest_of
from .process_client import MODULE, EngineClient, EngineDied
from .process_keeper import ProcessKeeper
from .protocol import EngineReady, Setup, StatusQuery
from .remote_adapters import RemoteAdapters

NUM_RINGS = 7  # of the trace, for threads of the engine process: loop, device, completion, grammars, the pool's first
MIN_START_S = 120.0  # that a successor may take to start; longer if the first process took long
START_FACTOR = 10.0
STEPS_APART = 16  # from the last known step of an engine process to the first of the next; more than are in flight
STOP_S = 10.0  # that an engine process may take to free everything
SILENT_S = 1.0  # without an answer when the engine stops: then it is killed
SILENT_CHECKS = 3  # without an answer: then new requests go to other engine processes, if there are any
HANG_S = 30  # without an answer of the engine process, while it has work: it is replaced

MakeTokens = Callable[..., InboundChannel[StepTokens]]  # (name, capacity, clock, on_arrival)

log = get_logger("millrace.stages")


class CoreOwner(Protocol):
    """What the engine offers to its cores."""

    module: str  # that an engine process runs
    env: Env

    def receive(self, core: EngineCore, word: Any) -> None:
        """Handles a message of the core's process."""

    def refuse(self, request: TokenRequest, error: WireError) -> None:
        """Fails a request that cannot be encoded for the link."""

    def core_lost(self, core: EngineCore) -> None:
        """The link of the core's process has ended; nothing comes from it any more."""


class EngineCore:
    """An engine process: its edges, its client, and what was last reported of it. A successor takes its place.

    `requests` and `tokens` are the front process's halves of the channels to and from it; `make_tokens` makes the
    second one of a name, a capacity, a clock, and what to call with each item. `cpus` are those it may run on; none:
    all. `environment` is added to that of this process. With `start_host` the process may be on another machine: it
    keeps its trace to itself, and loads files of its own.
    """

    def __init__(
        self,
        owner: CoreOwner,
        table: InflightRequests,
        index: int = 0,
        *,
        make_tokens: MakeTokens = InboundChannel,
        first_step: int = 0,
        cpus: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        start_host: StartHost | None = None,
    ) -> None:
        self.index = index
        self.prefix_key: bytes | None = None  # as of `Setup`
        sent = partial(table.sent, core=index)
        self.requests: OutboundChannel[TokenRequest] = OutboundChannel(
            "->".join(TO_SCHEDULE), ENTRY_CAPACITY, owner.env.now, sent, owner.refuse
        )
        self.tokens = make_tokens("->".join(TO_DETOKENIZE), TEXT_CAPACITY, owner.env.now, self._note)
        self._table = table
        self.client: EngineClient | None = None
        self.keeper: ProcessKeeper | None = None
        self.ready: EngineReady | None = None  # what the present process told at its start
        self.labels: Labels = {}  # of the present process, or the last one
        self.model_digest = ""  # likewise, of an engine elsewhere; those of this machine load the same files
        self.is_draining = False  # it takes no new requests
        self.is_parting = False  # its link ends by plan
        self.has_come_back = False  # the present process is the one before: only its connection had ended
        self.report: CoreReport | None = None  # the last one
        self.last_granted = -1  # step, by the last report
        self.adapters = RemoteAdapters(lambda: self.client)
        self.files: list[int] = []  # descriptors of the trace's rings
        self.last_step = first_step - STEPS_APART  # of which tokens came
        self._owner = owner
        self._cpus = tuple(cpus)
        self._environment = dict(environment or {})
        self._start_host = start_host
        self._model_files: Mapping[str, str] | None = None  # digests of the files that the first process loaded
        self._start_limit_s = MIN_START_S
        self._next_check_s = 0.0
        self._num_silent_checks = 0  # checks since the last answer of the engine process

    @property
    def is_serving(self) -> bool:
        """Whether there is a process that takes requests."""
        return self.client is not None and self.client.is_open and (self.keeper is None or self.keeper.away is None)

    @property
    def may_come_back(self) -> bool:
        """Whether the end of its link need not be that of the process."""
        return self.ready is not None and bool(self.ready.instance)

    @property
    def pid(self) -> int | None:
        """The id of the current or last engine process; None before the first."""
        return None if self.client is None else self.client.pid

    async def start(self, config: EngineConfig, first_step: int | None = None) -> EngineReady:
        """Starts a process. Raises what its start raises."""
        is_elsewhere = self._start_host is not None
        if not self.files and not is_elsewhere:
            self.files = [shared_file(ring_bytes()) for _ in range(NUM_RINGS)]
        env = self._owner.env
        began_s = env.now()
        self.is_draining = self.is_parting = False
        client = self.client = EngineClient(
            self.requests,
            self.tokens,
            self._receive,
            self._owner.module or MODULE,
            on_answer=self._note_answer,
            on_lost=lambda: self._owner.core_lost(self),
            environment=self._environment,
            engine=self.index,
            start_host=self._start_host,
        )
        first_step = self.last_step + STEPS_APART if first_step is None else first_step
        made = (config, logs.settings(), first_step, self._model_files, self._cpus, is_elsewhere, self.prefix_key)
        setup = Setup(*made)
        ready = await client.start(setup, self.files)
        before, self.ready = self.ready, ready
        self._num_silent_checks = 0
        self.labels = known_labels(ready.labels)
        self.model_digest = digest_of(ready) if is_elsewhere else ""
        self.has_come_back = before is not None and ready.instance == before.instance != ""
        if self._model_files is None:
            if not ready.instance:  # else it lives on by itself, and its front compares it with the others
                self._model_files = ready.files
            self._start_limit_s = max(MIN_START_S, START_FACTOR * (env.now() - began_s))
        log.info("engine_process.ready", pid=client.pid, engine=self.index)
        return ready

    async def warm_up(self, first_requests: Coroutine[Any, Any, None]) -> None:
        """Runs the first requests. Raises `EngineDied` if the process ends meanwhile.

        A first process that dies is not replaced: whatever it lacks, it would lack again.
        """
        assert self.client is not None
        died = self.client.died
        warming = asyncio.ensure_future(first_requests)
        try:
            ends: list[asyncio.Future[Any]] = [warming, died]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not warming.done():
                raise EngineDied(f"the engine process ended while it was warming up: {died.result()}")
        finally:
            warming.cancel()
            await asyncio.wait([warming])
        warming.result()

    async def start_again(self, config: EngineConfig, prepare: Callable[[], Awaitable[object]]) -> EngineClient:
        """Starts a successor, whose steps are numbered after those of the last process, and awaits `prepare` for it.

        Raises whatever prevents the start.
        """
        # a recording covers one process; the files are those of the first, so the Hub is not asked for newer ones
        config, before = replace(config, record=None, offline=True), self.ready
        try:
            async with AwakeTimeout(self._start_limit_s):
                await self.start(config, max(self.last_step, self.last_granted) + STEPS_APART)
                await prepare()
        except BaseException:
            self.ready = before  # `has_come_back` asks for the process that served
            if self.client is not None:
                self.client.kill()
                await self.client.stop(0.0)
            raise
        assert self.client is not None
        return self.client

    async def ask(self, what: str, faults: Sequence[Fault], timeout_s: float) -> Any:
        """Asks the process. Raises `EngineDied`, also if there is none yet, and TimeoutError."""
        if self.client is None:
            raise EngineDied("there is no engine process")
        return await self.client.ask(what, faults, timeout_s)

    def post(self, word: Any) -> None:
        """Sends a message to the process, if there is one."""
        if self.client is not None:
            self.client.post(word)

    async def stop(self, *, has_started: bool) -> None:
        """Ends the process, and frees what belongs to it. Idempotent."""
        if self.client is not None:
            if not has_started or await self._is_silent():
                self.client.kill()  # it is still loading, or hangs
            await self.client.stop(STOP_S)
        for file in self.files:
            os.close(file)
        self.files.clear()

    async def _is_silent(self) -> bool:
        """Whether the engine process lives and does not answer, so that it would not stop when asked either."""
        assert self.client is not None
        try:
            with suppress(EngineDied):
                await self.client.ask("books", timeout_s=SILENT_S)
        except TimeoutError:
            reason = f"no answer for {SILENT_S:g} s at the stop"
            log.warning("engine_process.killed", engine=self.index, pid=self.client.pid, reason=reason)
            return True
        return False

    def note_report(self, report: CoreReport) -> None:
        self.report, self.last_granted = report, report.core.scheduler.last_granted

    def forget_process(self) -> None:
        """The process has gone by plan: nothing of it concerns the next one, but the numbers of its steps."""
        self.ready = self.report = None
        self.labels, self.model_digest = {}, ""
        self.is_draining = self.is_parting = False
        self._num_silent_checks = 0

    # -- supervision

    @property
    def is_silent(self) -> bool:
        """Whether the process has answered nothing for some seconds. It may hang or be stopped, or a way there or back.

        Reports come unasked, and do not count: they say nothing of whether requests reach the process.
        """
        return self._num_silent_checks > SILENT_CHECKS

    @property
    def is_heard(self) -> bool:
        """Whether the process has answered the last check, if there was one."""
        return self._num_silent_checks <= 1

    def is_due(self, has_work: bool) -> bool:
        """Whether the process is to be checked now: once a second while there is work. Asks it for an answer."""
        if not has_work or self.keeper is None or not self.is_serving:
            self._num_silent_checks = 0
            return False
        now_s = self._owner.env.now()
        if now_s < self._next_check_s:
            return False
        self._next_check_s = now_s + 1.0
        self._num_silent_checks += 1
        self.post(StatusQuery(-1, "books"))  # any answer resets `_num_silent_checks`
        return True

    def leave(self) -> None:
        """Closes the link of a silent process, which is not killed: nothing of it comes any more."""
        assert self.client is not None
        self._num_silent_checks = 0
        self.client.leave(f"no answer for {SILENT_CHECKS} s, while other engines are heard")

    def kill_if_stuck(self, stall: Stall | None) -> None:
        """Kills the process if it has been silent for too long, or for a `stall` of its stages."""
        if self._num_silent_checks <= HANG_S and stall is None:
            return
        assert self.client is not None
        reason = f"no answer for {HANG_S} s" if stall is None else stall.reason
        log.error("engine_process.killed", engine=self.index, pid=self.client.pid, reason=reason)
        self._num_silent_checks = 0
        self.client.kill()

    def _note(self, step: StepTokens) -> None:
        self.last_step = max(self.last_step, step.step)
        self._table.note(step, self.index)

    def _receive(self, word: Any) -> None:
        self._owner.receive(self, word)

    def _note_answer(self) -> None:
        self._num_silent_checks = 0

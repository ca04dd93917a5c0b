"""`SplitEngine`: an engine whose step loop runs in a process of its own.

So HTTP and text never delay a step. To its callers it is an `Engine`. When the engine process dies, another one is
started, and resumes every request where the first stopped. No token is sent twice. All code here runs on the front
process's event loop.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ...runtime.env import log as logs
from ...runtime.env.log import get_logger
from ...runtime.fault_injection import Fault
from ...runtime.health.stalls import find_stall
from ...runtime.histogram import Histogram
from ...runtime.pipeline import Health, NotServing, Pipeline
from ...runtime.processes.child import shared_file
from ...runtime.processes.type_fields import VersionError
from ...runtime.processes.wire import WireError
from ...runtime.stage import Stage
from ...runtime.startup.phases import Phases
from ...runtime.trace.tracer import ring_bytes
from ...runtime.wakeups import Wakeup
from ..allocate.block_pool import BlockPool, BlockTables
from ..allocate.host_tier import HostTier
from ..allocate.prefix_cache import PrefixCache
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.wiring import LoadedText, TextStages
from ..errors import ConfigError, Failed
from ..exit.outboxes import RequestOutbox
from ..grammar.compiled import Grammars
from ..messages import TokenRequest
from ..outputs import ModelInfo
from ..schedule.scheduler import LOAD_FAILED, Scheduler
from .front import CORE, FrontStages, TriedGrammars, make_ends, show_core
from .inflight_requests import InflightRequests
from .process_client import ANSWER_S, MODULE, EngineClient, EngineDied
from .process_keeper import ProcessKeeper
from .protocol import (
    Admitted,
    Broken,
    ControlCauses,
    CoreStatus,
    Crashed,
    EngineReady,
    ModelLoading,
    RequestFailed,
    RequestsEnded,
    ServiceTimes,
    Setup,
    StatusQuery,
    engine_side_error,
)
from .remote_adapters import RemoteAdapters
from .remote_views import RemoteCoreView

NUM_RINGS = 7  # of the trace, for threads of the engine process: loop, device, completion, grammars, the pool's first
MIN_START_S = 120.0  # that a successor may take to start; longer if the first process took long
START_FACTOR = 10.0
STEPS_APART = 16  # from the last known step of an engine process to the first of the next; more than are in flight
STOP_S = 10.0  # that an engine process may take to free everything
SILENT_S = 1.0  # without an answer when the engine stops: then it is killed
HANG_S = 30  # without a message from the engine process, while it has work: it is replaced
STALL_S = 300.0  # without progress, though it sends messages: it is replaced; a large step on a slow machine is shorter
SUSPECT_S = 2.0  # without progress: it is asked for the stacks of its tasks
REFRESH_S = 0.5  # that `refresh` waits for new state
OPEN_TO_INSERT = ("intake", "detokenize")  # a custom stage after these has both neighbours in this process

log = get_logger("millrace.stages")


class SplitEngine(Engine):
    """An `Engine` whose step loop runs in the engine process.

    The engine process reports its state a few times a second; `refresh` requests it now.
    """

    mode = "split"
    module = MODULE  # that the process runs

    def __init__(self, *args: Any, **overrides: Any) -> None:
        super().__init__(*args, **overrides)
        if self._logits_processor is not None:
            raise ConfigError("mode = split: a logits processor is in the caller's process; use mode = inline")
        if self._opening is not None:
            raise ConfigError("mode = split: the engine process loads the model itself; give no opening")
        self._table = InflightRequests()
        self._requests, self._tokens = make_ends(self._table, self._refused)
        self._client: EngineClient | None = None
        self._core_view: RemoteCoreView | None = None
        self._files: list[int] = []
        self._faults_there: list[Fault] = []
        self._gone: list[str] = []  # ended requests, to be reported in the next turn of the loop
        self._adapters_there = RemoteAdapters(lambda: self._client)
        self._model_files: Mapping[str, str] | None = None  # digests of the files that the first process loaded
        self._start_limit_s = MIN_START_S
        self._keeper: ProcessKeeper | None = None
        self._next_check_s = 0.0
        self._stack_refresh: asyncio.Task[None] | None = None
        self._num_silent_checks = 0  # checks since the last message of the engine process

    # -- custom stages

    def insert(self, stage: Stage[Any, Any], after: str, *, name: str | None = None) -> None:
        """As `Engine.insert`. Both neighbours must be in this process."""
        if after.partition(".")[0] not in OPEN_TO_INSERT:
            behind = " or ".join(OPEN_TO_INSERT)
            raise ConfigError(
                f"mode = split: a stage after {after} would have a neighbour in another process: insert it "
                f"after {behind}, or use mode = inline"
            )
        super().insert(stage, after, name=name)

    def replace(self, name: str, stage: Stage[Any, Any]) -> None:
        """As `Engine.replace`, for the stages in this process."""
        if name in CORE:
            raise ConfigError(f"mode = split: {name} is in the engine process; use mode = inline")
        super().replace(name, stage)

    # -- start and stop

    async def _load(self) -> tuple[Any, Phases]:
        """Loads the text parts here, and at the same time the rest in the engine process."""
        phases = Phases(self._env.now)
        reading = asyncio.ensure_future(self._read_text(phases))
        starting = asyncio.ensure_future(self._start_process(self.config, 0))
        try:
            with_info, ready = await asyncio.gather(reading, starting)
        except BaseException:
            for task in (reading, starting):
                task.cancel()
            await asyncio.wait([reading, starting])
            raise
        phases.seconds.update({f"engine_{name}": seconds for name, seconds in ready.seconds.items()})
        return with_info(replace(ready.info, startup_s=phases.seconds)), phases

    async def _read_text(self, phases: Phases) -> Callable[[ModelInfo], LoadedText]:
        from ..loading.model import load_text

        return await self._env.run_in_thread(load_text, self.config, phases)

    async def _start_process(self, config: EngineConfig, first_step: int) -> EngineReady:
        if not self._files:
            self._files = [shared_file(ring_bytes()) for _ in range(NUM_RINGS)]
        began_s = self._env.now()
        client = self._client = EngineClient(self._requests, self._tokens, self._receive, self.module)
        ready = await client.start(Setup(config, logs.settings(), first_step, self._model_files), self._files)
        if self._model_files is None:
            self._model_files = ready.files
            self._start_limit_s = max(MIN_START_S, START_FACTOR * (self._env.now() - began_s))
        log.info("engine_process.ready", pid=client.pid)
        return ready

    def _make_parts(self, loaded: Any) -> TextStages:
        parts = FrontStages(self.config, loaded, self._grammars(loaded), self._table, self._requests, self._tokens)
        parts.exit.on_end.append(self._request_ended)
        if self.config.enable_lora:
            parts.serve_adapters(self.config, self._adapters_there)
        return parts

    def _grammars(self, loaded: Any) -> Grammars:
        from ..loading.model import make_vocabulary

        return TriedGrammars(lambda: make_vocabulary(loaded.tokenizer, loaded.text_table, loaded.info))

    def _record(self, path: Path) -> None:
        """Does nothing: the engine process records."""

    def _stage_names(self, pipeline: Pipeline) -> list[str]:
        return [*pipeline.stages, *CORE]

    async def _inject(self, pipeline: Pipeline, faults: Sequence[Fault]) -> None:
        await super()._inject(pipeline, faults)
        self._faults_there = [fault for fault in faults if fault.stage in CORE]
        await self._ask_there("inject", self._faults_there)

    async def _warm_up(self) -> None:
        parts = self._front()
        for file in self._files:
            parts.pipeline.tracer.adopt(mmap.mmap(file, 0))
        self._core_view = show_core(parts, self.config, self._env.now())
        parts.pipeline.lane.listen(_OncePerTurn(self._report_causes))
        assert parts.pipeline.watch is not None
        parts.pipeline.watch.on_tick.append(self._check_process)
        assert self._client is not None
        await self._warm_up_or_die(self._client)
        self._keeper = ProcessKeeper(
            self._env, self._table, self._requests, parts.exit, self._start_again, self._process_died
        )
        self._keeper.start(self._client)
        await self.refresh()

    async def _warm_up_or_die(self, client: EngineClient) -> None:
        """A first process that dies is not replaced: whatever it lacks, it would lack again."""
        warming = asyncio.ensure_future(super()._warm_up())
        try:
            ends: list[asyncio.Future[Any]] = [warming, client.died]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not warming.done():
                raise EngineDied(f"the engine process ended while it was warming up: {client.died.result()}")
        finally:
            warming.cancel()
            await asyncio.wait([warming])
        warming.result()

    async def stop(self, cause: str = "server_shutdown") -> None:
        """As `Engine.stop`; also ends the engine process."""
        if self._keeper is not None:
            await self._keeper.stop()
        has_started = self._core_view is not None
        await super().stop(cause)
        if self._client is not None:
            if not has_started or await self._is_silent():
                self._client.kill()  # it is still loading, or hangs
            await self._client.stop(STOP_S)
        for file in self._files:
            os.close(file)
        self._files.clear()

    async def _is_silent(self) -> bool:
        """Whether the engine process lives and does not answer, so that it would not stop when asked either."""
        assert self._client is not None
        try:
            with suppress(EngineDied):
                await self._client.ask("books", timeout_s=SILENT_S)
        except TimeoutError:
            log.warning(
                "engine_process.killed", pid=self._client.pid, reason=f"no answer for {SILENT_S:g} s at the stop"
            )
            return True
        return False

    @property
    def health(self) -> Health:
        """As `Engine.health`; not ready while there is no engine process."""
        away = None if self._keeper is None else self._keeper.away
        return away if away is not None and self._health.is_ready else super().health

    @property
    def num_deaths(self) -> int:
        return 0 if self._keeper is None else self._keeper.num_deaths

    @property
    def engine_pid(self) -> int | None:
        """The id of the current or last engine process; None before the first."""
        return None if self._client is None else self._client.pid

    # -- when the engine process dies

    async def _start_again(self) -> EngineClient:
        """Starts a process whose steps are numbered after those of the last one. Raises whatever prevents that."""
        first_step = max(self._table.last_step, self._seen().scheduler.last_granted) + STEPS_APART
        # a recording covers one process; the files are those of the first, so the Hub is not asked for newer ones
        config = replace(self.config, record=None, offline=True)
        try:
            async with asyncio.timeout(self._start_limit_s):
                await self._start_process(config, first_step)
                if self._faults_there:
                    await self._ask_there("inject", self._faults_there)
                if self.adapters is not None:
                    await self._adapters_there.restore(self._env, self.adapters, self._front().exit.fail)
        except BaseException:
            if self._client is not None:
                self._client.kill()
                await self._client.stop(0.0)
            raise
        assert self._client is not None
        return self._client

    def _process_died(self, how: str) -> None:
        self._report_crash("engine", engine_side_error("EngineDied", ()), list(self._front().exit.live))

    def _check_process(self, lag_s: float) -> None:
        """Checks that the engine process makes progress; kills it if not.

        Once a second, while requests are live.
        """
        is_away = self._keeper is None or self._keeper.away is not None
        if is_away or self._client is None or not self._front().exit.live:
            self._num_silent_checks = 0
            return
        now_s = self._env.now()
        if now_s < self._next_check_s:
            return
        self._next_check_s = now_s + 1.0
        self._num_silent_checks += 1
        self._client.post(StatusQuery(-1, "books"))  # any message resets `_num_silent_checks`
        pipeline = self._front().pipeline
        if find_stall(pipeline, SUSPECT_S) is None:
            pipeline.stacks_elsewhere = []
        elif self._stack_refresh is None or self._stack_refresh.done():
            self._stack_refresh = asyncio.ensure_future(self.refresh(with_stacks=True))  # for the flight recorder
        stall = find_stall(pipeline, STALL_S)
        is_stalled = stall is not None and stall.name.partition(".")[0] in CORE
        if self._num_silent_checks > HANG_S or is_stalled:
            reason = f"no message for {HANG_S} s" if stall is None else stall.reason
            log.error("engine_process.killed", pid=self._client.pid, reason=reason)
            self._num_silent_checks = 0
            self._client.kill()

    # -- messages from and to the engine process

    def _receive(self, word: Any) -> None:
        """Handles a message of the engine process."""
        self._num_silent_checks = 0
        if isinstance(word, ModelLoading):
            return self.load_progress.follow(word.state)
        parts = self._parts
        if not isinstance(parts, FrontStages):
            return  # not started yet, or stopped
        match word:
            case CoreStatus():
                if self._core_view is not None:
                    self._core_view.update(word)
            case ServiceTimes():
                for request_id, service_us in word.times_us.items():
                    parts.exit.note_service(request_id, word.stage, service_us)
            case Admitted():
                self._table.admit(word.sequence_ids)
            case RequestFailed():
                if word.reason == LOAD_FAILED and parts.adapters is not None:
                    parts.adapters.lose(word.request_id)
                parts.exit.fail(word.request_id, word.error())
            case Crashed():
                self._report_crash(word.stage, engine_side_error(word.error, word.stack), word.request_ids)
            case Broken():
                log.error("engine_process.broken", stage=word.stage, reason=word.reason)
                if self._keeper is not None:
                    self._keeper.note_broken(word.reason)
            case _:
                log.error("link.refused", word=type(word).__name__, reason="not a message of the engine process")

    def _report_crash(self, stage: str, error: BaseException, request_ids: Sequence[str]) -> None:
        for callback in self._front().pipeline.on_crash:
            callback(stage, error, request_ids)

    def _report_causes(self) -> None:
        """Sends the entries of the control lane, and the ended requests."""
        if isinstance(self._parts, FrontStages) and self._client is not None:
            if causes := self._parts.pipeline.lane.take():
                self._client.post(ControlCauses(causes))
            gone, self._gone = self._gone, []
            if gone:
                self._client.post(RequestsEnded(gone))

    def _request_ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        if self._table.forget(outbox.request_id):
            if not self._gone:
                asyncio.get_running_loop().call_soon(self._report_causes, context=Context())
            self._gone.append(outbox.request_id)

    def _refused(self, request: TokenRequest, error: WireError) -> None:
        """Fails a request that cannot be encoded for the link."""
        code = "engine_version" if isinstance(error, VersionError) else "internal_error"
        failed = Failed(f"this request cannot be sent to the engine process: {error}", code=code)
        self._front().exit.fail(request.request_id, failed)

    async def _ask_there(self, what: str, faults: Sequence[Fault] = (), timeout_s: float = ANSWER_S) -> Any:
        if self._client is None:
            raise NotServing(self.health)
        try:
            return await self._client.ask(what, faults, timeout_s)
        except (EngineDied, TimeoutError):
            raise NotServing(self.health) from None

    # -- inspection

    async def refresh(self, *, with_blocks: bool = False, with_stacks: bool = False) -> None:
        with suppress(NotServing):  # then the last reported state stays
            await super().refresh()
            await self._ask_there("blocks" if with_blocks else "books", timeout_s=REFRESH_S)
            if with_stacks:
                self._front().pipeline.stacks_elsewhere = await self._ask_there("stacks", timeout_s=REFRESH_S)

    async def forget_prefixes(self) -> int:
        return int(await self._ask_there("forget_prefixes"))

    def reset_prefix_cache(self) -> int:
        """Raises: the blocks are in another process. Use `forget_prefixes`."""
        raise RuntimeError("mode = split: await forget_prefixes() instead, as the engine is another process")

    @property
    def scheduler(self) -> Scheduler:
        return cast(Scheduler, self._seen().scheduler)

    @property
    def pool(self) -> BlockPool:
        return cast(BlockPool, self._seen().pool)

    @property
    def host_tier(self) -> HostTier | None:
        return cast("HostTier | None", self._seen().host)

    @property
    def block_tables(self) -> BlockTables:
        return cast(BlockTables, self._seen().tables)

    @property
    def prefix_cache(self) -> PrefixCache | None:
        return cast("PrefixCache | None", self._seen().cache)

    @property
    def idle_gaps_us(self) -> Histogram | None:
        return self._seen().idle_gaps_us

    @property
    def step_tokens(self) -> Histogram:
        return self._seen().step_tokens

    def _seen(self) -> RemoteCoreView:
        if self._core_view is None or self._parts is None:
            raise NotServing(self.health)
        return self._core_view

    def _front(self) -> FrontStages:
        assert isinstance(self._parts, FrontStages)
        return self._parts


class _OncePerTurn(Wakeup):
    """Calls `react` once for all wakeups of one turn of the event loop."""

    __slots__ = ("_is_due", "_react")

    def __init__(self, react: Callable[[], None]) -> None:
        super().__init__()
        self._react = react
        self._is_due = False

    def set(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn, context=Context())

    def _turn(self) -> None:
        self._is_due = False
        self._react()

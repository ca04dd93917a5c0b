"""`SplitEngine`: an engine whose step loop runs in a process of its own.

So HTTP and text never delay a step. To its callers it is an `Engine`. When the engine process dies, another one is
started, and resumes every request where the first stopped. No token is sent twice. All code here runs on the front
process's event loop.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

from ...runtime.env.log import get_logger
from ...runtime.fault_injection import Fault
from ...runtime.health.stalls import Stall, find_stall
from ...runtime.pipeline import Health, NotServing, Pipeline
from ...runtime.pipeline_status import PipelineStatus
from ...runtime.processes.type_fields import VersionError
from ...runtime.processes.wire import WireError
from ...runtime.stage import Stage
from ...runtime.startup.phases import Phases
from ...runtime.wakeups import Wakeup
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.engine_status import BlockStatus, CoreReport, EngineStatus
from ..engine.placed_stages import PlacedStage
from ..engine.read_status import owners_of
from ..engine.wiring import LoadedText, TextStages, sketch
from ..errors import ConfigError, Failed
from ..exit.outboxes import RequestOutbox
from ..grammar.compiled import Grammars
from ..messages import TokenRequest
from ..outputs import ModelInfo
from ..pipeline import TO_SCHEDULE, build_front_pipeline
from ..schedule.scheduler import LOAD_FAILED
from .engine_core import EngineCore
from .front import CORE, FrontStages, JoinedPipeline, TriedGrammars
from .inflight_requests import InflightRequests
from .process_client import ANSWER_S, MODULE, EngineClient, EngineDied
from .process_keeper import ProcessKeeper
from .protocol import (
    Admitted,
    Broken,
    ControlCauses,
    Crashed,
    EngineReady,
    ModelLoading,
    RequestFailed,
    RequestsEnded,
    ServiceTimes,
    engine_side_error,
)
from .remote_adapters import AdaptersThere

STALL_S = 300.0  # without progress, though it sends messages: it is replaced; a large step on a slow machine is shorter
SUSPECT_S = 2.0  # without progress: it is asked for the stacks of its tasks
REFRESH_S = 0.5  # that `refresh` waits for new state

log = get_logger("millrace.stages")


class SplitEngine(Engine):
    """An `Engine` whose step loop runs in the engine process.

    The engine process reports its state a few times a second; `refresh` requests it now.
    """

    mode = "split"
    module = MODULE  # that a process runs
    to_loop: ClassVar[tuple[str, str]] = TO_SCHEDULE  # the channel to the engine process
    # the ends of the step loop, by what is in this process
    nearest: ClassVar[dict[str, str]] = {"before=schedule": "after=tokenize", "after=sample": "before=detokenize"}

    def __init__(self, *args: Any, **overrides: Any) -> None:
        super().__init__(*args, **overrides)
        if self._made_processors:
            raise ConfigError(
                f"{self._setting}: a logits processor that was made is in the caller's process; name its class, "
                f"as package.module:Class, or use {self._inline}"
            )
        if self._opening is not None:
            raise ConfigError(f"{self._setting}: the engine process loads the model itself; give no opening")
        self._table, self.cores = self._make_cores()
        self._joined: JoinedPipeline | None = None  # once the stages run
        self._report: CoreReport | None = None  # the last one of the step loop
        self._blocks: BlockStatus | None = None  # of the last report that has them
        self._faults_there: list[Fault] = []
        self._gone: list[tuple[str, range, int | None]] = []  # ended requests, their sequences, and where they ran
        self._stack_refresh: asyncio.Task[None] | None = None

    def _make_cores(self) -> tuple[InflightRequests, Sequence[EngineCore]]:
        table = InflightRequests()
        return table, [EngineCore(self, table)]

    @property
    def _setting(self) -> str:
        """What put the step loop into another process, for errors."""
        count = self.config.data_parallel_size
        return "mode = split" if count == 1 else f"data_parallel_size = {count}"

    @property
    def _inline(self) -> str:
        """The settings that have it in this one."""
        return "mode = inline" if self.config.data_parallel_size == 1 else "data_parallel_size = 1 and mode = inline"

    # -- custom stages

    def insert(
        self, stage: Stage[Any, Any], after: str | None = None, *, before: str | None = None, name: str | None = None
    ) -> None:
        """As `Engine.insert`, for places outside of the step loop: the stage runs in this process."""
        placed = self._reachable(PlacedStage(stage, after, before))
        super().insert(stage, placed.after, before=placed.before, name=name)

    def _reachable(self, placed: PlacedStage) -> PlacedStage:
        if not placed.place:
            return placed
        side, _, place = self.nearest.get(placed.place, placed.place).partition("=")
        if place.partition(".")[0] in CORE:
            where = f"stage = {placed.text}: " if placed.text else ""
            message = f"{self._setting}: a stage {side} {place} would be in the step loop, which is in another process"
            raise ConfigError(f"{where}{message}: insert it before schedule or after sample, or use {self._inline}")
        is_after = side == "after"
        return replace(placed, after=place if is_after else None, before=None if is_after else place)

    def _use_processors(self, loaded: Any) -> None:
        """Does nothing: the engine process makes its own."""

    def _sketches(self) -> list[Pipeline]:
        return [sketch(build_front_pipeline)]

    def replace(self, name: str, stage: Stage[Any, Any]) -> None:
        """As `Engine.replace`, for the stages in this process."""
        if name in CORE:
            raise ConfigError(f"{self._setting}: {name} is in the engine process; use {self._inline}")
        super().replace(name, stage)

    # -- start and stop

    async def _load(self) -> tuple[Any, Phases]:
        """Loads the text parts here, and at the same time the rest in the engine process."""
        phases = Phases(self._env.now)
        reading = asyncio.ensure_future(self._read_text(phases))
        starting = [asyncio.ensure_future(core.start(self._config_of(core))) for core in self.cores]
        try:
            with_info, ready = await asyncio.gather(reading, asyncio.gather(*starting))
        except BaseException:
            for task in (reading, *starting):
                task.cancel()
            await asyncio.wait([reading, *starting])
            raise
        phases.seconds.update({f"engine_{name}": seconds for name, seconds in ready[0].seconds.items()})
        return with_info(replace(self._joint_info(ready), startup_s=phases.seconds)), phases

    async def _read_text(self, phases: Phases) -> Callable[[ModelInfo], LoadedText]:
        from ..loading.model import load_text

        return await self._env.run_in_thread(load_text, self._config_of_text, phases)

    @property
    def _config_of_text(self) -> EngineConfig:
        """The settings with which this process looks for the model's files."""
        return self.config

    def _config_of(self, core: EngineCore) -> EngineConfig:
        """The settings of an engine process."""
        return self.config

    def _joint_info(self, ready: Sequence[EngineReady]) -> ModelInfo:
        return ready[0].info

    def _make_parts(self, loaded: Any) -> TextStages:
        parts = self._make_front(loaded)
        parts.exit.on_end.append(self._request_ended)
        if self.config.enable_lora:
            parts.serve_adapters(self.config, self._adapters_there())
        return parts

    def _make_front(self, loaded: Any) -> FrontStages:
        (core,) = self.cores
        return FrontStages(self.config, loaded, self._grammars(loaded), self._table, core.requests, core.tokens)

    def _adapters_there(self) -> AdaptersThere:
        return self.cores[0].adapters

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
        for file in (file for core in self.cores for file in core.files):
            parts.pipeline.tracer.adopt(mmap.mmap(file, 0))
        self._show(parts)
        parts.pipeline.lane.listen(_OncePerTurn(self._report_causes))
        assert parts.pipeline.watch is not None
        parts.pipeline.watch.on_tick.append(self._check_processes)
        for core in self.cores:
            await self._warm_up_or_die(core)
        self._start_keepers(parts)
        await self.refresh()
        while self._report is None and self.health.state != "dead":  # observers need one from now on
            await self._env.sleep(REFRESH_S / 10)
            await self.refresh()

    def _show(self, parts: FrontStages) -> None:
        """Adds the step loop to the status of the pipeline."""
        requests = "->".join(self.to_loop)
        self._joined = JoinedPipeline(parts.pipeline, requests, parts.tokens.name, self.config.steps_in_flight)
        parts.pipeline.join_status = self._join

    def _start_keepers(self, parts: FrontStages) -> None:
        (core,) = self.cores
        died = partial(self._process_died, core)
        again = partial(self._start_again, core)
        core.keeper = ProcessKeeper(self._env, self._table, core.requests, parts.exit, again, died)
        assert core.client is not None
        core.keeper.start(core.client)

    async def _warm_up_or_die(self, core: EngineCore) -> None:
        """A first process that dies is not replaced: whatever it lacks, it would lack again."""
        assert core.client is not None
        died = core.client.died
        warming = asyncio.ensure_future(super()._warm_up())
        try:
            ends: list[asyncio.Future[Any]] = [warming, died]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not warming.done():
                raise EngineDied(f"the engine process ended while it was warming up: {died.result()}")
        finally:
            warming.cancel()
            await asyncio.wait([warming])
        warming.result()

    async def stop(self, cause: str = "server_shutdown") -> None:
        """As `Engine.stop`; also ends the engine processes."""
        await self._stop_keepers()
        has_started = self._joined is not None
        await super().stop(cause)
        for core in self.cores:
            core.requests.close()
        await asyncio.gather(*(core.stop(has_started=has_started) for core in self.cores))

    async def _stop_keepers(self) -> None:
        for core in self.cores:
            if core.keeper is not None:
                await core.keeper.stop()

    @property
    def health(self) -> Health:
        """As `Engine.health`; not ready while there is no engine process."""
        away = self._away
        return away if away is not None and self._health.is_ready else super().health

    @property
    def _away(self) -> Health | None:
        """Why no engine process takes requests; None if one does."""
        keeper = self.cores[0].keeper
        return None if keeper is None else keeper.away

    @property
    def num_deaths(self) -> int:
        return sum(core.keeper.num_deaths for core in self.cores if core.keeper is not None)

    @property
    def engine_pid(self) -> int | None:
        """The id of the current or last engine process, the first of several; None before the first."""
        return self.cores[0].pid

    # -- when an engine process dies

    async def _start_again(self, core: EngineCore) -> EngineClient:
        """Starts a successor of a process. Raises whatever prevents that."""
        # a recording covers one process; the files are those of the first, so the Hub is not asked for newer ones
        config = replace(self._config_of(core), record=None, offline=True)
        return await core.start_again(config, partial(self._prepare, core))

    async def _prepare(self, core: EngineCore) -> None:
        """Brings a successor to the state of its predecessor."""
        if self._faults_there:
            try:
                await core.ask("inject", self._faults_there, ANSWER_S)
            except (EngineDied, TimeoutError):
                raise NotServing(self.health) from None
        if self.adapters is not None:
            fail, is_one = self._front().exit.fail, len(self.cores) == 1
            await core.adapters.restore(self._env, self.adapters, fail, keeps_unused=not is_one)

    def _process_died(self, core: EngineCore, how: str) -> None:
        self._report_crash("engine", engine_side_error("EngineDied", ()), list(self._front().exit.live))

    def _core_lost(self, core: EngineCore) -> None:
        """Does nothing: the keeper notices when the process has ended."""

    def _check_processes(self, lag_s: float) -> None:
        """Checks that the engine processes make progress; kills one that does not."""
        pipeline = self._front().pipeline
        for core in self.cores:
            if not core.is_due(bool(self._front().exit.live)):
                continue
            if find_stall(pipeline, SUSPECT_S) is None:
                pipeline.stacks_elsewhere = []
            elif self._stack_refresh is None or self._stack_refresh.done():
                self._stack_refresh = asyncio.ensure_future(self.refresh(with_stacks=True))  # for the flight recorder
            stall = self._stall_of(core)
            core.kill_if_stuck(stall if stall is not None and stall.name.partition(".")[0] in CORE else None)

    def _stall_of(self, core: EngineCore) -> Stall | None:
        """Where a process has made no progress for long."""
        return find_stall(self._front().pipeline, STALL_S)

    # -- messages from and to the engine process

    def _receive(self, core: EngineCore, word: Any) -> None:
        """Handles a message of an engine process."""
        if isinstance(word, ModelLoading):
            if core.index == 0:
                self.load_progress.follow(word.state)
            return
        parts = self._parts
        if not isinstance(parts, FrontStages):
            return  # not started yet, or stopped
        match word:
            case CoreReport():
                core.note_report(word)
                self._note_report(core)
            case ServiceTimes():
                for request_id, service_us in word.times_us.items():
                    parts.exit.note_service(request_id, word.stage, service_us)
            case Admitted():
                self._table.admit(word.sequence_ids)
            case RequestFailed():
                if word.code == LOAD_FAILED and parts.adapters is not None:
                    parts.adapters.lose(word.request_id)
                parts.exit.fail(word.request_id, word.error())
            case Crashed():
                self._report_crash(word.stage, engine_side_error(word.error, word.stack), word.request_ids)
            case Broken():
                log.error("engine_process.broken", engine=core.index, stage=word.stage, reason=word.reason)
                if core.keeper is not None:
                    core.keeper.note_broken(word.reason)
            case _:
                log.error("link.refused", word=type(word).__name__, reason="not a message of the engine process")

    def _note_report(self, core: EngineCore) -> None:
        """A process has reported the state of its step loop."""
        self._take_report(core.report)

    def _take_report(self, report: CoreReport | None) -> None:
        """Keeps the report of the step loop, for observers."""
        self._report = report
        if report is not None and report.core.cache.blocks is not None:
            self._blocks = report.core.cache.blocks

    def _report_crash(self, stage: str, error: BaseException, request_ids: Sequence[str]) -> None:
        for callback in self._front().pipeline.on_crash:
            callback(stage, error, request_ids)

    def _report_causes(self) -> None:
        """Sends the entries of the control lane, and the ended requests, to the processes that have them."""
        if not isinstance(self._parts, FrontStages):
            return
        gone, self._gone = self._gone, []
        causes = self._parts.pipeline.lane.take()
        for core, some in self._by_core(causes, gone):
            core.post(ControlCauses(some))
        for core in self.cores:
            if ended := [request_id for request_id, _, index in gone if index == core.index]:
                core.post(RequestsEnded(ended))

    def _by_core(
        self, causes: dict[int, str], gone: Sequence[tuple[str, range, int | None]]
    ) -> Iterator[tuple[EngineCore, dict[int, str]]]:
        """The causes for the sequences of each process; `gone` are requests that the table does not have any more."""
        if causes:
            yield self.cores[0], causes

    def _request_ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        core = self._table.core_of(outbox.request_id)
        if self._table.forget(outbox.request_id):
            if not self._gone:
                asyncio.get_running_loop().call_soon(self._report_causes, context=Context())
            request = outbox.request
            first = request.first_sequence_id
            self._gone.append((outbox.request_id, range(first, first + request.num_sequences), core))

    def _refused(self, request: TokenRequest, error: WireError) -> None:
        """Fails a request that cannot be encoded for the link."""
        code = "engine_version" if isinstance(error, VersionError) else "internal_error"
        failed = Failed(f"this request cannot be sent to the engine process: {error}", code=code)
        self._front().exit.fail(request.request_id, failed)

    async def _ask_there(self, what: str, faults: Sequence[Fault] = (), timeout_s: float = ANSWER_S) -> list[Any]:
        """The answers of the engine processes, of those that give one. Raises `NotServing` if none does."""
        asked = [core.ask(what, faults, timeout_s) for core in self.cores]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, (EngineDied, TimeoutError)):
                raise answer
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not found:
            raise NotServing(self.health)
        return found

    # -- inspection

    async def refresh(self, *, with_blocks: bool = False, with_stacks: bool = False) -> None:
        with suppress(NotServing):  # then the last reported state stays
            await super().refresh()
            await self._ask_there("blocks" if with_blocks else "books", timeout_s=REFRESH_S)
            if with_stacks:
                stacks = await self._ask_there("stacks", timeout_s=REFRESH_S)
                if self._parts is None:
                    return  # stopped meanwhile
                self._front().pipeline.stacks_elsewhere = [stack for one in stacks for stack in one]

    async def prefix_tree(self) -> dict[str, Any] | None:
        """Of several engine processes, the tree of the first one, without the slots of its users."""
        first, *others = await self._ask_there("prefixes", timeout_s=REFRESH_S)
        if first is not None and others:
            for node in first["nodes"].values():
                node["slots"] = []
        return cast("dict[str, Any] | None", first)

    async def forget_prefixes(self) -> int:
        return sum(await self._ask_there("forget_prefixes"))

    def reset_prefix_cache(self) -> int:
        """Raises: the blocks are in another process. Use `forget_prefixes`."""
        raise RuntimeError("mode = split: await forget_prefixes() instead, as the engine is another process")

    def status(self, *, with_sequences: bool = False, with_blocks: bool = False) -> EngineStatus:
        """As `Engine.status`. The blocks are those of the last `refresh` with blocks; None before."""
        pipeline, core = self.pipeline.status(), self._reported().core
        owners: Mapping[int, str] = {}
        if (with_sequences or with_blocks) and core.sequences is not None:
            owners = owners_of(core.sequences, self._table.request_id)
        if with_blocks:
            core = replace(core, cache=replace(core.cache, blocks=self._blocks))
        return EngineStatus(pipeline, core, owners)

    def _reported(self) -> CoreReport:
        """The last report of the step loop. Raises `NotServing` if there is none."""
        if self._parts is None or self._report is None:
            raise NotServing(self.health)
        return self._report

    def _join(self, own: PipelineStatus) -> PipelineStatus:
        """The status of all stages; before the first report of those in this process."""
        if self._joined is None or self._report is None:
            return own
        return self._joined.join(own, self._report.stages, self._report.channels)

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

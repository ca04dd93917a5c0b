"""`RemoteCore`: the step loop of an engine in processes of its own.

So HTTP and text never delay a step. When an engine process dies, another one is started, and resumes every request
where the first stopped. No token is sent twice. All code here runs on the front process's event loop.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.fault_injection import Fault
from ...runtime.health.stalls import Stall, find_stall
from ...runtime.joined_status import JoinedPipeline
from ...runtime.pipeline import Health, NotServing, Pipeline
from ...runtime.pipeline_status import PipelineStatus
from ...runtime.processes.type_fields import VersionError
from ...runtime.processes.wire import WireError
from ...runtime.startup.phases import Phases
from ...runtime.wakeups import OncePerTurn
from ..config import EngineConfig
from ..engine.core import EngineSetup, WarmUp
from ..engine.engine_status import CoreReport, EngineStatus
from ..engine.front_status import read_front
from ..engine.placed_stages import PlacedStage
from ..engine.read_status import owners_of
from ..engine.warm_up import warm_up
from ..engine.wiring import JoinedStages, LoadedText
from ..errors import ConfigError, Failed
from ..exit.outboxes import RequestOutbox
from ..messages import TokenRequest
from ..outputs import ModelInfo
from ..routing.engine_load import EngineLoad
from ..routing.reports import KeyChange
from ..schedule.scheduler import LOAD_FAILED
from ..traffic.traffic_rules import Traffic
from .engine_core import EngineCore
from .front import CORE, FrontStages, TriedGrammars, join_with_loop
from .process_client import ANSWER_S, MODULE, EngineClient, EngineDied
from .processes import OneProcess, Processes
from .protocol import (
    Admitted,
    Broken,
    ControlCauses,
    Crashed,
    Draining,
    Gone,
    ModelLoading,
    RequestFailed,
    RequestsEnded,
    ServiceTimes,
    engine_side_error,
)

SUSPECT_S = 2.0  # without progress: it is asked for the stacks of its tasks
REFRESH_S = 0.5  # that `refresh` waits for new state

MakeProcesses = Callable[[EngineSetup, "RemoteCore"], Processes]
ReadText = Callable[[EngineConfig, Phases, Env], Awaitable[Callable[[ModelInfo], LoadedText]]]

log = get_logger("millrace.stages")


async def read_text(config: EngineConfig, phases: Phases, env: Env) -> Callable[[ModelInfo], LoadedText]:
    """Reads a model's tokenizer and templates in a thread; returns what completes them by the model's info."""
    from ..loading.model import load_text

    return await env.run_in_thread(load_text, config, phases)


async def read_text_alone(config: EngineConfig, phases: Phases, env: Env) -> Callable[[ModelInfo], LoadedText]:
    """As `read_text`, without the weights, which only engines elsewhere have."""
    from ..loading.model import load_text

    return await env.run_in_thread(partial(load_text, with_weights=False), config, phases)


class RemoteCore:
    """See `Core`. The engine processes report their state a few times a second; `refresh` requests it now.

    They run `module`. `read_text` reads what this process needs of the model, and `warm_up` runs the first requests of
    each process; None: there are none.
    """

    mode: Literal["inline", "split"] = "split"
    stages_elsewhere: Sequence[str] = tuple(CORE)

    def __init__(
        self,
        setup: EngineSetup,
        make_processes: MakeProcesses = OneProcess,
        *,
        module: str = MODULE,
        read_text: ReadText = read_text,
        warm_up: WarmUp | None = warm_up,
    ) -> None:
        self.env, self.module = setup.env, module
        self.processes = make_processes(setup, self)
        if setup.made_processors:
            raise ConfigError(
                f"{self.processes.setting}: a logits processor that was made is in the caller's process; name its "
                f"class, as package.module:Class, or use {self.processes.inline}"
            )
        if setup.opening is not None:
            raise ConfigError(f"{self.processes.setting}: the engine process loads the model itself; give no opening")
        self.front: FrontStages | None = None  # while the stages run
        self._setup = setup
        self._read_text, self._warm_up = read_text, warm_up
        self._joined: JoinedPipeline | None = None  # once the stages run
        self._faults: Sequence[Fault] = ()  # in the engine processes
        self._gone: list[tuple[str, range, int | None]] = []  # ended requests, their sequences, and where they ran
        self._stack_refresh: asyncio.Task[None] | None = None

    # -- before the start

    def sketches(self) -> list[Pipeline]:
        return [self.processes.sketch()]

    def reachable(self, placed: PlacedStage) -> PlacedStage:
        if not placed.place:
            return placed
        side, _, place = self.processes.nearest.get(placed.place, placed.place).partition("=")
        if place.partition(".")[0] in CORE:
            setting, inline = self.processes.setting, self.processes.inline
            where = f"stage = {placed.text}: " if placed.text else ""
            message = f"{setting}: a stage {side} {place} would be in the step loop, which is in another process"
            raise ConfigError(f"{where}{message}: insert it before schedule or after sample, or use {inline}")
        is_after = side == "after"
        return replace(placed, after=place if is_after else None, before=None if is_after else place)

    def check_replaced(self, name: str) -> None:
        if name in CORE:
            setting, inline = self.processes.setting, self.processes.inline
            raise ConfigError(f"{setting}: {name} is in the engine process; use {inline}")

    # -- start and stop

    async def load(self) -> tuple[LoadedText, Phases]:
        """Loads the text parts here, and at the same time the rest in the engine processes."""
        phases, processes = Phases(self.env.now), self.processes
        await processes.open()
        reading = asyncio.ensure_future(self._read_text(processes.config_of_text(), phases, self.env))
        starting = [asyncio.ensure_future(core.start(processes.config_of(core))) for core in processes.starting]
        try:
            with_info, ready = await asyncio.gather(reading, processes.first(starting))
        except BaseException:
            for task in (reading, *starting):
                task.cancel()
            await asyncio.wait([reading, *starting])
            raise
        phases.seconds.update({f"engine_{name}": seconds for name, seconds in ready[0].seconds.items()})
        return with_info(replace(processes.joint_info(ready), startup_s=phases.seconds)), phases

    def join(self, loaded: Any) -> JoinedStages:
        from ..loading.model import make_vocabulary

        grammars = TriedGrammars(lambda: make_vocabulary(loaded.tokenizer, loaded.text_table, loaded.info))
        front = self.front = self.processes.make_front(loaded, grammars)
        front.exit.on_end.append(self._request_ended)
        if self._setup.config.enable_lora:
            front.serve_adapters(self._setup.config, self.processes.adapters)
        return front

    def start_recording(self) -> None:
        """Does nothing: the engine process records."""

    async def warm_up(self) -> None:
        front = self._require_front()
        pipeline = front.pipeline
        for file in (file for core in self.processes.cores for file in core.files):
            pipeline.tracer.adopt(mmap.mmap(file, 0))
        steps_in_flight = self._setup.config.steps_in_flight
        self._joined = join_with_loop(pipeline, self.processes.to_loop, front.tokens.name, steps_in_flight)
        pipeline.join_status = self._join
        pipeline.lane.listen(OncePerTurn(self._report_causes))
        assert pipeline.watch is not None
        pipeline.watch.on_tick.append(self.check_processes)
        if self._warm_up is not None:
            for core in self.processes.starting:
                with self.processes.only(core):
                    await core.warm_up(self._run_first_requests(self._warm_up, front))
        self.processes.start_keepers(front, self._start_again, self._process_died)
        await self._wait_for_report()

    async def _wait_for_report(self) -> None:
        """Observers need a report from now on. Raises `EngineDied` if no process is left that would send one."""
        await self.refresh(with_blocks=False, with_stacks=False)
        while self.processes.report() is None:
            self._require_front()  # the engine may have been stopped
            if (away := self.processes.away) is not None and away.state == "dead":
                raise EngineDied(f"the engine process ended after it had warmed up: {away.full_reason}")
            await self.env.sleep(REFRESH_S / 10)
            await self.refresh(with_blocks=False, with_stacks=False)

    async def _run_first_requests(self, warm_up: WarmUp, front: FrontStages) -> None:
        await warm_up(front.pipeline, front.loaded.info)
        await self.forget_prefixes()

    async def inject(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        await self._ask("inject", faults)

    async def begin_stop(self) -> None:
        await self.processes.stop_keepers()
        self.front = None

    async def stop(self) -> None:
        has_started = self._joined is not None
        try:
            for core in self.processes.cores:
                core.requests.close()
            await asyncio.gather(*(core.stop(has_started=has_started) for core in self.processes.cores))
        finally:
            await self.processes.close()

    def free_memory(self) -> None:
        """Does nothing: the engine processes have ended."""

    # -- when an engine process dies

    @property
    def away(self) -> Health | None:
        return self.processes.away

    @property
    def keeps_requests(self) -> bool:
        return self.processes.keeps_requests

    @property
    def engine_pid(self) -> int | None:
        return self.processes.cores[0].pid

    @property
    def num_deaths(self) -> int:
        return sum(core.keeper.num_deaths for core in self.processes.cores if core.keeper is not None)

    @property
    def engines(self) -> list[dict[str, Any]]:
        return self.processes.engines

    @property
    def choices(self) -> list[dict[str, Any]]:
        return self.processes.choices

    @property
    def served_names(self) -> Sequence[str]:
        told = (core.ready.served_names for core in self.processes.cores if core.ready is not None)
        return next((names for names in told if names), ())

    def warm_prefixes(self) -> list[dict[str, Any]]:
        return self.processes.warm_prefixes()

    @property
    def traffic(self) -> Traffic | None:
        return self.processes.traffic

    def drain_engine(self, index: int, by: str) -> None:
        self.processes.drain(index, by)

    def is_stopped_by(self, stall: Stall) -> bool:
        return self.front is None or self.processes.is_stopped_by(stall, self.front.pipeline)

    async def _start_again(self, core: EngineCore) -> EngineClient:
        return await self.processes.start_again(core, partial(self._prepare, core))

    async def _prepare(self, core: EngineCore) -> None:
        """Brings a successor to the state of its predecessor."""
        if self._faults:
            try:
                await core.ask("inject", self._faults, ANSWER_S)
            except (EngineDied, TimeoutError):
                raise NotServing(self._setup.health()) from None
        front = self._require_front()
        if front.adapters is not None:
            keeps_unused = len(self.processes.cores) > 1
            await core.adapters.restore(self.env, front.adapters, front.exit.fail, keeps_unused=keeps_unused)

    def _process_died(self, core: EngineCore) -> None:
        request_ids = self.processes.requests_of(core, self._require_front().exit.live)
        self._report_crash("engine", engine_side_error("EngineDied", ()), request_ids)

    def core_lost(self, core: EngineCore) -> None:
        """The link of a process has ended; nothing comes from it any more."""
        self.processes.note_lost(core)

    def check_processes(self, lag_s: float) -> None:
        """Checks that the engine processes make progress; kills one that does not."""
        if (front := self.front) is None:
            return
        pipeline, has_work = front.pipeline, bool(front.exit.live)
        for core in self.processes.cores:
            if not core.is_due(has_work):
                continue
            if core.is_silent and self.processes.may_leave(core):
                core.leave()
                continue
            if find_stall(pipeline, SUSPECT_S) is None:
                pipeline.stacks_elsewhere = []
            elif self._stack_refresh is None or self._stack_refresh.done():
                refresh = self.refresh(with_blocks=False, with_stacks=True)  # for the flight recorder
                self._stack_refresh = asyncio.ensure_future(refresh)
            stall = self.processes.stall_of(core, pipeline)
            core.kill_if_stuck(stall if stall is not None and stall.name.partition(".")[0] in CORE else None)

    # -- messages from and to the engine processes

    def receive(self, core: EngineCore, word: Any) -> None:
        """Handles a message of an engine process."""
        if isinstance(word, ModelLoading):
            if core.index == 0:
                self._setup.load_progress.follow(word.state)
            return
        if isinstance(word, Draining):
            log.info("engine_process.draining", engine=core.index, migrates=word.migrates)
            return self.processes.note_draining(core, migrates=word.migrates)
        if isinstance(word, Gone):
            return self.processes.note_gone(core)
        if isinstance(word, KeyChange):  # also before the start: an engine of several fronts has cached blocks then
            self.processes.note_router_report(core, word)
        if (front := self.front) is None:
            return  # not started yet, or stopped
        match word:
            case KeyChange():
                pass
            case CoreReport():
                core.note_report(word)
                self.processes.note_report(core)
            case EngineLoad():
                self.processes.note_router_report(core, word)
            case ServiceTimes():
                for request_id, service_us in word.times_us.items():
                    front.exit.note_service(request_id, word.stage, service_us)
            case Admitted():
                self.processes.table.admit(word.sequence_ids)
            case RequestFailed() if self.processes.note_copy_failed(word.request_id, word.reason or word.kind):
                pass
            case RequestFailed():
                if word.code == LOAD_FAILED and front.adapters is not None:
                    front.adapters.lose(word.request_id)
                front.exit.fail(word.request_id, word.error())
            case Crashed():
                self._report_crash(word.stage, engine_side_error(word.error, word.stack), word.request_ids)
            case Broken():
                log.error("engine_process.broken", engine=core.index, stage=word.stage, reason=word.reason)
                if core.keeper is not None:
                    core.keeper.note_broken(word.reason)
            case _:
                log.error("link.refused", word=type(word).__name__, reason="not a message of the engine process")

    def _report_crash(self, stage: str, error: BaseException, request_ids: Sequence[str]) -> None:
        for callback in self._require_front().pipeline.on_crash:
            callback(stage, error, request_ids)

    def _report_causes(self) -> None:
        """Sends the entries of the control lane, and the ended requests, to the processes that have them."""
        if self.front is None:
            return
        gone, self._gone = self._gone, []
        for core, causes in self.processes.by_core(self.front.pipeline.lane.take(), gone):
            core.post(ControlCauses(causes))
        for core in self.processes.cores:
            if ended := [request_id for request_id, _, index in gone if index == core.index]:
                core.post(RequestsEnded(ended))

    def _request_ended(self, outbox: RequestOutbox, cause: str, error: BaseException | None) -> None:
        table = self.processes.table
        core = table.core_of(outbox.request_id)
        if table.forget(outbox.request_id):
            if not self._gone:
                asyncio.get_running_loop().call_soon(self._report_causes, context=Context())
            request = outbox.request
            first = request.first_sequence_id
            self._gone.append((outbox.request_id, range(first, first + request.num_sequences), core))

    def refuse(self, request: TokenRequest, error: WireError) -> None:
        """Fails a request that cannot be encoded for the link."""
        if self.processes.note_copy_failed(request.request_id, str(error)):
            return
        code = "engine_version" if isinstance(error, VersionError) else "internal_error"
        failed = Failed(f"this request cannot be sent to the engine process: {error}", code=code)
        self._require_front().exit.fail(request.request_id, failed)

    async def _ask(self, what: str, faults: Sequence[Fault] = (), timeout_s: float = ANSWER_S) -> list[Any]:
        """The answers of the engine processes, of those that give one. Raises `NotServing` if none does."""
        asked = [core.ask(what, faults, timeout_s) for core in self.processes.cores]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, (EngineDied, TimeoutError)):
                raise answer
        found = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not found:
            raise NotServing(self._setup.health())
        return found

    # -- inspection

    async def refresh(self, *, with_blocks: bool, with_stacks: bool) -> None:
        with suppress(NotServing):  # then the last reported state stays
            if (watch := self._require_front().pipeline.watch) is not None:
                watch.write_stage_times()
            await self._ask("blocks" if with_blocks else "books", timeout_s=REFRESH_S)
            if with_stacks:
                stacks = await self._ask("stacks", timeout_s=REFRESH_S)
                self._require_front().pipeline.stacks_elsewhere = [stack for one in stacks for stack in one]
        self.processes.report()

    async def prefix_tree(self) -> dict[str, Any] | None:
        """That of the first process; of several, without the slots of its users."""
        answers: list[dict[str, Any] | None] = await self._ask("prefixes", timeout_s=REFRESH_S)
        first, *others = answers
        if first is not None and others:
            for node in first["nodes"].values():
                node["slots"] = []
        return first

    async def forget_prefixes(self) -> int:
        return sum(await self._ask("forget_prefixes"))

    def status(self, *, with_sequences: bool, with_blocks: bool) -> EngineStatus:
        front = self._require_front()
        if (report := self.processes.report()) is None:
            raise NotServing(self._setup.health())
        core, owners = report.core, dict[int, str]()
        if (with_sequences or with_blocks) and core.sequences is not None:
            owners = dict(owners_of(core.sequences, self.processes.table.request_id))
        if with_blocks:
            core = replace(core, cache=replace(core.cache, blocks=self.processes.blocks))
        return EngineStatus(front.pipeline.status(), read_front(front), core, owners)

    def _join(self, own: PipelineStatus) -> PipelineStatus:
        """The status of all stages; before the first report of those in this process."""
        report = self.processes.report()
        if self._joined is None or report is None:
            return own
        own = replace(own, channels={**self.processes.own_channels(), **own.channels})
        return self._joined.join(own, report.stages, report.channels)

    def _require_front(self) -> FrontStages:
        if self.front is None:
            raise NotServing(self._setup.health())
        return self.front

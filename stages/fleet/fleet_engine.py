"""`FleetEngine`: an engine whose step loop runs in several processes, each with all of the model.

Requests go to the process with the least work. When a process dies, its requests go on in the others, and another one
takes its place. No token is sent twice. All code here runs on the front process's event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, cast

from ...runtime.env.cpus import Cpus
from ...runtime.health.stalls import Stall, find_stall
from ...runtime.pipeline import Health, NotServing, Pipeline
from ...runtime.pipeline_status import PipelineStatus, channel_status
from ...runtime.trace.format import MAX_U32
from ..config import EngineConfig
from ..engine.engine_status import CoreReport
from ..engine.wiring import CLASSES, sketch
from ..errors import ConfigError
from ..executor.engine_host import StartHost
from ..outputs import ModelInfo
from ..pipeline import TO_CORES, build_fleet_pipeline
from ..split.engine_core import EngineCore
from ..split.front import CORE, FrontStages
from ..split.inflight_requests import InflightRequests
from ..split.process_client import EngineClient
from ..split.protocol import EngineReady, engine_side_error
from ..split.remote_adapters import AdaptersThere
from ..split.split_engine import STALL_S, SplitEngine
from .core_keeper import CoreKeeper
from .core_set import CoreSet
from .fleet_adapters import FleetAdapters
from .fleet_requests import FleetRequests
from .front import DISPATCHED, FleetStages, dispatched_status, make_merged
from .merged_status import merged, remains
from .placement import Place, check, environment_here, places
from .resuming import Resuming
from .stage import Dispatch, Merge

SAME = ("model_id", "device", "dtype", "vocab_size", "attention_backend", "block_size")  # of all processes' models


class FleetEngine(SplitEngine):
    """An `Engine` with `data_parallel_size` engine processes. It takes requests while one of them serves."""

    nearest: ClassVar[dict[str, str]] = {
        "before=schedule": "after=tokenize",
        "after=sample": "after=merge",
        "before=merge": "after=merge",
        "after=dispatch": "before=dispatch",
    }
    to_loop = TO_CORES
    max_engines = 64

    def _make_cores(self) -> tuple[InflightRequests, Sequence[EngineCore]]:
        count = self.config.data_parallel_size
        check(self.config)
        self._merged = make_merged(count, self._env.now)
        self._places = self._make_places()
        self._reports: dict[int, CoreReport] = {}  # by core, of those that live
        self._is_merged = False  # whether the report of all has the last one of each
        self._ended: CoreReport | None = None  # the counts of those that have died
        self._resuming: Resuming | None = None
        table = FleetRequests(count)
        cores = [
            EngineCore(
                self,
                table,
                index,
                make_tokens=partial(self._merged.add_end, index),
                first_step=index * (MAX_U32 // count),  # steps of different processes have different numbers
                cpus=place.cpus,
                environment=place.environment,
                start_host=self._start_host_of(index),
            )
            for index, place in enumerate(self._places)
        ]
        self._set = CoreSet(cores, table)
        return table, cores

    def _start_host_of(self, index: int) -> StartHost | None:
        """Starts an engine process in another way; None: as a child of this one."""
        return None

    def _make_places(self) -> list[Place]:
        return places(self.config, Cpus.of_this_process(), environment_here())

    def _config_of(self, core: EngineCore) -> EngineConfig:
        config = self._places[core.index].config
        if core.keeper is None:
            return config
        # the others hold their memory already: what is free is for those that are being started
        aways = [one.keeper.away for one in self.cores if one.keeper is not None and not one.is_serving]
        num_starting = sum(away is None or away.state != "dead" for away in aways)
        return replace(config, data_parallel_size=max(1, num_starting))

    def _joint_info(self, ready: Sequence[EngineReady]) -> ModelInfo:
        """The model of all processes, with the blocks of all. Raises `ConfigError` if they differ."""
        first, *others = [one.info for one in ready]
        for index, info in enumerate(others, 1):
            for name in SAME:
                if (found := getattr(info, name)) != (due := getattr(first, name)):
                    message = f"data_parallel_size = {len(ready)}: engine process {index} has {name} = {found}, and"
                    raise ConfigError(f"{message} the first one {due}; lower it, or set {name} where that is a setting")
        if any(one.files != ready[0].files for one in ready):
            raise ConfigError("the model's files changed while the engine processes loaded them; start again")
        infos = [first, *others]
        return replace(
            first,
            num_blocks=sum(info.num_blocks for info in infos),
            num_host_blocks=sum(info.num_host_blocks for info in infos),
            max_model_len=min(info.max_model_len for info in infos),
        )

    def _make_front(self, loaded: Any) -> FrontStages:
        table = cast(FleetRequests, self._table)
        return FleetStages(self.config, loaded, self._grammars(loaded), table, self._set, self._merged)

    def _adapters_there(self) -> AdaptersThere:
        return FleetAdapters(self.cores, self._core_changed)

    def _sketches(self) -> list[Pipeline]:
        return [sketch(build_fleet_pipeline, CLASSES | {"dispatch": Dispatch, "merge": Merge})]

    # -- start and stop

    async def _warm_up_or_die(self, core: EngineCore) -> None:
        self._set.only = core
        try:
            await super()._warm_up_or_die(core)
        finally:
            self._set.only = None

    def _start_keepers(self, parts: FrontStages) -> None:
        table = cast(FleetRequests, self._table)
        resuming = self._resuming = Resuming(self._env, self.config, table, self._set, parts.exit)
        resuming.start()
        for core in self.cores:
            core.keeper = CoreKeeper(
                self._env,
                table,
                core,
                parts.exit,
                partial(self._start_again, core),
                partial(self._process_died, core),
                on_orphans=self._core_changed,
                on_ready=self._core_changed,
                on_given_up=self._core_given_up,
            )
            assert core.client is not None
            core.keeper.start(core.client)

    async def _stop_keepers(self) -> None:
        if self._resuming is not None:
            await self._resuming.stop()
        await super()._stop_keepers()

    async def _start_again(self, core: EngineCore) -> EngineClient:
        client = await super()._start_again(core)
        if core.info is None or any(getattr(core.info, name) != getattr(self.info, name) for name in SAME):
            client.kill()
            await client.stop(0.0)
            raise ConfigError("the engine process runs the model otherwise than the others")
        return client

    # -- deaths

    @property
    def _away(self) -> Health | None:
        if any(core.is_serving for core in self.cores):
            return None
        reasons = [core.keeper.away for core in self.cores if core.keeper is not None and core.keeper.away is not None]
        alive = [away for away in reasons if away.state != "dead"]
        if not alive and len(reasons) == len(self.cores):
            return reasons[0]
        return alive[0] if alive else Health("loading", stage="engine", reason="no engine process is left; some start")

    def _core_lost(self, core: EngineCore) -> None:
        if (report := self._reports.pop(core.index, None)) is not None:
            self._ended = merged({0: remains(report)}, [] if self._ended is None else [self._ended], 0)
            self._is_merged = False
        self._set.note_change()

    def _core_changed(self) -> None:
        """A process has ended, or serves again, or has an adapter that others had before."""
        if self._resuming is not None:
            self._resuming.wake()
        self._set.note_change()

    def _core_given_up(self, health: Health) -> None:
        """Ends all requests if no process is left, or is to be started."""
        aways = [None if core.keeper is None else core.keeper.away for core in self.cores]
        if all(away is not None and away.state == "dead" for away in aways):
            exit = self._front().exit
            for request_id in list(exit.live):
                exit.end(request_id, "error", NotServing(health))
        self._set.note_change()

    def _process_died(self, core: EngineCore, how: str) -> None:
        there = [one for one in self._table.request_ids() if self._table.core_of(one) == core.index]
        self._report_crash("engine", engine_side_error("EngineDied", ()), there)

    def is_stopped_by(self, stall: Stall) -> bool:
        is_there = stall.name.partition(".")[0] in CORE or stall.name == DISPATCHED
        return not (is_there and any(self._goes_on(core, stall.waited_s) for core in self.cores))

    def _goes_on(self, core: EngineCore, timeout_s: float) -> bool:
        return core.is_serving and not core.is_silent and self._stall_in(core, timeout_s) is None

    def _stall_of(self, core: EngineCore) -> Stall | None:
        return self._stall_in(core, STALL_S)

    def _stall_in(self, core: EngineCore, timeout_s: float) -> Stall | None:
        """Where one process has made no progress for so long, though it has requests."""
        report = core.report
        if report is None or cast(FleetRequests, self._table).is_idle(core.index):
            return None
        channels = {one.name: one for one in (*report.channels, channel_status(core.requests))}
        status = PipelineStatus({stage.name: stage for stage in report.stages}, channels, ())
        return find_stall(self._front().pipeline, timeout_s, status)

    # -- state

    def _by_core(
        self, causes: dict[int, str], gone: Sequence[tuple[str, range, int | None]]
    ) -> Iterator[tuple[EngineCore, dict[int, str]]]:
        ended = {sequence_id: core for _, sequence_ids, core in gone for sequence_id in sequence_ids}
        parts: dict[int, dict[int, str]] = {}
        for sequence_id, cause in causes.items():
            index = ended.get(sequence_id)
            if sequence_id not in ended:
                index = self._table.core_of(self._table.request_id(sequence_id) or "")
            if index is not None:
                parts.setdefault(index, {})[sequence_id] = cause
        for index, part in parts.items():
            yield self.cores[index], part

    def _note_report(self, core: EngineCore) -> None:
        assert core.report is not None
        self._reports[core.index] = core.report
        self._is_merged = False

    def _merge(self) -> None:
        """Makes one report of those of all processes, if there is a new one. It takes half a millisecond."""
        if self._reports and not self._is_merged:
            self._is_merged = True
            ended = [] if self._ended is None else [self._ended]
            reports = dict(sorted(self._reports.items()))
            self._take_report(merged(reports, ended, self.config.max_num_seqs, len(self.cores)))

    def _reported(self) -> CoreReport:
        self._merge()
        return super()._reported()

    def _join(self, own: PipelineStatus) -> PipelineStatus:
        self._merge()
        dispatched = {DISPATCHED: dispatched_status(self.cores)}
        return super()._join(replace(own, channels={**dispatched, **own.channels}))

    async def refresh(self, *, with_blocks: bool = False, with_stacks: bool = False) -> None:
        await super().refresh(with_blocks=with_blocks, with_stacks=with_stacks)
        self._merge()

    @property
    def engines(self) -> list[dict[str, Any]]:
        table = cast(FleetRequests, self._table)
        return [
            {
                "index": core.index,
                "pid": core.pid,
                "state": _state(core),
                "reason": _missing_reason(core),
                "num_deaths": 0 if core.keeper is None else core.keeper.num_deaths,
                "num_requests": (load := table.load_of(core.index)).num_requests,
                "work": load.work,
            }
            for core in self.cores
        ]


def _state(core: EngineCore) -> str:
    if core.is_serving:
        return "ready"
    return "loading" if core.keeper is None or core.keeper.away is None else core.keeper.away.state


def _missing_reason(core: EngineCore) -> str | None:
    """Why a process takes no requests; None if it does."""
    if core.is_serving:
        return None
    away = None if core.keeper is None else core.keeper.away
    return "its process has ended" if away is None else away.reason

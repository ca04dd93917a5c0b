"""The engine processes of one engine, as its core sees them: one (`OneProcess`), or several (`stages/fleet`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from ...runtime.health.stalls import Stall, find_stall
from ...runtime.pipeline import Health, Pipeline
from ...runtime.pipeline_status import ChannelStatus
from ..config import EngineConfig
from ..engine.core import EngineSetup, check_num_engines, refuse_ray
from ..engine.engine_status import BlockStatus, CoreReport
from ..engine.wiring import LoadedText, sketch
from ..grammar.compiled import Grammars
from ..outputs import ModelInfo
from ..pipeline import TO_SCHEDULE, build_front_pipeline
from ..routing.engine_load import EngineLoad
from ..routing.reports import KeyChange
from ..traffic.traffic_rules import Traffic
from .engine_core import CoreOwner, EngineCore
from .front import FrontStages
from .inflight_requests import InflightRequests
from .process_client import EngineClient
from .process_keeper import ProcessKeeper
from .protocol import EngineReady
from .remote_adapters import AdaptersThere

STALL_S = 300.0  # without progress, though it sends messages: it is replaced; a large step on a slow machine is shorter

StartAgain = Callable[[EngineCore], Awaitable[EngineClient]]
Gone = Sequence[tuple[str, range, int | None]]  # ended requests, their sequences, and the process where they ran


class Processes(Protocol):
    """What differs by the number of engine processes, and by what starts them."""

    @property
    def cores(self) -> Sequence[EngineCore]: ...
    @property
    def table(self) -> InflightRequests: ...
    @property
    def adapters(self) -> AdaptersThere: ...
    @property
    def blocks(self) -> BlockStatus | None: ...  # those of the last report that had them
    @property
    def setting(self) -> str: ...  # the setting that puts the step loop elsewhere, for errors
    @property
    def inline(self) -> str: ...  # the settings that have it in this process
    @property
    def to_loop(self) -> tuple[str, str]: ...  # the channel to the step loop
    @property
    def nearest(self) -> Mapping[str, str]: ...  # the places at the ends of the step loop, by what is in this process
    def sketch(self) -> Pipeline: ...

    async def open(self) -> None: ...  # called before the first process starts
    @property
    def starting(self) -> Sequence[EngineCore]: ...  # those with a process when the engine starts
    async def first(self, starting: Sequence[asyncio.Future[EngineReady]]) -> list[EngineReady]:
        """Waits until enough of the `starting` are ready."""

    def config_of(self, core: EngineCore) -> EngineConfig: ...  # the settings of an engine process
    def config_of_text(self) -> EngineConfig: ...  # the settings with which this process looks for the model's files
    def joint_info(self, ready: Sequence[EngineReady]) -> ModelInfo: ...  # the model of all processes
    def make_front(self, loaded: LoadedText, grammars: Grammars) -> FrontStages: ...

    def only(self, core: EngineCore) -> AbstractContextManager[object]:
        """While it lasts, this process gets all requests."""

    def start_keepers(
        self, front: FrontStages, start_again: StartAgain, on_death: Callable[[EngineCore], object]
    ) -> None:
        """From now on a process that dies is replaced."""

    async def start_again(self, core: EngineCore, prepare: Callable[[], Awaitable[object]]) -> EngineClient:
        """Starts a successor of a process. Raises whatever prevents that."""

    async def stop_keepers(self) -> None: ...

    async def close(self) -> None: ...  # frees what belongs to all processes. Idempotent
    @property
    def away(self) -> Health | None: ...  # why no process takes requests; None if one does
    @property
    def keeps_requests(self) -> bool: ...  # whether requests are taken meanwhile, and wait for a process
    @property
    def engines(self) -> list[dict[str, Any]]: ...
    @property
    def choices(self) -> list[dict[str, Any]]: ...  # as `Engine.choices`
    @property
    def traffic(self) -> Traffic | None: ...  # as `Engine.traffic`
    def warm_prefixes(self) -> list[dict[str, Any]]: ...  # as `Engine.warm_prefixes`

    def note_lost(self, core: EngineCore) -> None: ...  # nothing comes from the process any more
    def note_draining(self, core: EngineCore, *, migrates: bool) -> None:
        """A process takes no new requests; or, if it `migrates` them, none at all."""

    def note_gone(self, core: EngineCore) -> None: ...  # a process closes its link by plan
    def drain(self, index: int, by: str) -> None: ...  # as `Engine.drain_engine`
    def requests_of(self, core: EngineCore, live: Iterable[str]) -> list[str]:
        """Those of the live requests that are in a process."""

    def is_stopped_by(self, stall: Stall, pipeline: Pipeline) -> bool: ...

    def stall_of(self, core: EngineCore, pipeline: Pipeline) -> Stall | None:
        """Where a process has made no progress for `STALL_S`."""

    def may_leave(self, core: EngineCore) -> bool:
        """Whether the link of a silent process is closed now, so that its requests go on in others."""

    def by_core(self, causes: dict[int, str], gone: Gone) -> Iterable[tuple[EngineCore, dict[int, str]]]:
        """The causes for the sequences of each process; `gone` are requests that the table does not have any more."""

    def note_copy_failed(self, request_id: str, reason: str) -> bool:
        """A request has failed in a process; returns whether no client waits for it."""

    def note_report(self, core: EngineCore) -> None: ...  # a process has reported the state of its step loop
    def note_router_report(self, core: EngineCore, report: EngineLoad | KeyChange) -> None:
        """A process has reported its load, or what it has cached."""

    def report(self) -> CoreReport | None: ...  # the state of all step loops, as of one; None before the first report
    def own_channels(self) -> Mapping[str, ChannelStatus]: ...  # channels of this process that are in no pipeline


class OneProcess:
    """See `Processes`."""

    to_loop = TO_SCHEDULE
    nearest: Mapping[str, str] = {"before=schedule": "after=tokenize", "after=sample": "before=detokenize"}
    setting, inline = "mode = split", "mode = inline"
    engines: list[dict[str, Any]] = []  # noqa: RUF012 - of a fleet only
    choices: list[dict[str, Any]] = []  # noqa: RUF012 - likewise
    traffic = None

    def __init__(self, setup: EngineSetup, owner: CoreOwner) -> None:
        check_num_engines(setup.config, 1)
        refuse_ray(setup.config)
        self._setup = setup
        self.table = InflightRequests()
        self._core = EngineCore(owner, self.table)
        self.cores: Sequence[EngineCore] = (self._core,)
        self.blocks: BlockStatus | None = None
        self.adapters: AdaptersThere = self._core.adapters

    def sketch(self) -> Pipeline:
        return sketch(build_front_pipeline)

    async def open(self) -> None:
        """Does nothing."""

    @property
    def starting(self) -> Sequence[EngineCore]:
        return self.cores

    async def first(self, starting: Sequence[asyncio.Future[EngineReady]]) -> list[EngineReady]:
        return list(await asyncio.gather(*starting))

    def config_of(self, core: EngineCore) -> EngineConfig:
        return self._setup.config

    def config_of_text(self) -> EngineConfig:
        return self._setup.config

    def joint_info(self, ready: Sequence[EngineReady]) -> ModelInfo:
        return ready[0].info

    def make_front(self, loaded: LoadedText, grammars: Grammars) -> FrontStages:
        core = self._core
        return FrontStages(self._setup.config, loaded, grammars, self.table, core.requests, core.tokens)

    def only(self, core: EngineCore) -> AbstractContextManager[object]:
        return nullcontext()

    def start_keepers(
        self, front: FrontStages, start_again: StartAgain, on_death: Callable[[EngineCore], object]
    ) -> None:
        core, env = self._core, self._setup.env
        again, died = (lambda: start_again(core)), (lambda how: on_death(core))
        core.keeper = ProcessKeeper(env, self.table, core.requests, front.exit, again, died)
        assert core.client is not None
        core.keeper.start(core.client)

    async def start_again(self, core: EngineCore, prepare: Callable[[], Awaitable[object]]) -> EngineClient:
        return await core.start_again(self._setup.config, prepare)

    async def stop_keepers(self) -> None:
        if self._core.keeper is not None:
            await self._core.keeper.stop()

    async def close(self) -> None:
        """Does nothing."""

    @property
    def away(self) -> Health | None:
        return None if self._core.keeper is None else self._core.keeper.away

    @property
    def keeps_requests(self) -> bool:
        return False  # the model is loaded again, which may take minutes

    def note_lost(self, core: EngineCore) -> None:
        """Does nothing: the keeper notices when the process has ended."""

    def note_draining(self, core: EngineCore, *, migrates: bool) -> None:
        """Does nothing: there is no other one."""

    def note_gone(self, core: EngineCore) -> None:
        """Does nothing: the keeper notices when the process has ended."""

    def drain(self, index: int, by: str) -> None:
        raise LookupError("there is one engine process, and no other one for its requests")

    def requests_of(self, core: EngineCore, live: Iterable[str]) -> list[str]:
        return list(live)

    def is_stopped_by(self, stall: Stall, pipeline: Pipeline) -> bool:
        return True

    def stall_of(self, core: EngineCore, pipeline: Pipeline) -> Stall | None:
        return find_stall(pipeline, STALL_S)

    def may_leave(self, core: EngineCore) -> bool:
        return False

    def by_core(self, causes: dict[int, str], gone: Gone) -> Iterable[tuple[EngineCore, dict[int, str]]]:
        return [(self._core, causes)] if causes else []

    def warm_prefixes(self) -> list[dict[str, Any]]:
        return []

    def note_copy_failed(self, request_id: str, reason: str) -> bool:
        return False

    def note_report(self, core: EngineCore) -> None:
        if core.report is not None and core.report.core.cache.blocks is not None:
            self.blocks = core.report.core.cache.blocks

    def note_router_report(self, core: EngineCore, report: EngineLoad | KeyChange) -> None:
        """There is nothing to choose."""

    def report(self) -> CoreReport | None:
        return self._core.report

    def own_channels(self) -> Mapping[str, ChannelStatus]:
        return {}

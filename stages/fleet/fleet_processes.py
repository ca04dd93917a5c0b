"""`FleetProcesses`: an engine whose step loop runs in several processes, each with all of the model.

Requests go to the process that answers soonest. When a process dies, its requests go on in the others, and another one
takes its place. No token is sent twice. All code here runs on the front process's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ...runtime.health.stalls import Stall, find_stall
from ...runtime.pipeline import Health, NotServing, Pipeline
from ...runtime.pipeline_status import ChannelStatus, PipelineStatus, channel_status
from ...runtime.trace.format import MAX_U32
from ..config import EngineConfig
from ..engine.core import EngineSetup, check_num_engines
from ..engine.engine_status import BlockStatus, CoreReport
from ..engine.wiring import CLASSES, LoadedText, sketch
from ..errors import ConfigError
from ..exit.outboxes import Outboxes
from ..grammar.compiled import Grammars
from ..intake.admission import EngineQueues
from ..outputs import ModelInfo
from ..pipeline import TO_CORES, build_fleet_pipeline
from ..routing.engine_load import EngineLoad
from ..routing.reports import KeyChange
from ..split.engine_core import STOP_S, CoreOwner, EngineCore
from ..split.front import CORE, FrontStages
from ..split.process_client import EngineClient
from ..split.processes import STALL_S, Gone, StartAgain
from ..split.protocol import EngineReady
from ..traffic.traffic_rules import TrafficRules
from .core_keeper import CoreKeeper, RestartPauses, link_pauses
from .core_set import CoreSet
from .departures import Departures, DrainOrders
from .fleet_adapters import FleetAdapters
from .fleet_requests import FleetRequests
from .fleet_router import FleetRouter
from .front import DISPATCHED, FleetStages, dispatched_status, make_merged
from .hosts import GIVEN_UP, MAX_ENGINES, NOT_REACHED, HereHosts, MakeHosts, list_of_reasons
from .merged_status import merged, remains
from .request_hold import RequestHold
from .resuming import Resuming
from .stage import Dispatch, Merge
from .traffic.fleet_traffic import FleetTraffic


class FleetProcesses:
    """See `Processes` and `Fleet`. The engine takes requests while one of the processes serves."""

    to_loop = TO_CORES
    nearest: Mapping[str, str] = {
        "before=schedule": "after=tokenize",
        "after=sample": "after=merge",
        "before=merge": "after=merge",
        "after=dispatch": "before=dispatch",
    }

    def __init__(
        self,
        setup: EngineSetup,
        owner: CoreOwner,
        make_hosts: MakeHosts = HereHosts,
        traffic: TrafficRules | None = None,
    ) -> None:
        count = setup.config.data_parallel_size
        check_num_engines(setup.config, MAX_ENGINES)
        self._setup = setup
        self.hosts = make_hosts(setup)
        self._merged = make_merged(count, setup.env.now)
        self._reports: dict[int, CoreReport] = {}  # by core, of those that live
        self._report: CoreReport | None = None  # of all; of those that lived last, if none does
        self._is_merged = False  # whether it has the last one of each
        self._ended: CoreReport | None = None  # the counts of those that have died
        self.blocks: BlockStatus | None = None
        self.resuming: Resuming | None = None
        self._front: FrontStages | None = None
        self.table = FleetRequests(count)
        self.cores = [
            EngineCore(
                owner,
                self.table,
                index,
                make_tokens=partial(self._merged.add_end, index),
                first_step=index * (MAX_U32 // count),  # steps of different processes have different numbers
                cpus=place.cpus,
                environment=place.environment,
                start_host=self.hosts.start_host(index),
            )
            for index, place in enumerate(self.hosts.places())
        ]
        prefix_key = self.hosts.prefix_key or setup.env.secret("prefix.secret", 16)
        self.router = FleetRouter(setup.config.routing_policy, prefix_key, setup.env.now)
        for core in self.cores:
            core.prefix_key = prefix_key
        self.traffic = FleetTraffic(traffic, self.cores, setup.env)
        self._set = CoreSet(self.cores, self.table, self.router, self.traffic)
        self.traffic.on_change = self._rules_changed
        self._departures = Departures(setup.env, self.table, self._set, self._parted)
        self._drain_orders = DrainOrders()
        self._members = set(self.hosts.present())  # places with a process, or that wait for one
        self._leaving: set[int] = set()  # places that become free
        self._make_keeper: Callable[[EngineCore], CoreKeeper] | None = None
        self._pauses: dict[int, RestartPauses] = {}  # by place, whatever keepers it has had
        self._hold = RequestHold(self._refuse_waiting)
        self.adapters = FleetAdapters(self.cores, self._core_changed)

    @property
    def setting(self) -> str:
        return self.hosts.setting

    @property
    def inline(self) -> str:
        return self.hosts.inline

    def sketch(self) -> Pipeline:
        return sketch(build_fleet_pipeline, CLASSES | {"dispatch": Dispatch, "merge": Merge})

    # -- start and stop

    async def open(self) -> None:
        await self.hosts.open()

    @property
    def starting(self) -> Sequence[EngineCore]:
        return self._present

    async def first(self, starting: Sequence[asyncio.Future[EngineReady]]) -> list[EngineReady]:
        by_index = dict(zip((core.index for core in self.starting), starting, strict=True))
        ready = await self.hosts.first(by_index, self.traffic.rules)
        for index in by_index.keys() - ready.keys():  # its keeper starts it again
            by_index[index].cancel()
            await asyncio.wait([by_index[index]])
            core = self.cores[index]
            if core.client is not None:
                core.client.cut()
                await core.client.stop(STOP_S)
            core.client = core.ready = None
        return list(ready.values())

    @property
    def _present(self) -> list[EngineCore]:
        return [self.cores[index] for index in sorted(self._members)]

    def config_of(self, core: EngineCore) -> EngineConfig:
        return self.hosts.config_of(core, self.cores)

    def config_of_text(self) -> EngineConfig:
        return self.hosts.config_of_text()

    def joint_info(self, ready: Sequence[EngineReady]) -> ModelInfo:
        """The model of all processes, with the blocks of all. Raises `ConfigError` if they differ."""
        self.hosts.check_first(ready)
        infos = [one.info for one in ready]
        return replace(
            infos[0],
            num_blocks=sum(info.num_blocks for info in infos),
            num_host_blocks=sum(info.num_host_blocks for info in infos),
            max_model_len=min(info.max_model_len for info in infos),
        )

    def make_front(self, loaded: LoadedText, grammars: Grammars) -> FrontStages:
        made = (self._setup.config, loaded, grammars, self.table, self._set, self._merged)
        self._front = FleetStages(*made, self.router.note_answer, self.traffic.copies)
        self.router.open(loaded.info.block_size, has_prefixes=self._setup.config.enable_prefix_caching)
        for core in self._present:
            self._name(core)
        self._front.intake.admission.ask_queues = self._queues
        self.traffic.is_full = self._is_full
        self.traffic.open(self._front.exit)
        if (copies := self.traffic.copies) is not None:
            copies.has_room = self._has_room_for_copies
            copies.note_sent = lambda core, prompt: self.router.note_copy(core.index, prompt)
            copies.decode = lambda token_ids: loaded.tokenizer.decode(token_ids)
        self.table.on_attempt = self._front.exit.note_attempt
        self.table.search_of = partial(_search_of, self._front.exit)
        return self._front

    def _queues(self, num_admitted: int, max_waiting: int) -> EngineQueues | None:
        """The queues of the processes that take requests; `num_admitted` requests are in this front."""
        serving = [core.index for core in self._set.serving()]
        return self.router.queues(serving, max(0, num_admitted - len(self.table)), max_waiting)

    def _has_room_for_copies(self, core: EngineCore, num_copies: int) -> bool:
        """Whether it would run one more copy at once: the first to be left out are copies."""
        return len(core.requests) < core.requests.capacity // 4 and self.router.has_free_slot(core.index, num_copies)

    def _rules_changed(self) -> None:
        self.hosts.note_rules(self.cores, self.traffic.rules)
        self._core_changed()

    def _is_full(self, cores: Sequence[EngineCore]) -> bool:
        """Whether a request that may go to these processes alone would be refused, as far as is known."""
        assert self._front is not None
        admission = self._front.intake.admission
        queues = self.router.queues([core.index for core in cores], 0, admission.max_waiting)
        return queues is not None and admission.is_refused_by(queues)

    @contextmanager
    def only(self, core: EngineCore) -> Iterator[None]:
        self._set.only = core
        try:
            yield
        finally:
            self._set.only = None

    def start_keepers(
        self, front: FrontStages, start_again: StartAgain, on_death: Callable[[EngineCore], object]
    ) -> None:
        env = self._setup.env
        resuming = self.resuming = Resuming(env, self._setup.config, self.table, self._set, front.exit)
        resuming.start()
        self._set.on_waiting = resuming.wake

        is_link = self.hosts.outlive_links

        def make_keeper(core: EngineCore) -> CoreKeeper:
            return CoreKeeper(
                env,
                self.table,
                core,
                front.exit,
                partial(start_again, core),
                lambda how: on_death(core),
                on_orphans=self._core_changed,
                on_ready=self._core_changed,
                on_given_up=self._core_given_up,
                pauses=self._pauses.setdefault(core.index, link_pauses() if is_link else RestartPauses()),
            )

        self._make_keeper = make_keeper
        for core in self._present:
            self._keep(core)
        self._note_away()
        self.hosts.follow(self)

    def _keep(self, core: EngineCore) -> None:
        """From now on the process is replaced when it dies; one that is not there is started."""
        if self._make_keeper is None:
            return  # the fleet stops
        is_there = core.ready is not None and core.client is not None
        core.keeper = self._make_keeper(core)
        core.keeper.start(core.client if is_there else None)

    # -- processes that come and go

    def join(self, index: int) -> None:
        self._members.add(index)
        self._pauses.pop(index, None)  # of the engine that was there before
        self._name(self.cores[index])
        self._keep(self.cores[index])

    def _name(self, core: EngineCore) -> None:
        if (name := self.hosts.name_of(core.index)) is not None:
            self.router.name(core.index, name)

    async def leave(self, index: int) -> None:
        if self._make_keeper is None:
            return
        self._leaving.add(index)
        departure = self._departures.begin(self.cores[index])
        self._note_away()
        await asyncio.wait([departure])

    def drain(self, index: int, by: str) -> None:
        if index not in self._members:
            raise LookupError(f"there is no engine {index}")
        core = self.cores[index]
        if self.hosts.drain_themselves and core.ready is not None:
            self._drain_orders.give(core, by)
            self._core_changed()
        else:
            self._departures.begin(core, moves=by == "migrate")

    def note_draining(self, core: EngineCore, *, migrates: bool) -> None:
        core.is_draining = True
        self._core_changed()
        self._drain_orders.note_obeyed(core)
        if migrates and self._front is not None:
            self._departures.begin(core, moves=True)

    def note_gone(self, core: EngineCore) -> None:
        if self._front is not None:
            self._departures.begin(core, at_once=True)
            self._note_away()

    def _parted(self, core: EngineCore) -> None:
        """The link of a process is closed by plan: the place is free, or gets a successor."""
        self.note_lost(core)
        self._drain_orders.note_obeyed(core)
        if core.index in self._leaving:
            self._leaving.discard(core.index)
            self._members.discard(core.index)
        else:
            self._keep(core)
        self._core_changed()

    async def start_again(self, core: EngineCore, prepare: Callable[[], Awaitable[object]]) -> EngineClient:
        await self.hosts.look(core.index, partial(_note_unreached, core))
        client = await core.start_again(self.config_of(core), prepare)
        assert self._front is not None
        info = self._front.loaded.info
        try:
            self.hosts.check(core, self.cores, info, self.traffic.rules)
        except ConfigError:
            client.cut()
            await client.stop(STOP_S)
            raise
        self._drain_orders.repeat(core)
        return client

    async def stop_keepers(self) -> None:
        self._make_keeper = None
        self._hold.close()
        if self.resuming is not None:
            await self.resuming.stop()
        await self._departures.stop()
        for core in self.cores:
            if core.keeper is not None:
                await core.keeper.stop()

    async def close(self) -> None:
        self._front = None
        await self.hosts.close()

    # -- deaths

    @property
    def _serving(self) -> list[EngineCore]:
        """Those that have requests of clients, also if they drain."""
        return [core for core in self.cores if core.is_serving and self.traffic.serves_clients(core)]

    @property
    def away(self) -> Health | None:
        present = self._present
        serving = self._serving
        if any(not core.is_draining for core in serving) or (serving and not self.hosts.drain_themselves):
            return None
        if serving:
            return Health("loading", stage="engine", reason="the engines take no new requests, and stop")
        if not present:
            return Health("loading", stage="engine", reason="no engine is named; one that is named is reached soon")
        reasons = [core.keeper.away for core in present if core.keeper is not None and core.keeper.away is not None]
        alive = [away for away in reasons if away.state != "dead"]
        if not alive and len(reasons) == len(present):
            return self._for_clients(reasons[0], GIVEN_UP, reasons)
        if not alive:
            return Health("loading", stage="engine", reason="no engine process is left; some start")
        return self._for_clients(alive[0], NOT_REACHED, alive)

    def _for_clients(self, first: Health, reason: str, aways: Sequence[Health]) -> Health:
        """The first of them, or of engines elsewhere all, with the reason for clients."""
        if not self.hosts.outlive_links:
            return first
        details = list_of_reasons([away.reason or "" for away in aways])
        return replace(first, reason=reason, details=details)

    @property
    def keeps_requests(self) -> bool:
        """A process of this machine has to load the model again, which may take minutes: no request waits for that."""
        return self._hold.is_on

    def _note_away(self) -> None:
        """What went by plan has no successor for minutes, or none at all."""
        if self._make_keeper is None or not self.hosts.outlive_links:
            return
        away, is_planned = self.away, bool(self._serving) or not self._members - self._leaving
        if away is None:
            self._hold.note_serving()
        elif away.state == "dead" or is_planned:
            self._hold.end()
        else:
            self._hold.note_lost()

    def _refuse_waiting(self) -> None:
        """Ends the requests that wait for an engine and have no token. Searches end with their steps."""
        assert self._front is not None
        exit, searches, away = self._front.exit, self._front.searches, self.away
        refusal = NotServing(away or Health("loading", stage="engine", reason="no engine was there"))
        for request_id, outbox in list(exit.live.items()):
            if not outbox.has_started and request_id not in searches and self.table.core_of(request_id) is None:
                exit.end(request_id, "error", refusal)

    def note_lost(self, core: EngineCore) -> None:
        if (report := self._reports.pop(core.index, None)) is not None:
            self._ended = merged({0: remains(report)}, [] if self._ended is None else [self._ended], 0)
            self._is_merged = False
        self.router.drop(core.index)
        if self.traffic.copies is not None:
            self.traffic.copies.note_lost(core)
        self._note_away()
        self._set.note_change()

    def _core_changed(self) -> None:
        """A process has ended, drains, or serves again, or has an adapter that others had before."""
        self._note_away()
        if self.resuming is not None:
            self.resuming.wake()
        self._set.note_change()

    def _core_given_up(self, health: Health) -> None:
        """Ends all requests if no process is left, or is to be started."""
        aways = [None if core.keeper is None else core.keeper.away for core in self._present]
        if all(away is not None and away.state == "dead" for away in aways):
            assert self._front is not None
            exit = self._front.exit
            for request_id in list(exit.live):
                exit.end(request_id, "error", NotServing(self.away or health))
        self._note_away()
        self._set.note_change()

    def requests_of(self, core: EngineCore, live: Iterable[str]) -> list[str]:
        return [one for one in self.table.request_ids() if self.table.core_of(one) == core.index]

    def is_stopped_by(self, stall: Stall, pipeline: Pipeline) -> bool:
        is_there = stall.name.partition(".")[0] in CORE or stall.name == DISPATCHED
        return not (is_there and any(self._goes_on(core, stall.waited_s, pipeline) for core in self.cores))

    def _goes_on(self, core: EngineCore, timeout_s: float, pipeline: Pipeline) -> bool:
        return core.is_serving and not core.is_silent and self._stall_in(core, timeout_s, pipeline) is None

    def stall_of(self, core: EngineCore, pipeline: Pipeline) -> Stall | None:
        return self._stall_in(core, STALL_S, pipeline)

    def _stall_in(self, core: EngineCore, timeout_s: float, pipeline: Pipeline) -> Stall | None:
        """Where one process has made no progress for so long, though it has requests."""
        report = core.report
        if report is None or self.table.is_idle(core.index):
            return None
        channels = {one.name: one for one in (*report.channels, channel_status(core.requests))}
        status = PipelineStatus({stage.name: stage for stage in report.stages}, channels, ())
        return find_stall(pipeline, timeout_s, status)

    def may_leave(self, core: EngineCore) -> bool:
        """If it lives on without its link, has requests, and another one with its model is heard that takes them.

        A suspect on trial there stays until the link counts as lost: it may have been all that stopped the process, and
        would end as the cause sooner. If all are silent at once, the network here may be at fault.
        """
        if not self.hosts.outlive_links or self.table.is_idle(core.index) or self.table.is_trying(core.index):
            return False
        others = (one for one in self._set.serving() if one is not core and one.model_digest == core.model_digest)
        return any(one.is_heard for one in others)

    # -- state

    def by_core(self, causes: dict[int, str], gone: Gone) -> Iterable[tuple[EngineCore, dict[int, str]]]:
        ended = {sequence_id: core for _, sequence_ids, core in gone for sequence_id in sequence_ids}
        parts: dict[int, dict[int, str]] = {}
        for sequence_id, cause in causes.items():
            index = ended.get(sequence_id)
            if sequence_id not in ended:
                index = self.table.core_of(self.table.request_id(sequence_id) or "")
            if index is not None:
                parts.setdefault(index, {})[sequence_id] = cause
        return [(self.cores[index], part) for index, part in parts.items()]

    def note_copy_failed(self, request_id: str, reason: str) -> bool:
        return self.traffic.copies is not None and self.traffic.copies.note_failed(request_id, reason)

    def note_report(self, core: EngineCore) -> None:
        assert core.report is not None
        self._reports[core.index] = core.report
        self._is_merged = False

    def note_router_report(self, core: EngineCore, report: EngineLoad | KeyChange) -> None:
        self.router.note_report(core.index, report)

    def report(self) -> CoreReport | None:
        """One report of those of all processes. It takes half a millisecond if there is a new one."""
        if self._reports and not self._is_merged:
            self._is_merged = True
            ended = [] if self._ended is None else [self._ended]
            reports = dict(sorted(self._reports.items()))
            self._report = merged(reports, ended, self._setup.config.max_num_seqs, max(self._members, default=0) + 1)
            if self._report.core.cache.blocks is not None:
                self.blocks = self._report.core.cache.blocks
        return self._report

    def own_channels(self) -> Mapping[str, ChannelStatus]:
        return {DISPATCHED: dispatched_status(self.cores)}

    @property
    def choices(self) -> list[dict[str, Any]]:
        return [choice.to_json() for choice in self.router.log.newest()]

    def warm_prefixes(self) -> list[dict[str, Any]]:
        return self.router.warm_prefixes([core.index for core in self._present])

    @property
    def engines(self) -> list[dict[str, Any]]:
        return [
            {
                "index": core.index,
                "address": self.hosts.name_of(core.index),
                "labels": dict(core.labels),
                "pid": core.pid,
                "state": _state(core),
                "reason": _missing_reason(core),
                "num_deaths": 0 if core.keeper is None else core.keeper.num_deaths,
                "num_requests": (load := self.table.load_of(core.index)).num_requests,
                "work": load.work,
                "num_expected_cached_tokens": self.router.num_expected(core.index),
            }
            for core in self._present
        ]


def _note_unreached(core: EngineCore, reason: str) -> None:
    if isinstance(core.keeper, CoreKeeper):
        core.keeper.note_unreached(reason)


def _search_of(exit: Outboxes, request_id: str) -> str | None:
    """The live beam search that a request is a step of."""
    search = None if (outbox := exit.live.get(request_id)) is None else outbox.request.parent_id
    return search if search in exit.live else None


def _state(core: EngineCore) -> str:
    if core.is_serving:
        return "draining" if core.is_draining else "ready"
    return "loading" if core.keeper is None or core.keeper.away is None else core.keeper.away.state


def _missing_reason(core: EngineCore) -> str | None:
    """Why a process takes no requests; None if it does."""
    if core.is_serving:
        return "its engine takes no new requests, and stops" if core.is_draining else None
    away = None if core.keeper is None else core.keeper.away
    return "its process has ended" if away is None else away.reason

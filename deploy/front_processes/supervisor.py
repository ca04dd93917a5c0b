"""`Supervisor`: the parent of the fronts of one server and of its engines. It takes no requests itself."""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ...runtime.env import log as logs
from ...runtime.env.cpus import Cpus
from ...runtime.env.log import get_logger
from ...stages.config import EngineConfig
from ...stages.fleet.placement import environment_here, places
from ...stages.traffic.traffic_rules import TrafficRules
from ..config import ServerConfig
from .child_slot import ChildSlot
from .kept_metrics import KeptMetrics
from .restarts import EngineRestarts, FrontRestarts
from .sockets import UNIX, engine_path, reserve_port
from .words import (
    CoreLoading,
    CoreReady,
    CoreSetup,
    EngineStuck,
    FleetStates,
    FrontReady,
    FrontSetup,
    FrontState,
    LoadingState,
    MetricsAsked,
    MetricsTaken,
    TrafficSettings,
    settings_of,
)

PREFIX_KEY_BYTES = 16

log = get_logger("millrace.deploy")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """What the supervisor starts. Without `engines` it starts `data_parallel_size` of its own."""

    front_module: str  # run as `python -m`
    core_module: str
    engine_config: EngineConfig
    server_config: ServerConfig
    sources: Mapping[str, str]
    engines: Sequence[str] = ()  # addresses of engines elsewhere
    fleet_key_file: str | None = None
    fleet_tls: Sequence[str] = ()  # certificate, key and authorities; (): links are not encrypted
    traffic: TrafficRules = field(default_factory=TrafficRules)
    models: Mapping[str, Sequence[str]] = field(default_factory=dict)  # name -> its engines; {}: all have one model

    def model_of(self, number: int) -> str | None:
        """The model of a front: fronts take turns. None: there is one model, whatever it is called."""
        return list(self.models)[number % len(self.models)] if self.models else None


class Supervisor:
    """Starts all children, and replaces those that end. Call `open`, `start`, in the end `stop` and `aclose`.

    `serves` is set once one front takes requests, `failed` once a child is given up; `failure` says why.
    """

    def __init__(self, plan: ServerPlan) -> None:
        self.plan = plan
        self.serves, self.failed = asyncio.Event(), asyncio.Event()
        self.models: Sequence[str] = ()
        self.model_impl = ""
        self.port = 0
        self.fronts: list[ChildSlot] = []
        self.cores: list[ChildSlot] = []
        self._held: list[socket.socket] = []
        self._folder: Path | None = None
        self._prefix_key = secrets.token_bytes(PREFIX_KEY_BYTES)
        self._tasks: dict[asyncio.Task[None], ChildSlot] = {}
        self._loading: dict[int, CoreLoading] = {}
        self._created = int(time.time())
        self._traffic = {model: settings_of(plan.traffic) for model in plan.models or (None,)}  # as last set at a front
        live = lambda: {i: slot for i, slot in enumerate(self.fronts) if slot.pid}  # noqa: E731
        self._metrics = KeptMetrics(live, plan.model_of)

    @property
    def failure(self) -> Exception | None:
        """Why a child is given up; None while none is."""
        return next((slot.failure for slot in [*self.cores, *self.fronts] if slot.failure is not None), None)

    def open(self) -> None:
        """Takes the port, so that one that is taken is an error before anything loads. Raises `ConfigError`."""
        self._held = reserve_port(self.plan.server_config)
        self.port = int(self._held[0].getsockname()[1])
        self._folder = Path(tempfile.mkdtemp(prefix="millrace-fronts-"))  # 0700

    async def start(self) -> None:
        """Starts all children, and waits until all fronts take requests. Raises what a start says."""
        assert self._folder is not None
        engines = list(self.plan.engines)
        if not engines:
            engines = [f"{UNIX}{engine_path(self._folder, index)}" for index in self._make_cores()]
        self._make_fronts(engines)
        for slot in [*self.cores, *self.fronts]:
            task = asyncio.create_task(slot.run())
            self._tasks[task] = slot
            task.add_done_callback(self._ended)
        ready = asyncio.ensure_future(self._all_ready())
        failed = asyncio.ensure_future(self.failed.wait())
        try:
            await asyncio.wait([ready, failed], return_when=asyncio.FIRST_COMPLETED)
            if self.failure is not None:
                raise self.failure
        finally:
            failed.cancel()
            ready.cancel()

    async def _all_ready(self) -> bool:
        for slot in self.fronts:
            await slot.ready.wait()
        return True

    async def stop(self) -> None:
        """Has the fronts end, each after its lame duck and its drain, and then the engines."""
        for slots in (self.fronts, self.cores):
            for slot in slots:
                slot.stop()
            if tasks := [task for task, slot in self._tasks.items() if slot in slots]:
                await asyncio.wait(tasks)

    async def aclose(self) -> None:
        """Kills what still lives, and frees the port and the folder. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        for sock in self._held:
            sock.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- the children

    def _make_cores(self) -> range:
        config = self.plan.engine_config
        shares = places(config, Cpus.of_this_process(), environment_here())
        for index, place in enumerate(shares):
            self.cores.append(
                ChildSlot(
                    f"engine {index}",
                    self.plan.core_module,
                    partial(self._core_setup, index, place.config, place.cpus),
                    partial(self._from_core, index),
                    self._changed,
                    EngineRestarts(),
                    place.environment,
                )
            )
        return range(len(shares))

    def _core_setup(self, index: int, config: EngineConfig, cpus: Sequence[int]) -> Sequence[Any]:
        # the others hold their memory already: what is free is for those that are being started
        num_starting = max(1, sum(slot.state == "loading" for slot in self.cores))
        own = replace(config, data_parallel_size=1, stage=())  # stages of one's own are in the fronts
        setup = CoreSetup(
            index=index,
            config=own,
            num_engines=num_starting,
            cpus=tuple(cpus),
            log=logs.settings(),
            path=str(engine_path(self._require_folder(), index)),
            folder=str(self._require_folder()),
            prefix_key=self._prefix_key,
            shutdown_timeout_s=self.plan.server_config.shutdown_timeout_s,
            link_timeout_s=self.plan.server_config.link_timeout_s,
        )
        return [setup]

    def _make_fronts(self, engines: Sequence[str]) -> None:
        for number in range(self.plan.server_config.front_processes):
            self.fronts.append(
                ChildSlot(
                    f"front {number}",
                    self.plan.front_module,
                    partial(self._front_setup, number, engines),
                    partial(self._from_front, number),
                    partial(self._front_changed, number),
                    FrontRestarts(),
                )
            )

    def _front_setup(self, number: int, engines: Sequence[str]) -> Sequence[Any]:
        model = self.plan.model_of(number)
        names = self.plan.server_config.served_model_name if model is None else (model,)
        setup = FrontSetup(
            number=number,
            folder=str(self._require_folder()),
            engine_config=replace(self.plan.engine_config, data_parallel_size=1),
            server_config=replace(
                self.plan.server_config,
                port=self.port,
                api_key_file=None,
                admin_key_file=None,
                served_model_name=names,
            ),  # the keys were read
            sources=dict(self.plan.sources),
            engines=tuple(engines if model is None else self.plan.models[model]),
            fleet_key_file=self.plan.fleet_key_file,
            fleet_tls=self.plan.fleet_tls,
            prefix_key=None if self.plan.engines else self._prefix_key,
            created=self._created,
            traffic=self._traffic[model],
            model=model or "",
            is_successor=self.fronts[number].was_ready,
        )
        return [setup, self._states()]

    def _require_folder(self) -> Path:
        assert self._folder is not None
        return self._folder

    # -- what they say

    def _from_core(self, index: int, word: Any) -> None:
        match word:
            case CoreReady():
                self._loading.pop(index, None)
                self.cores[index].note_ready()
                log.info("front_processes.engine_ready", engine=index, pid=self.cores[index].pid)
            case CoreLoading():
                self._loading[index] = word
                slowest = min(self._loading.values(), key=lambda one: one.state.percent or 0.0)
                for slot in self.fronts:
                    slot.post(LoadingState(slowest.state))

    def _from_front(self, number: int, word: Any) -> None:
        match word:
            case FrontReady():
                own = self.plan.model_of(number)
                self.models = list(self.plan.models) if own is not None else word.models
                self.model_impl = word.model_impl
                self.fronts[number].note_ready()
                self.serves.set()
            case MetricsTaken():
                self._metrics.take(number, word)
            case MetricsAsked():
                self._metrics.ask(self.fronts[number], word.number)
            case TrafficSettings():
                models = [model for model in self._traffic if word.model in (None, model)]
                self._traffic.update(dict.fromkeys(models, word))
                for other, slot in enumerate(self.fronts):
                    if self.plan.model_of(other) in models:
                        slot.post(word)
            case EngineStuck() if word.index < len(self.cores) and self.cores[word.index].state == "ready":
                log.error("front_processes.engine_killed", engine=word.index, reason=f"front {number} says it hangs")
                self.cores[word.index].kill()

    def _front_changed(self, number: int) -> None:
        if self.fronts[number].state != "ready":
            self._metrics.note_end(number)
        self._changed()

    def _changed(self) -> None:
        states = self._states()
        for slot in self.fronts:
            slot.post(states)

    def _states(self) -> FleetStates:
        fronts = [
            FrontState(number, slot.pid, slot.state, slot.reason, slot.num_restarts, self._models_of(number))
            for number, slot in enumerate(self.fronts)
        ]
        return FleetStates(fronts, has_engines=all(slot.was_ready for slot in self.cores))

    def _models_of(self, number: int) -> Sequence[str]:
        model = self.plan.model_of(number)
        return () if model is None else (model,)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        slot, error = self._tasks[task], task.exception()
        if isinstance(error, Exception):
            slot.failure = error
        if slot.failure is not None:
            self.failed.set()

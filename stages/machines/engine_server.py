"""`EngineServer`: an engine whose step loop serves several fronts, each over a link of its own.

Fronts come and go, and the engine stays: the end of a front's link cancels its requests, and no other front waits for
one that does not read. All code here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ...runtime.env.env import Env
from ...runtime.env.log import get_logger
from ...runtime.env.loops import until_any_is_set
from ...runtime.health.flight_recorder import stack_of
from ...runtime.processes.transport import Transport
from ...runtime.processes.type_fields import VersionError
from ...runtime.processes.wire import WireError
from ...runtime.startup.load_progress import LoadProgress
from ...runtime.startup.phases import Phases
from ..config import EngineConfig, not_for_encoders
from ..device.device import Device
from ..engine.core import check_num_engines, refuse_ray
from ..engine.engine_status import CoreReport
from ..errors import ConfigError, Failed
from ..fleet.front_table import FrontTable, front_of, to_front
from ..messages import Started, StepTokens, TokenRequest
from ..outputs import ModelInfo
from ..routing.engine_load import EngineLoad
from ..routing.reports import KeyChange, packed, unpacked
from ..split.core_exit import CoreExit
from ..split.engine_process import Load, digests_of, load
from ..split.protocol import (
    Admitted,
    Broken,
    ControlCauses,
    Crashed,
    Draining,
    EngineReady,
    Gone,
    NotStarted,
    RequestFailed,
    ServiceTimes,
    Setup,
    StatusQuery,
    StatusReply,
)
from ..split.step_loop import StepLoop
from ..traffic.labels import Labels
from .front_channels import FanOut, FrontRequests
from .front_link import FrontLink

MAX_FRONTS = 64
EMPTY_S = 0.3  # without a request, until a drain is over: a beam search has none between two of its steps
LINK_TIMEOUT_S = 10.0  # without a sign of life of the other end, if nothing else was asked for
KEYS_AT_ONCE = 4096  # of a message with the keys that are held already

State = Literal["loading", "ready", "draining", "dead", "stopped"]
DrainBy = Literal["finish", "migrate"]

log = get_logger("millrace.stages")


class EngineServer:
    """Loads the model once, and serves the fronts that `take` gets. Call `start`, in the end `aclose`.

    `prefix_key` names blocks, the same for all engines that a front routes between; None: no front knows what is
    cached. Fronts are told `labels` and `served_names`. `ended` is set when the step loop is dead, and `drain_asked`
    when a front wants the engine to drain.
    """

    def __init__(
        self,
        config: EngineConfig,
        env: Env,
        load: Load = load,
        *,
        prefix_key: bytes | None = None,
        labels: Labels | None = None,
        served_names: Sequence[str] = (),
        link_timeout_s: float | None = LINK_TIMEOUT_S,
    ) -> None:
        check(config)
        self.config, self._env, self._load = config, env, load
        self._prefix_key, self._link_timeout_s = prefix_key, link_timeout_s
        self.labels: Labels = {} if labels is None else labels
        self.served_names = tuple(served_names)
        self.state: State = "loading"
        self.reason = "the model is loading"
        self.ended = asyncio.Event()
        self.drain_asked = asyncio.Event()
        self.asked_by = ""  # as in `Drain`
        self.phases = Phases(env.now)
        self.fronts: dict[int, FrontLink] = {}  # all links, also of fronts that have not said what they are
        self.num_fronts_gone = 0
        self._num_arrived = 0  # prompts
        self.requests = FrontRequests(env.now)
        self.table = FrontTable(config.max_num_seqs)
        self._tokens = FanOut(self.table, self._send, env.now)
        self._exit = CoreExit(self._tell)
        self._numbers = itertools.count()
        self._files: Mapping[str, str] = {}
        self._keys: set[bytes] = set()  # that were told
        self._instance = env.secret("instance", 8).hex()
        self._info: ModelInfo | None = None
        self._loop: StepLoop | None = None

    @property
    def info(self) -> ModelInfo:
        """Facts about the model. Only after `start`."""
        assert self._info is not None
        return self._info

    @property
    def load_progress(self) -> LoadProgress:
        """How far loading the model is."""
        return self.phases.progress

    @property
    def num_live(self) -> int:
        """Requests of all fronts that have not ended."""
        return len(self._exit.live)

    @property
    def num_fronts(self) -> int:
        """Fronts that are connected."""
        return len(self._welcome_fronts())

    def report_or_none(self) -> CoreReport | None:
        """The state of the step loop; None before it has started."""
        return None if self._info is None else self.report()

    @property
    def is_device_lost(self) -> bool:
        """Whether the process should end at once, as its device is lost."""
        return self._loop is not None and self._loop.is_device_lost

    # -- start

    async def start(self) -> None:
        """Loads the model and starts the stages. Raises what prevents that."""
        loaded, device, self._files = await self._env.run_in_thread(self._load_files)
        if not loaded.info.num_blocks:
            raise not_for_encoders(self.config)
        with self.phases("pipeline"):
            key = self._env.secret("prefix.secret", 16) if self._prefix_key is None else self._prefix_key
            self._loop = StepLoop(self.config, loaded, device, key, self._env, self._exit, is_routed=True)
            await self._loop.start(self, self.requests, self._tokens)
        if loaded.info.attention_backend == "native":
            self._env.yield_to("device", loaded.own_cpu)
            self._env.yield_this_thread()
        gc.collect()
        self._info = loaded.info
        self.state, self.reason = "ready", ""

    def _load_files(self) -> tuple[Any, Device, Mapping[str, str]]:
        loaded, device = self._load(self.config, self._env, self.phases)
        return loaded, device, digests_of(self.config, with_times=False)

    # -- fronts

    def take(self, transport: Transport) -> None:
        """A front has connected. Its link is closed at once if there are too many, or the engine takes none."""
        if self.state != "ready" or len(self.fronts) >= MAX_FRONTS:
            reason = f"there are {MAX_FRONTS} already" if self.state == "ready" else f"the engine is {self.state}"
            log.warning("engine.front_refused", reason=reason)
            return transport.close()
        front = FrontLink(next(self._numbers), transport, self, self._env.now, self._link_timeout_s)
        self.fronts[front.number] = front
        front.start()

    def welcome(self, front: FrontLink, setup: Setup) -> None:
        """See `FrontOwner`. It gets what the engine is, what is cached, and what it does."""
        assert self._loop is not None and self._info is not None
        if setup.files is not None and dict(setup.files) != dict(self._files):
            what = ", ".join(sorted(_differing(setup.files, self._files)))
            reason = f"this engine has other files of the model than the front knows: {what}; load the same ones in all"
            front.post(NotStarted("ConfigError", reason))
            return front.flush()
        self.table.add(front.number)
        front.is_welcome = True
        front.wants_keys = setup.prefix_key is not None and setup.prefix_key == self._prefix_key
        front.first_step = setup.first_step - 1 - self._loop.core.schedule.scheduler.last_granted
        facts = (self._info, dict(self.phases.seconds), self._files, self.config)
        ready = EngineReady(*facts, self._instance, self.labels, self.served_names)
        if not front.post(ready):
            front.post(NotStarted("VersionError", "the engine is of another version; update it or the front"))
            return front.flush()
        log.info("engine.front_came", front=front.number, num_fronts=len(self.fronts))
        self._report_to_routers()
        if front.wants_keys:
            held = sorted(self._keys)
            for first in range(0, len(held), KEYS_AT_ONCE):
                front.post(KeyChange(packed(held[first : first + KEYS_AT_ONCE]), packed([])))
        front.report(self.report())

    def arrived(self, front: FrontLink, request: TokenRequest) -> None:
        """See `FrontOwner`."""
        assert self._loop is not None
        self._num_arrived += 1
        self._exit.take(request)
        self._loop.arrived(request)

    def note_causes(self, causes: ControlCauses) -> None:
        """See `FrontOwner`."""
        assert self._loop is not None
        self._loop.note_causes(causes.causes)

    def forget(self, request_ids: Sequence[str]) -> None:
        """See `FrontOwner`."""
        self._exit.forget(request_ids)

    def refused(self, front: FrontLink, step: StepTokens, error: WireError) -> None:
        """See `FrontOwner`. Fails the requests of the step."""
        code = "engine_version" if isinstance(error, VersionError) else "internal_error"
        failed = Failed(f"its tokens cannot be sent to the server's first process: {error}", code=code)
        ours = self.table.causes(front.number, dict.fromkeys(step.sequence_ids.tolist(), ""))
        for request_id in self._exit.of_sequences(ours):
            self._exit.fail(request_id, failed)

    def lost(self, front: FrontLink, reason: str) -> None:
        """See `FrontOwner`. Cancels its requests."""
        del self.fronts[front.number]
        if not front.is_welcome:
            return
        self.num_fronts_gone += 1
        request_ids, sequences = self.table.drop(front.number)
        if self._loop is not None:
            self._loop.note_causes(dict.fromkeys(sequences, "cancel"))
        self._exit.forget(request_ids)
        log.info("engine.front_gone", front=front.number, reason=reason, num_cancelled=len(request_ids))

    def _welcome_fronts(self) -> list[FrontLink]:
        return [front for front in self.fronts.values() if front.is_welcome]

    # -- to the fronts

    def _send(self, number: int, step: StepTokens) -> None:
        if (front := self.fronts.get(number)) is not None:
            front.send(step)

    def _tell(self, word: RequestFailed | ServiceTimes) -> None:
        """Sends what concerns requests to their fronts."""
        if isinstance(word, RequestFailed):
            front = self.fronts.get(front_of(word.request_id))
            if front is not None:
                front.post(replace(word, request_id=to_front(word.request_id)))
            return
        parts: dict[int, dict[str, int]] = {}
        for request_id, service_us in word.times_us.items():
            parts.setdefault(front_of(request_id), {})[to_front(request_id)] = service_us
        for number, times_us in parts.items():
            if number in self.fronts:
                self.fronts[number].post(ServiceTimes(word.stage, times_us))

    def admitted(self, started: Sequence[Started]) -> None:
        """See `LoopOwner`."""
        parts = self.table.by_front(dict.fromkeys((one.sequence_id for one in started), None))
        for number, numbers in parts.items():
            if (front := self.fronts.get(number)) is not None:
                front.post(Admitted(list(numbers)))
                front.flush()

    def crashed(self, stage: str, error: BaseException, request_ids: Sequence[str]) -> None:
        """See `LoopOwner`."""
        parts: dict[int, list[str]] = {}
        for request_id in request_ids:
            parts.setdefault(front_of(request_id), []).append(to_front(request_id))
        for front in self._welcome_fronts():
            front.post(Crashed(stage, type(error).__name__, stack_of(error), parts.get(front.number, [])))

    def died(self) -> None:
        """See `LoopOwner`. Reports it at once."""
        assert self._loop is not None
        health = self._loop.pipeline.health
        self.state, self.reason = "dead", health.reason or ""
        for front in self._welcome_fronts():
            front.post(Broken(health.stage or "", health.reason or ""))
            front.flush()
        self.ended.set()

    def report(self) -> CoreReport:
        """The state of the step loop, with the sequences of all fronts. Only after `start`."""
        assert self._loop is not None
        return self._loop.report()

    def tick(self, lag_s: float) -> None:
        """See `LoopOwner`. Reports changes."""
        assert self._loop is not None
        if self._loop.has_moved() and (fronts := self._welcome_fronts()):
            report = self.report()
            for front in fronts:
                front.report(report)
        self._report_to_routers()

    def _report_to_routers(self) -> None:
        """Each front routes by its own count of prompts, and by the keys that are held."""
        assert self._loop is not None and self._loop.router_reports is not None
        for report in self._loop.router_reports.new():
            if isinstance(report, KeyChange):
                self._keys.difference_update(unpacked(report.removed))
                self._keys.update(unpacked(report.added))
            for front in self._welcome_fronts():
                if isinstance(report, EngineLoad):
                    front.post(replace(report, seen=front.num_seen))
                elif front.wants_keys:
                    front.post(report)

    # -- questions

    def answer(self, front: FrontLink, query: StatusQuery) -> StatusReply:
        """See `FrontOwner`."""
        assert self._loop is not None
        if query.what == "inject":
            reason = "faults are injected by the engine's own settings" if query.faults else None
            return StatusReply(query.number, error=reason)
        reply = self._loop.answer(query, front.report)
        if query.what == "prefixes" and reply.value is not None:
            for node in reply.value["nodes"].values():
                node["slots"] = []  # of any front
        return reply

    # -- the end

    async def serve_until(self, *stops: asyncio.Event) -> bool:
        """Returns True once one of `stops` is set, or False, with a line in the log, if the step loop is dead."""
        await until_any_is_set(*stops, self.ended)
        if self.ended.is_set():
            log.error("engine.dead", reason=self.reason)
        return not self.ended.is_set()

    def ask_drain(self, by: str) -> None:
        """See `FrontOwner`."""
        self.asked_by = by
        self.drain_asked.set()

    async def drain(self, timeout_s: float, by: DrainBy = "finish") -> bool:
        """Tells all fronts to send no new requests, and waits for those that are here. Returns whether all ended.

        A beam search that has begun sends its next steps here while no other engine has its model.
        By "migrate" the fronts take their requests back at once, if another engine takes requests, or as soon as one
        does.
        """
        if self.state == "ready":
            self.state, self.reason = "draining", "the engine stops once its requests have ended"
        for front in list(self.fronts.values()):
            if by == "finish" or not front.post(Draining(migrates=True)):
                front.post(Draining())
            front.flush()
        log.info("engine.draining", live=self.num_live, num_fronts=len(self.fronts), timeout_s=timeout_s, by=by)
        emptied = asyncio.ensure_future(self._emptied())
        ended = asyncio.ensure_future(self.ended.wait())
        try:
            await asyncio.wait([emptied, ended], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            is_empty = emptied.done() or not (ended.done() or self.num_live)
        finally:
            for task in (emptied, ended):
                task.cancel()
            await asyncio.wait([emptied, ended])
        if self.state != "dead":
            for front in list(self.fronts.values()):
                front.post(Gone())
                front.flush()
        return is_empty

    async def _emptied(self) -> None:
        """Waits until no request is here, and none has come for a while if one may."""
        while True:
            await self._exit.wait_until_empty()
            num_arrived = self._num_arrived
            if self.fronts:
                await self._env.sleep(EMPTY_S)
            if not self.num_live and self._num_arrived == num_arrived:
                return

    async def aclose(self) -> None:
        """Ends all links, so that fronts go on elsewhere, and frees everything. Idempotent."""
        if self.state != "dead":
            self.state, self.reason = "stopped", "the engine has stopped"
        fronts, self.fronts = list(self.fronts.values()), {}
        for front in fronts:
            front.close()  # first: a front must not see the end of channels that another engine continues
        if self._loop is not None:
            await self._loop.aclose()


def check(config: EngineConfig) -> None:
    """Raises `ConfigError` for settings that an engine of several fronts does not have."""
    check_num_engines(config, 1)
    refuse_ray(config)
    for name in ("enable_lora", "logits_processor", "stage", "inject"):
        if getattr(config, name):
            value = getattr(config, name)
            raise ConfigError(f"{name} = {value}: an engine of several fronts does not have that; leave it out")


def _differing(first: Mapping[str, str], second: Mapping[str, str]) -> set[str]:
    return {name for name in {*first, *second} if first.get(name) != second.get(name)}

"""A running graph: one task per stage, one channel per edge, one exit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .channel import Channel, ChannelClosed, ControlLane
from .crash_recovery import FatalError
from .env.env import Env, LiveEnv
from .env.log import get_logger
from .exit import Exit, Outbox
from .fault_injection import Fault, Faults
from .graph import OPEN_END_CAPACITY, Graph, Port
from .outlet import OutputPort
from .pipeline_status import PipelineStatus, read_status
from .stage import Context, Stage
from .stage_metrics import StageMetrics
from .stage_runner import StageRunner
from .trace.tracer import Tracer
from .wakeups import SeparateWakeups, WakeupBatch
from .watch import Watch

State = Literal["new", "loading", "ready", "draining", "stalled", "dead", "stopped"]

MAX_LOGGED_REQUESTS = 64  # in the log line of a crash
STAGES_AT_ONCE = 8  # woken one after another before other callbacks of the loop run: a step passes six

# stage, error, ids of the requests in hand
OnCrash = Callable[[str, BaseException, Sequence[str]], None]

log = get_logger("millrace.runtime")


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the pipeline takes requests; if not, which stage failed and why.

    `reason` may be told to any client; `details`, if there are some, to operators alone: they name addresses and
    settings.
    """

    state: State
    stage: str | None = None
    reason: str | None = None
    details: str | None = None

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def full_reason(self) -> str | None:
        """The reason for operators."""
        return self.reason if self.details is None else self.details


class NotServing(Exception):
    """The pipeline takes no requests now; `health` says why."""

    def __init__(self, health: Health) -> None:
        super().__init__(f"the engine is {health.state}" + (f": {health.reason}" if health.reason else ""))
        self.health = health


class Busy(Exception):
    """The first channel is full: too many requests arrive at once."""


class Tap:
    """A lossy copy of what leaves a port.

    A slow reader misses items and never delays the pipeline.
    """

    def __init__(self, channel: Channel[Any]) -> None:
        self._channel = channel

    def __aiter__(self) -> AsyncIterator[Any]:
        return aiter(self._channel)


class Pipeline(Graph):
    """A declared graph that can be started once.

    Change it before `start`; use it between `start` and `stop`.

    A pipeline with an exit carries requests: `async for event in pipeline.stream(request)`. A slice without one is fed
    through `channel(port)`, and its open outputs are read from `channel(port)`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exit: Exit[Any] | None = None
        self.channels: dict[str, Channel[Any]] = {}
        self.runners: dict[str, StageRunner] = {}
        self.lane = ControlLane("control")
        self.env: Env = LiveEnv()
        self.tracer = Tracer(self.env)
        self.loop: asyncio.AbstractEventLoop | None = None  # that it runs on
        self.on_crash: list[OnCrash] = []  # called when a stage has crashed, before recovery
        self.on_dead: list[Callable[[], object]] = []  # called once when a stage has failed for good; see `health`
        self.lane_reader: str | None = None  # the stage that reads the control lane
        self.entry_capacity = OPEN_END_CAPACITY  # requests that have entered and were not handled yet
        self.wakeups: WakeupBatch | None = None  # wakes stages; None: the env's default, see `_wakeups`
        self.watch: Watch | None = None  # set by `start`
        self.stage_metrics: dict[str, StageMetrics] = {}  # by stage; those that stages keep themselves
        self.stacks_elsewhere: list[dict[str, Any]] = []  # last reported tasks and threads of another process
        # adds the last reported stages of another process to a status
        self.join_status: Callable[[PipelineStatus], PipelineStatus] | None = None
        self._owns_env = True
        self._health = Health("new")
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._all_set_up = asyncio.Event()  # from then on stages receive items
        self._taps: dict[Port, list[Channel[Any]]] = {}
        self._port_channels: dict[Port, Channel[Any]] = {}
        self._given: dict[Port, Channel[Any]] = {}
        self._unwatched: set[str] = set()  # names of channels

    # -- declaring

    def add(self, stage: Stage[Any, Any], name: str | None = None) -> str:
        name = super().add(stage, name)
        if isinstance(stage, Exit):
            self.exit = stage
        return name

    def tap(self, after: str, capacity: int = 256) -> Tap:
        """A lossy copy of what leaves `after` (`stage` or `stage.port`), to iterate over."""
        stage, _, port = after.partition(".")
        source = Port(stage, port or "out")
        self._require_port(source, "outputs")
        channel: Channel[Any] = Channel(f"tap({source})", capacity)
        self._taps.setdefault(source, []).append(channel)
        return Tap(channel)

    def slice(self, first: str, last: str) -> Pipeline:
        """The stages from `first` to `last` as a pipeline of their own, not started.

        It shares the stage objects, so run the slice or the whole, not both.
        """
        part = self.cut(first, last)
        assert isinstance(part, Pipeline)
        part.env, part.tracer, part._owns_env = self.env, self.tracer, self._owns_env
        part.lane_reader = self.lane_reader if self.lane_reader in part.stages else None
        part.exit = self.exit if self.exit in part.stages.values() else None
        return part

    def give_channel(self, port: str, channel: Channel[Any], *, is_watched: bool = True) -> None:
        """Uses the caller's channel for an open end, such as half of one between processes.

        Before `start`. `is_watched` False: the other process watches it.
        """
        stage, _, name = port.partition(".")
        self._given[Port(stage, name)] = channel
        if not is_watched:
            self._unwatched.add(channel.name)

    def _move_open_end(self, old: Port, new: Port) -> None:
        super()._move_open_end(old, new)
        if old in self._given:
            self._given[new] = self._given.pop(old)

    def use(self, env: Env, tracer: Tracer | None = None) -> None:
        """Runs on `env` (simulation, or one shared by several pipelines) and writes to `tracer`.

        The caller closes both.
        """
        self.env, self._owns_env = env, False
        self.tracer = Tracer(env) if tracer is None else tracer

    # -- running

    async def start(self) -> None:
        """Checks the graph and starts every stage. Returns when all are set up.

        If a set-up raises, stops the others and raises its error.
        """
        if self._health.state != "new":
            raise RuntimeError(f"a pipeline starts once, and this one is {self._health.state}: build another")
        self.check()
        self._health = Health("loading")
        self.loop = asyncio.get_running_loop()
        self._all_set_up = asyncio.Event()
        self._make_channels()
        wakeups = self._wakeups()
        for name, stage in self.stages.items():
            self.runners[name] = self._make_runner(name, stage, wakeups)
        if self.exit is not None:
            self.exit.on_end.append(lambda outbox, cause, error: self._request_ended(outbox.request_id, cause))
        for name, runner in self.runners.items():
            self._tasks[name] = asyncio.get_running_loop().create_task(self._guard(name, runner), name=name)
        try:
            await self._wait_until_set_up()
        except BaseException:
            await self.stop()
            raise
        watched = {name: channel for name, channel in self.channels.items() if name not in self._unwatched}
        self.watch = Watch(self.tracer, watched, self.env.now, self._is_busy, self.runners)
        if self.env.is_live:
            self.watch.start()
        if self._health.state == "loading":  # no stage has broken meanwhile
            self._health = Health("ready")
        self._all_set_up.set()

    async def stop(self) -> None:
        """Ends every live request with `abort`, stops the stages and frees their resources.

        Idempotent.
        """
        if self._health.state in ("new", "stopped"):
            self._health = Health("stopped")
            return
        if self.watch is not None:
            self.watch.stop()
        self._end_all("abort", None)
        self._health = Health("stopped")
        for channel in self.channels.values():
            channel.close()
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for taps in self._taps.values():
            for tap in taps:
                tap.close()
        if self._owns_env:
            await self.env.aclose()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Takes no new requests and waits for the live ones to end.

        Returns False if `timeout_s` passes before.
        """
        if self._health.state == "ready":
            self._health = Health("draining", reason="shutting down")
        if self.exit is None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self.exit.wait_until_empty()
        except TimeoutError:
            return False
        return True

    async def __aenter__(self) -> Pipeline:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    @property
    def health(self) -> Health:
        """The current state, with the reason if it is not ready."""
        return self._health

    def status(self) -> PipelineStatus:
        """What the stages and channels do and have done; of those in another process, as last reported."""
        own = read_status(self.runners, self.channels, self.edges)
        return own if self.join_status is None else self.join_status(own)

    def inject(self, faults: Sequence[Fault]) -> None:
        """Replaces the injected faults. Only while it runs."""
        for name, runner in self.runners.items():
            own = [fault for fault in faults if fault.stage == name]
            runner.faults = Faults(own, self.env) if own else None

    # -- requests

    async def stream(self, request: Any, *, deadline_s: float | None = None, wait: bool = True) -> AsyncIterator[Any]:
        """Submits a request and yields its events. Leaving the loop early cancels it.

        With `wait` False a full first channel raises `Busy` instead of making the caller wait.
        """
        outbox = await self.submit(request, deadline_s=deadline_s, wait=wait)
        try:
            async for event in outbox:
                yield event
        finally:
            self.cancel(outbox.request_id, "cancel")

    async def submit(
        self, request: Any, *, deadline_s: float | None = None, wait: bool = True, is_part: bool = False
    ) -> Outbox[Any]:
        """Submits a request and returns its outbox.

        The caller reads the outbox or `cancel`s the request. `is_part`: it belongs to a live request, so it is admitted
        while `drain` waits for that.
        """
        outbox = self.open(request, deadline_s=deadline_s, is_part=is_part)
        await self.enter(outbox, getattr(outbox, "request", request), wait=wait)  # an exit may stamp what enters
        return outbox

    def open(self, request: Any, *, deadline_s: float | None = None, is_part: bool = False) -> Outbox[Any]:
        """As `submit`, for a request that enters later: it is live from now on. `enter` it, or end it at the exit."""
        if self.exit is None:
            raise RuntimeError("this slice has no exit, so it cannot answer requests: feed and read it with channel()")
        if not (self._health.is_ready or (is_part and self._health.state == "draining")):
            raise NotServing(self._health)
        outbox: Outbox[Any] = self.exit.open(request, deadline_s)
        return outbox

    async def enter(self, outbox: Outbox[Any], request: Any, *, wait: bool = True) -> None:
        """Sends an open request to the first stage. A request that cannot enter has ended."""
        assert self.exit is not None
        try:
            await self._enter(request, wait)
        except BaseException:
            self.exit.end(outbox.request_id, "refused")
            raise
        if self.watch is not None:
            self.watch.wake()

    async def call(self, request: Any, *, deadline_s: float | None = None) -> list[Any]:
        """All events of a request, after it has ended."""
        return [event async for event in self.stream(request, deadline_s=deadline_s)]

    def cancel(self, request_id: str, cause: str = "cancel") -> bool:
        """Ends a request early. Returns False if it is not live."""
        return self.exit is not None and self.exit.end(request_id, cause)

    def channel(self, port: str) -> Channel[Any]:
        """The channel at a port, `stage.port`: to feed or to read an open end of a slice."""
        stage, _, name = port.partition(".")
        return self._port_channels[Port(stage, name)]

    async def _enter(self, request: Any, wait: bool) -> None:
        assert self.entry is not None
        entry = self._port_channels[self.entry]
        try:
            if wait:
                await entry.send(request)
            elif not entry.try_send(request):
                raise Busy(f"{entry.capacity} requests wait to be processed")
        except ChannelClosed:
            raise NotServing(self._health) from None

    # -- inside

    def _is_busy(self) -> bool:
        """Whether a request may be live: without an exit this is unknown, so True."""
        return self.exit is None or bool(self.exit.live)

    def _wakeups(self) -> WakeupBatch:
        """Wakes several stages per loop callback. In simulation, which draws their order, one."""
        if self.wakeups is not None:
            return self.wakeups
        return WakeupBatch(STAGES_AT_ONCE) if self.env.is_live else SeparateWakeups()

    def _make_channels(self) -> None:
        for edge in self.edges:
            assert edge.capacity is not None
            channel: Channel[Any] = Channel(edge.name, edge.capacity, self.env.now)
            self.channels[edge.name] = channel
            self._port_channels[edge.source] = self._port_channels[edge.target] = channel
        assert self.entry is not None
        for port in sorted({self.entry, *self.open_ports}, key=str):
            if port not in self._port_channels:
                capacity = self.entry_capacity if port == self.entry else OPEN_END_CAPACITY
                given = self._given.get(port)
                open_end = Channel(str(port), capacity, self.env.now) if given is None else given
                self.channels[open_end.name] = self._port_channels[port] = open_end

    def _make_runner(self, name: str, stage: Stage[Any, Any], wakeups: WakeupBatch) -> StageRunner:
        edges = {edge.source: edge for edge in self.edges}
        inputs = {port: self._port_channels[Port(name, port)] for port in stage.inputs}
        outputs = {
            port: OutputPort(self._port_channels[at], edges.get(at), self._taps.setdefault(at, []))
            for port in stage.outputs
            for at in (Port(name, port),)
        }
        context = Context(
            env=self.env,
            tracer=self.tracer,
            source=self.tracer.source(name),
            lane=self.lane if name == self.lane_reader else ControlLane(f"{name}.control"),
            is_live=self.exit.is_live if self.exit is not None else _always,
            escalate=lambda error: self._break(name, error),
            **({} if self.exit is None else {"find_request": self.exit.find_request}),
            metrics=self.stage_metrics.setdefault(name, StageMetrics()),
        )
        exit_ = None if stage is self.exit else self.exit
        return StageRunner(name, stage, inputs, outputs, exit_, context, self._break, self._crashed, wakeups)

    async def _guard(self, name: str, runner: StageRunner) -> None:
        try:
            await runner.run(self._all_set_up)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:
            if not runner.is_ready.is_set():
                error.add_note(f"while the stage {name} was set up")
                raise  # a failed set-up belongs to the caller of start
            self._break(name, error)

    async def _wait_until_set_up(self) -> None:
        all_ready = asyncio.get_running_loop().create_task(self._wait_for_each(), name="set-up")
        try:
            pending = {all_ready, *self._tasks.values()}
            while all_ready in pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if not task.cancelled():
                        task.result()
        finally:
            all_ready.cancel()
            await asyncio.wait([all_ready])  # else it may outlive a start that fails

    async def _wait_for_each(self) -> None:
        for runner in self.runners.values():
            await runner.is_ready.wait()

    def _request_ended(self, request_id: str, cause: str) -> None:
        for runner in self.runners.values():
            runner.request_ended(request_id, cause)

    def _crashed(self, name: str, error: BaseException, items: Sequence[Any]) -> None:
        """Reports a stage that raised with these items in hand.

        Logged once, whatever becomes of the items.
        """
        requests_of = _none if self.exit is None else self.exit.requests_of
        request_ids = list(dict.fromkeys(request_id for item in items for request_id in requests_of(item)))
        log.error(
            "stage.crashed",
            stage=name,
            error=type(error).__name__,
            num_items=len(items),
            num_requests=len(request_ids),
            request_ids=request_ids[:MAX_LOGGED_REQUESTS],
            exc_info=error,
        )
        for callback in self.on_crash:
            callback(name, error, request_ids)

    def fail(self, name: str, error: BaseException) -> None:
        """Ends the pipeline as if the stage `name` had failed for good: what it works with is gone."""
        self._break(name, error)

    def _break(self, name: str, error: BaseException) -> None:
        """Handles a stage that cannot recover: closes the entry and fails the live requests."""
        if self._health.state in ("dead", "stopped"):
            return
        log.error("pipeline.dead", stage=name, error=type(error).__name__, exc_info=error)
        reason = str(error) if isinstance(error, FatalError) else f"stage {name} failed: {type(error).__name__}"
        self._health = Health("dead", stage=name, reason=reason)
        if self.entry is not None:
            self._port_channels[self.entry].close()  # a request waiting to enter does not read its outbox yet
        self._end_all("error", NotServing(self._health))
        for callback in self.on_dead:
            callback()

    def _end_all(self, cause: str, error: BaseException | None) -> None:
        if self.exit is not None:
            for request_id in list(self.exit.live):
                self.exit.end(request_id, cause, error)


def _always(request_id: str) -> bool:
    return True


def _none(item: Any) -> Sequence[str]:
    return ()

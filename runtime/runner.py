"""Runs one stage: receives, calls `handle`, delivers, keeps time, and picks up the pieces after a crash.

Every stage, ours or a user's, gets the same; nothing here knows what a stage does.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .channel import Bell, Channel, ChannelOverrun
from .exit import Exit
from .graph import Edge
from .log import get_logger
from .stage import Context, Crash, Stage
from .trace import EventKind

MAX_RESTARTS = 5  # within RESTART_WINDOW_S; one more and the stage counts as broken
RESTART_WINDOW_S = 10.0

log = get_logger("millrace.runtime")


class StageCrashed(Exception):
    """A stage could not carry a request: an error of ours, not of the request."""

    def __init__(self, stage: str, code: str, cause: BaseException) -> None:
        super().__init__(f"stage {stage} failed on this request ({type(cause).__name__})")
        self.stage = stage
        self.code = code
        self.__cause__ = cause


@dataclass(slots=True)
class StageTimes:
    """Where a stage's time went, seconds; they add up to its life. Items carried at once count each for itself."""

    idle: float = 0.0
    busy: float = 0.0
    blocked: float = 0.0  # waiting for room in the channel behind


@dataclass(frozen=True, slots=True)
class Output:
    """One output port: the channel behind it, and who gets a lossy copy."""

    channel: Channel[Any]
    edge: Edge | None
    taps: list[Channel[Any]]


class CollectingOutlet:
    """The `Outlet` a runner gives to `handle`: it collects, and delivers when `handle` is done."""

    __slots__ = ("_items", "_runner", "blocked_s", "has_flushed")

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self._items: list[tuple[str, Any]] = []
        self.blocked_s = 0.0  # spent waiting for room
        self.has_flushed = False

    def send(self, item: Any, port: str = "out") -> None:
        if port not in self._runner.outputs:
            raise KeyError(f"stage {self._runner.name} has no output {port}: it has {', '.join(self._runner.outputs)}")
        self._items.append((port, item))

    async def flush(self) -> None:
        items, self._items = self._items, []
        if items:
            self.has_flushed = True
            self.blocked_s += await self._runner.deliver(items)

    def discard(self) -> None:
        """Forgets what was collected and not delivered."""
        self._items.clear()

    def fail(self, item: Any, error: BaseException) -> None:
        self._runner.fail(item, error)

    def reply(self, item: Any) -> None:
        if self._runner.exit is None:
            raise RuntimeError(f"stage {self._runner.name} replies, but this slice has no exit: include the last stage")
        self._runner.exit.deliver(item)


class StageRunner:
    """One stage's task. `run` ends when all inputs are closed and empty, or when it is cancelled."""

    def __init__(
        self,
        name: str,
        stage: Stage[Any, Any],
        inputs: Mapping[str, Channel[Any]],
        outputs: Mapping[str, Output],
        exit: Exit[Any] | None,
        context: Context,
        on_broken: Callable[[str, BaseException], None],
    ) -> None:
        self.name = name
        self.stage = stage
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.exit = exit
        self.times = StageTimes()
        self.num_restarts = 0
        self.num_dropped = 0  # items of requests that had ended
        self.is_ready = asyncio.Event()
        self.last_progress_s = context.env.now()
        self._context = context
        self._on_broken = on_broken
        self._bell = Bell()
        self._recent_restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        self._items_in_hand: dict[asyncio.Task[None], tuple[str, ...]] = {}
        self._is_stopping = False
        self._num_carried = 0  # batches, or items at once, that `handle` has now
        self._oldest_since_s = 0.0  # when the oldest item of the last batch came
        for channel in self.inputs.values():
            channel.listen(self._bell)
        if stage.reads_lane:
            context.lane.listen(self._bell)

    # -- the loop

    async def run(self) -> None:
        """Sets the stage up, feeds it until its inputs end, tears it down."""
        await self.stage.setup(self._context)
        self.is_ready.set()
        at_once = self.stage.concurrency
        try:
            while (batch := await self._next_batch()) is not None:
                if at_once is None:
                    await self._carry(batch)
                else:
                    await self._carry_singly(batch, at_once)
            await self._finish_items_in_hand()
        finally:
            self._is_stopping = True
            await self._drop_items_in_hand()
            await self.stage.teardown()

    @property
    def is_busy(self) -> bool:
        """Whether `handle` has something now."""
        return self._num_carried > 0

    async def _next_batch(self) -> list[Any] | None:
        """What is waiting at the ports the stage wants, in their order; None when all have ended."""
        env = self._context.env
        began = env.now()
        while True:
            batch: list[Any] = []
            self._oldest_since_s = env.now()
            for port, channel in self.inputs.items():
                if len(channel) and self.stage.wants(port):
                    self._oldest_since_s = min(self._oldest_since_s, channel.waiting_since)
                    batch += channel.recv_all()
            if batch and self.exit is not None:
                batch = self._still_wanted(batch)
            if batch or (self.stage.reads_lane and len(self._context.lane)):
                self.times.idle += env.now() - began
                return batch
            if all(channel.is_closed and not len(channel) for channel in self.inputs.values()):
                return None
            await self._bell.wait()

    def _still_wanted(self, batch: list[Any]) -> list[Any]:
        kept = [item for item in batch if self._is_wanted(item)]
        self.num_dropped += len(batch) - len(kept)
        return kept

    def _is_wanted(self, item: Any) -> bool:
        request_id = getattr(item, "request_id", None)
        return request_id is None or self._context.is_live(request_id)

    # -- one batch

    async def _carry(self, batch: list[Any]) -> None:
        env, tracer = self._context.env, self._context.tracer
        began, waited = env.now(), env.now() - self._oldest_since_s
        out = CollectingOutlet(self)
        self._num_carried += 1
        try:
            await self._handle(batch, out)
            await out.flush()
        finally:
            self._num_carried -= 1
        now = env.now()
        busy = now - began - out.blocked_s
        self.times.busy += busy
        self.last_progress_s = now
        if tracer.enabled:
            times_us = (int(seconds * 1e6) for seconds in (waited, busy, out.blocked_s))
            tracer.emit(EventKind.STAGE_BATCH, self._context.source, 0, len(batch), *times_us)

    async def _handle(self, batch: list[Any], out: CollectingOutlet) -> None:
        try:
            self._fault("before")
            await self.stage.handle(batch, out)
            self._fault("after")
        except BaseException as error:
            if not self._is_crash(error):
                raise
            await self._pick_up(batch, out, error)

    def _fault(self, when: str) -> None:
        if self._context.env.fault(f"{self.name}.crash.{when}"):
            raise InjectedCrash(f"{self.name} {when}")

    def _is_crash(self, error: BaseException) -> bool:
        """Whether `error` is the stage's own failure, and not somebody stopping it."""
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            return False
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            return not self._is_stopping and task is not None and not task.cancelling()
        return True

    # -- items one by one, in tasks of their own

    async def _carry_singly(self, batch: list[Any], at_once: int) -> None:
        for item in batch:
            while len(self._items_in_hand) >= at_once:
                await asyncio.wait(list(self._items_in_hand), return_when=asyncio.FIRST_COMPLETED)
            if not self._is_wanted(item):
                self.num_dropped += 1
                continue
            task = asyncio.get_running_loop().create_task(self._carry([item]), name=f"{self.name}.item")
            self._items_in_hand[task] = (item.request_id,) if hasattr(item, "request_id") else ()
            task.add_done_callback(self._item_done)

    def _item_done(self, task: asyncio.Task[None]) -> None:
        self._items_in_hand.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_broken(self.name, error)

    async def _finish_items_in_hand(self) -> None:
        while self._items_in_hand:
            await asyncio.wait(list(self._items_in_hand))

    async def _drop_items_in_hand(self) -> None:
        for task in self._items_in_hand:
            _cancel_once(task)
        await self._finish_items_in_hand()

    def request_ended(self, request_id: str) -> None:
        """Cancels the tasks that work on `request_id` here."""
        for task, request_ids in list(self._items_in_hand.items()):
            if request_id in request_ids:
                _cancel_once(task)

    # -- delivering

    async def deliver(self, items: Sequence[tuple[str, Any]]) -> float:
        """Sends each item to its port's channel, waiting where the edge waits. Returns the seconds waited for room."""
        env, waited = self._context.env, 0.0
        for port, item in items:
            output = self.outputs[port]
            for tap in output.taps:
                tap.try_send(item)
            if env.fault("channel.delay"):
                await env.sleep(env.random("channel.delay").uniform(0.0, 0.02))
            if output.channel.try_send(item):
                continue
            if output.edge is not None and output.edge.when_full == "never":
                raise ChannelOverrun(f"{output.edge.name} was full at {output.channel.capacity}, yet it never may be")
            began = env.now()
            await output.channel.send(item)
            waited += env.now() - began
        self.times.blocked += waited
        return waited

    def fail(self, item: Any, error: BaseException) -> None:
        """Ends the requests of `item` at the exit."""
        if self.exit is None:
            log.warning("request.failed", stage=self.name, error=repr(error))
        else:
            self.exit.fail(item, error)

    # -- after a crash

    async def _pick_up(self, batch: list[Any], out: CollectingOutlet, error: BaseException) -> None:
        log.error("stage.crashed", stage=self.name, error=type(error).__name__, num_items=len(batch), exc_info=error)
        if isinstance(error, ChannelOverrun) or self.stage.on_crash is Crash.ESCALATE or not self._may_restart():
            self._on_broken(self.name, error)
            return
        self._context.tracer.emit(EventKind.STAGE_RESTART, self._context.source, 0, self.num_restarts)
        if self.stage.on_crash is Crash.RECOVER:
            await self._recover(batch, out, error)
        else:
            await self._isolate(batch, out, error)

    def _may_restart(self) -> bool:
        now = self._context.env.now()
        worn_out = len(self._recent_restarts) == MAX_RESTARTS and now - self._recent_restarts[0] < RESTART_WINDOW_S
        self._recent_restarts.append(now)
        self.num_restarts += 1
        return not worn_out

    async def _recover(self, batch: list[Any], out: CollectingOutlet, error: BaseException) -> None:
        try:
            await self.stage.recover(batch, error, out)
        except BaseException as second:
            if not self._is_crash(second):
                raise
            self._on_broken(self.name, second)

    async def _isolate(self, batch: list[Any], out: CollectingOutlet, error: BaseException) -> None:
        """Restarts the stage and tries each item alone once more. What left the stage before can not be taken back,
        so the items of a batch that had flushed are not tried again. A stage that has other items in hand is not
        restarted: they would lose the ground under their feet."""
        out.discard()
        if len(self._items_in_hand) <= 1:
            await self.stage.teardown()
            await self.stage.setup(self._context)
        for item in batch:
            if out.has_flushed:
                self.fail(item, StageCrashed(self.name, self.stage.error_code, error))
            elif self._is_wanted(item):
                await self._retry_alone(item, out)

    async def _retry_alone(self, item: Any, out: CollectingOutlet) -> None:
        alone = CollectingOutlet(self)
        try:
            await self.stage.handle([item], alone)
        except BaseException as error:
            if not self._is_crash(error):
                raise
            log.error("request.poisoned_stage", stage=self.name, error=type(error).__name__, exc_info=error)
            self.fail(item, StageCrashed(self.name, self.stage.error_code, error))
        else:
            await alone.flush()
            out.blocked_s += alone.blocked_s


def _cancel_once(task: asyncio.Task[None]) -> None:
    """A second cancel would break into what the first one's `finally` awaits."""
    if not task.cancelling():
        task.cancel()


class InjectedCrash(Exception):
    """A fault point struck: the stage crashes as a bug would crash it."""

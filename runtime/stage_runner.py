"""Runs one stage: receives, calls `handle`, delivers, measures time, recovers after a crash.

It treats every stage, built in or a user's, the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .channel import Channel, ChannelOverrun
from .crash_recovery import CrashRecovery
from .env.log import get_logger
from .exit import Exit
from .fault_injection import Faults
from .histogram import STAGE_BOUNDS_US, Histogram
from .outlet import CollectingOutlet, OutputPort
from .pending_ends import PendingEnds
from .stage import Context, Stage
from .trace.tracer import Emit, EventKind
from .wakeups import Wakeup, WakeupBatch

COUNTED_AT_ONCE = 256  # batches; counting each alone costs 4 us more than recording it for later

STAGE_BATCH = int(EventKind.STAGE_BATCH)  # faster to look up than a member of an enum

log = get_logger("millrace.runtime")


@dataclass(slots=True)
class StageTimes:
    """A stage's time by state, in seconds; the sum is its life.

    The one attribution that all views show. A stage is busy while it works on any item, and blocked while all items in
    its hands wait for room in an output channel. Time in which a stage waits for another one's work counts for the
    other one: see `Stage.busy_s`.
    """

    idle: float = 0.0
    busy: float = 0.0
    blocked: float = 0.0


class StageRunner:
    """One stage's task.

    `run` ends when all inputs are closed and empty, or when it is cancelled.
    """

    __slots__ = (  # over 30 attributes, more than Python stores inline; each step reads them often
        *("_after", "_before", "_wakeup", "_context", "_emit", "_counted_to_s", "_injects_faults", "_is_broken"),
        *("_ends", "_is_stopping", "_current_items", "_names_requests", "_now", "_num_blocked", "_num_carried"),
        *("_on_broken", "_on_crash", "_outlet", "_ports", "_recovery", "_service_us", "_services_us"),
        *("_oldest_since_s", "_source", "_spent", "_told", "_tracer", "_wait_us", "_waits_us", "_wants"),
        *("blocked_on", "blocked_since_s", "busy_since_s", "exit", "faults", "inputs", "is_ready", "last_progress_s"),
        *("name", "num_dropped", "outputs", "stage", "unwanted_ports"),
    )

    def __init__(
        self,
        name: str,
        stage: Stage[Any, Any],
        inputs: Mapping[str, Channel[Any]],
        outputs: Mapping[str, OutputPort],
        exit: Exit[Any] | None,
        context: Context,
        on_broken: Callable[[str, BaseException], None],
        on_crash: Callable[[str, BaseException, Sequence[Any]], None],
        wakeups: WakeupBatch,
    ) -> None:
        self.name = name
        self.stage = stage
        self.inputs = dict(inputs)
        self.outputs = dict(outputs)
        self.exit = exit
        self._spent = StageTimes()  # up to `_counted_to_s`; busy: `handle` had something
        self._told = StageTimes()  # the last result of `times`
        self._wait_us = Histogram(STAGE_BOUNDS_US)
        self._service_us = Histogram(STAGE_BOUNDS_US)
        self._waits_us: list[int] = []  # of batches that are not in the histograms yet
        self._services_us: list[int] = []
        self.num_dropped = 0  # items of requests that had ended
        self.is_ready = asyncio.Event()
        self.last_progress_s = context.env.now()
        self.busy_since_s = 0.0  # when `handle` last got something while idle
        self.unwanted_ports: set[str] = set()  # with queued items that the stage did not want, at the last receive
        self.blocked_on: Channel[Any] | None = None  # the full channel that the stage waits for now
        self.blocked_since_s = 0.0
        self._context = context
        self._on_broken = on_broken
        self._on_crash = on_crash
        self.faults: Faults | None = None  # from fault injection
        self._wakeup = Wakeup(wakeups)
        self._recovery = CrashRecovery(self, context, on_crash, self._give_up)
        self._current_items: dict[asyncio.Task[None], tuple[str, ...]] = {}
        self._is_stopping = False
        self._is_broken = False
        self._names_requests = False  # whether items of the last batch have a `request_id`
        self._num_carried = 0  # batches, or concurrent items, that `handle` has now
        self._num_blocked = 0  # of these, those that wait for room in an output
        self._oldest_since_s = 0.0  # when the oldest item of the last batch came
        self._counted_to_s = context.env.now()
        # looked up once, as each step runs this code eight times
        self._now = context.env.now
        self._source = context.source
        self._tracer = context.tracer
        self._emit: Emit | None = None
        self._outlet = CollectingOutlet(self)  # of whole batches, which come one at a time
        self._ports = tuple(self.inputs.items())
        self._wants = stage.wants if type(stage).wants is not Stage.wants else None
        self._injects_faults = context.env.injects_faults
        self._ends = PendingEnds(self._tell_ended) if type(stage).ended is not Stage.ended else None
        self._before, self._after = f"{name}.crash.before", f"{name}.crash.after"
        for port, channel in self._ports:
            channel.listen(self._wakeup, partial(stage.wakes, port) if type(stage).wakes is not Stage.wakes else None)
        if stage.reads_lane:
            context.lane.listen(self._wakeup)

    # -- the loop

    async def run(self, all_set_up: asyncio.Event) -> None:
        """Sets the stage up, feeds it from `all_set_up` on until its inputs end, tears it down."""
        await self.stage.setup(self._context)
        self.is_ready.set()
        at_once, wakeup = self.stage.concurrency, self._wakeup
        try:
            await all_set_up.wait()  # what it sends may need another stage's set-up
            self._counted_to_s = self._now()
            while not self._is_broken:
                if not wakeup.is_set:
                    if self._has_ended():
                        break
                    await wakeup
                wakeup.is_set = False
                if (batch := self._receive(now := self._now())) is not None:
                    if at_once is None:
                        await self._carry(batch, now, self._outlet)
                    else:
                        await self._carry_singly(batch, at_once)
                    if self.unwanted_ports:
                        wakeup.set()  # it may want now what it did not want before
            await self._finish_current_items()
        finally:
            self._is_stopping = True
            await self._drop_current_items()
            await self.stage.teardown()

    @property
    def is_busy(self) -> bool:
        """Whether `handle` has something now."""
        return self._num_carried > 0

    @property
    def num_restarts(self) -> int:
        """How often the stage was restarted after a crash."""
        return self._recovery.num_restarts

    @property
    def num_current_items(self) -> int:
        """How many single items have a task of their own now."""
        return len(self._current_items)

    @property
    def times(self) -> StageTimes:
        """Its time by state, up to now."""
        now = self._now()
        self._count_up_to(now)
        spent, told = self._spent, self._told
        # no part ever shrinks: it is a counter in /metrics
        busy = max(told.busy, self.stage.busy_s(spent.busy, now))
        idle = max(told.idle, spent.idle + spent.busy - busy)
        self._told = StageTimes(idle, busy, spent.blocked)
        return self._told

    def _give_up(self, error: BaseException) -> None:
        """Takes nothing more: the cause of the crash may still be there."""
        self._is_broken = True
        self._on_broken(self.name, error)

    def _count_up_to(self, now: float) -> None:
        """Adds the time since the last change of state to that state. Called before each change."""
        passed, self._counted_to_s = now - self._counted_to_s, now
        if not self._num_carried:
            self._spent.idle += passed
        elif self._num_blocked == self._num_carried:
            self._spent.blocked += passed
        else:
            self._spent.busy += passed

    def _receive(self, now: float) -> list[Any] | None:
        """The items queued at the wanted ports, in port order; None if there is nothing to do."""
        batch: list[Any] = []
        wants = self._wants
        if self.unwanted_ports:
            self.unwanted_ports.clear()
        for port, channel in self._ports:
            if not channel.queued:
                continue
            if wants is not None and not wants(port):
                self.unwanted_ports.add(port)
                continue
            items = channel.recv_all(now)
            if not batch or channel.waiting_since < self._oldest_since_s:
                self._oldest_since_s = channel.waiting_since
            batch = batch + items if batch else items
        if batch and self.exit is not None:
            batch = self._still_wanted(batch)
        if batch:
            return batch
        if self.stage.reads_lane and self._context.lane.is_set:
            self._oldest_since_s = now
            return batch
        return None

    def _has_ended(self) -> bool:
        for _, channel in self._ports:  # noqa: SIM110  # a generator would cost as much as the whole method
            if not channel.is_closed or len(channel):
                return False
        return True

    def _still_wanted(self, batch: list[Any]) -> list[Any]:
        is_live, self._names_requests = self._context.is_live, False
        for item in batch:
            request_id = getattr(item, "request_id", None)
            if request_id is not None:
                self._names_requests = True
                if not is_live(request_id):
                    break
        else:
            return batch
        kept = [item for item in batch if self.is_wanted(item)]
        self.num_dropped += len(batch) - len(kept)
        return kept

    def is_wanted(self, item: Any) -> bool:
        """Whether the item's request has not ended."""
        request_id = getattr(item, "request_id", None)
        return request_id is None or self._context.is_live(request_id)

    # -- one batch

    async def _carry(self, batch: list[Any], began: float, out: CollectingOutlet) -> None:
        """Calls `handle` with a batch that was received at `began`, and delivers the results."""
        names_requests, waited = self._names_requests, began - self._oldest_since_s
        if waited < 0.0:  # the oldest item woke no task, and was received with a later one
            waited = 0.0
        if self._num_carried:
            self._count_up_to(began)
        else:  # as `_count_up_to`, without a call
            self._spent.idle += began - self._counted_to_s
            self._counted_to_s = self.busy_since_s = began
        self._num_carried += 1
        try:
            try:
                if self._injects_faults:
                    self._fault(self._before)
                if self.faults is not None:
                    await self.faults.strike()
                await self.stage.handle(batch, out)
                if self._injects_faults:
                    self._fault(self._after)
            except BaseException as error:
                if not self.is_crash(error):
                    raise
                await self._recovery.recover(batch, out, error)
            ended = self._now()
            if out.items and not self.deliver_at_once(out, ended):
                await self.deliver(out)
                ended = self._now()
        except BaseException:
            self._count_up_to(self._now())
            self._num_carried -= 1
            if self._ends:
                self._ends.released(self)
            raise
        if self._num_carried == 1:  # as `_count_up_to`, without a call
            self._spent.busy += ended - self._counted_to_s
            self._counted_to_s = ended
        else:
            self._count_up_to(ended)
        self._num_carried -= 1
        if self._ends:
            self._ends.released(self)
        self.last_progress_s = ended
        busy, blocked_us = ended - began, 0
        if out.has_flushed or out.blocked_s:
            busy, blocked_us = busy - out.blocked_s, int(out.blocked_s * 1e6)
            out.blocked_s, out.has_flushed = 0.0, False
        self._note_times(batch, int(waited * 1e6), int(busy * 1e6), blocked_us, names_requests)

    def _note_times(
        self, batch: list[Any], waited_us: int, busy_us: int, blocked_us: int, names_requests: bool
    ) -> None:
        """Records how long a batch waited, was worked on, and waited for room in an output."""
        self._waits_us.append(waited_us)
        self._services_us.append(busy_us)
        if len(self._waits_us) >= COUNTED_AT_ONCE:
            self._count()
        if self._tracer.enabled:
            try:
                step = int(batch[0].step)
            except Exception:  # the item has no step, or reading it raises
                step = 0
            emit = self._emit or self._bind()
            emit(STAGE_BATCH, self._source, step, len(batch), waited_us, busy_us, blocked_us)
        if names_requests:
            self._notify_requests(batch, (waited_us, busy_us, blocked_us))

    def _bind(self) -> Emit:
        self._emit = self._tracer.bind()
        return self._emit

    def _count(self) -> None:
        """Moves the recorded times into the histograms."""
        if self._waits_us:
            waits_us, services_us = np.array(self._waits_us), np.array(self._services_us)
            self._waits_us.clear()
            self._services_us.clear()
            self._wait_us.observe_many(waits_us)
            self._service_us.observe_many(services_us)

    @property
    def wait_us(self) -> Histogram:
        """How long the oldest item of each batch waited."""
        self._count()
        return self._wait_us

    @property
    def service_us(self) -> Histogram:
        """How long the stage worked on each batch, without the wait for room in an output or for another stage."""
        if self.stage.service_us is not None:
            return self.stage.service_us
        self._count()
        return self._service_us

    def _notify_requests(self, batch: list[Any], times_us: tuple[int, int, int]) -> None:
        """Reports the live requests of the batch to the exit and to the trace."""
        assert self.exit is not None
        context = self._context
        for request_id in dict.fromkeys(getattr(item, "request_id", None) for item in batch):
            if request_id is None:
                continue
            self.exit.note_service(request_id, self.name, times_us[1])
            number = self.exit.number_of(request_id)
            if number is not None:
                context.tracer.emit(EventKind.REQUEST_STAGE, context.source, 0, number, *times_us)

    def _fault(self, name: str) -> None:
        if self._context.env.fault(name):
            raise InjectedCrash(name)

    def is_crash(self, error: BaseException) -> bool:
        """Whether `error` is the stage's own failure, and not a cancellation or exit from outside."""
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
            return False
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            return not self._is_stopping and task is not None and not task.cancelling()
        return True

    # -- single items, in tasks of their own

    async def _carry_singly(self, batch: list[Any], at_once: int) -> None:
        for item in batch:
            while len(self._current_items) >= at_once:
                await asyncio.wait(list(self._current_items), return_when=asyncio.FIRST_COMPLETED)
            if not self.is_wanted(item):
                self.num_dropped += 1
                continue
            task = asyncio.get_running_loop().create_task(self._carry_one(item), name=f"{self.name}.item")
            self._current_items[task] = (item.request_id,) if hasattr(item, "request_id") else ()
            task.add_done_callback(self._item_done)

    async def _carry_one(self, item: Any) -> None:
        await self._carry([item], self._now(), CollectingOutlet(self))

    def _item_done(self, task: asyncio.Task[None]) -> None:
        self._current_items.pop(task, None)
        if self._ends:
            self._ends.released(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_broken(self.name, error)

    async def _finish_current_items(self) -> None:
        while self._current_items:
            await asyncio.wait(list(self._current_items))

    async def _drop_current_items(self) -> None:
        for task in self._current_items:
            _cancel_once(task)
        await self._finish_current_items()

    def request_ended(self, request_id: str, cause: str) -> None:
        """Cancels the tasks that work on `request_id` here, and tells the stage once they and the batch are done."""
        for task, request_ids in list(self._current_items.items()):
            if request_id in request_ids:
                _cancel_once(task)
        if self._ends is not None:
            holders: list[object] = [one for one, ids in self._current_items.items() if not ids or request_id in ids]
            if self._num_carried and not self._current_items:
                holders.append(self)  # a whole batch
            self._ends.add(request_id, cause, holders)

    def _tell_ended(self, request_id: str, cause: str) -> None:
        try:
            self.stage.ended(request_id, cause)
        except Exception as error:  # the end of a request must not fail for a bug of one stage
            self._on_crash(self.name, error, ())

    # -- delivering

    def deliver_at_once(self, out: CollectingOutlet, now: float | None = None) -> bool:
        """Sends what there is room for, in order, at the time `now`. Returns whether that was all."""
        if self._injects_faults:
            return False  # `deliver` simulates slow edges
        items = out.items
        for count, (output, item) in enumerate(items):
            if not output.channel.try_send(item, now):
                del items[:count]
                return False
            for tap in output.taps:
                tap.try_send(item)
        items.clear()
        return True

    async def deliver(self, out: CollectingOutlet) -> None:
        """Sends each item to its port's channel, waiting for room where the edge allows it."""
        env, items, out.items = self._context.env, out.items, []
        for output, item in items:
            if env.fault("channel.delay"):
                await env.sleep(env.random("channel.delay").uniform(0.0, 0.02))
            if not output.channel.try_send(item):
                out.blocked_s += await self._wait_and_send(output, item)
            for tap in output.taps:
                tap.try_send(item)

    async def _wait_and_send(self, output: OutputPort, item: Any) -> float:
        if output.edge is not None and output.edge.when_full == "never":
            raise ChannelOverrun(f"{output.edge.name} was full at {output.channel.capacity}, though credits bound it")
        began = ended = self.blocked_since_s = self._now()
        self._count_up_to(began)
        self._num_blocked += 1
        self.blocked_on = output.channel
        try:
            await output.channel.send(item)
        finally:
            self._count_up_to(ended := self._now())
            self._num_blocked -= 1
            self.blocked_on = None
        return ended - began

    def fail(self, item: Any, error: BaseException) -> None:
        """Ends the requests of `item` at the exit."""
        if self.exit is None:
            log.warning("request.failed", stage=self.name, error=repr(error))
        else:
            self.exit.fail(item, error)


def _cancel_once(task: asyncio.Task[None]) -> None:
    """Cancels a task unless it was cancelled before.

    A second cancel would interrupt its `finally`.
    """
    if not task.cancelling():
        task.cancel()


class InjectedCrash(Exception):
    """A fault point struck: the stage crashes as it would from a bug."""

"""Conformance kit: checks that a custom stage keeps the promises of every stage.

They are order, cancel, forgetting, drain, bounded memory, error isolation and a clean stop.

    def test_my_stage_keeps_its_promises():
        conformance(MyStage, lambda request_id, i: TokenRequest(request_id, ...))

Runs the stage in small pipelines, in virtual time, under many seeded orders of events. Needs neither model nor torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from ...runtime.env.log import captured_logs
from ...runtime.graph import Port
from ...runtime.pipeline import Pipeline
from ...runtime.simulation.run import POLICIES, Deadlock, Livelock, SimEnv, SimError, run
from ...runtime.stage import Stage
from .conformance_parts import CountingExit, EntrantItem, EntryStage, ObservedStage, PoisonItem, keys_in

NUM_ITEMS = 12
QUIET_S = 3_600.0  # virtual time after which nothing more comes out

MakeItem = Callable[[str, int], Any]
Scenario = Callable[["_Bench"], Coroutine[Any, Any, None]]


class BrokenPromise(AssertionError):
    """The stage breaks a promise of every stage. The message says which one, and what happened."""

    def __init__(self, promise: str, what: str) -> None:
        super().__init__(f"{promise}: {what}")
        self.promise = promise


def conformance(
    make_stage: Callable[[], Stage[Any, Any]],
    make_item: MakeItem,
    *,
    make_poison: Callable[[str, int], Any] | None = None,
    is_ordered: bool | None = None,
    capacity: int = 4,
    seeds: int = 12,
) -> None:
    """Raises `BrokenPromise` for the first promise that a stage breaks.

    make_stage    makes a new stage with ports `in` and `out`
    make_item     (request id, i) to an input item of that request; items of different i differ. A message of a step
                  (`StepText`, `StepTokens`, ...) names no request: let its sequences, or its `step`, have numbers of
                  its own. If an item has a `first_sequence_id`, it is i times its number of sequences
    make_poison   the same, for an item on which the stage fails. By default one that raises on any attribute access
    is_ordered    whether items leave in the order in which they came; by default True unless `concurrency` is above 1
    capacity      of the channels around the stage, which may hold this many items at once
    seeds         number of runs per promise; each has its own order of events

    The promises. **once**: each item comes out as often as it does alone. **order**. **cancel**: a cancelled request
    stops, and no other one does; `CancelledError` passes through. **forgetting**: once all requests have ended, no
    attribute of the stage names one (drop such state in `ended`). **drain**: when no more items come in, all come out.
    **bounded memory**: while nothing can leave, the stage takes no more items than the channels around it hold.
    **error isolation**: an item that fails ends its own request, and no other. **clean stop**: no task outlives the
    stage.
    """
    kit = _Kit(make_stage, make_item, make_poison or PoisonItem, is_ordered, capacity)
    for i in range(NUM_ITEMS):
        kit.expected[i] = kit.count_alone(i)
    for name, scenario in _SCENARIOS.items():
        for seed in range(seeds):
            kit.run(name, scenario, seed)


# -- one test run


class _Kit:
    """The caller's arguments, and what was found out about the stage."""

    def __init__(
        self,
        make_stage: Callable[[], Stage[Any, Any]],
        make_item: MakeItem,
        make_poison: MakeItem,
        is_ordered: bool | None,
        capacity: int,
    ) -> None:
        self.make_stage = make_stage
        self.make_item = make_item
        self.make_poison = make_poison
        self.capacity = capacity
        self.expected: dict[int, int] = {}  # item -> how often it comes out, replies included
        at_once = make_stage().concurrency
        self.is_ordered = (at_once or 1) == 1 if is_ordered is None else is_ordered

    def count_alone(self, i: int) -> int:
        """How often item i comes out of a new stage that gets no other item."""
        counts: list[int] = []

        async def alone(bench: _Bench) -> None:
            await bench.submit(i)
            await bench.env.sleep(QUIET_S)
            bench.require_nothing_failed()
            counts.append(bench.exit.num_out[i])
            if not counts[0]:
                raise BrokenPromise(
                    "drain", f"item {i}, alone, never came out: call fail() or reply() for items that you keep"
                )

        self.run("once", alone, seed=0)
        return counts[0]

    def run(self, promise: str, scenario: Scenario, seed: int) -> None:
        """Runs one scenario under one seed."""
        policy = POLICIES[seed % len(POLICIES)]

        async def main(env: SimEnv) -> None:
            bench = _Bench(self, env, promise)
            await bench.pipeline.start()
            try:
                await scenario(bench)
            finally:
                await bench.stop()
                await env.sleep(1.0)  # for tasks that were cancelled and not awaited

        try:
            with captured_logs():
                result = run(main, seed=seed, policy=policy, thread_delay_s=(0.0, 0.01), max_callbacks=500_000)
        except BrokenPromise as error:
            error.add_note(f"seed {seed}, policy {policy}")
            raise
        except (Deadlock, Livelock) as error:
            raise BrokenPromise(promise, f"{error}") from error
        except SimError as error:
            raise BrokenPromise("clean stop", f"{error}") from error
        if result.leaked_tasks:
            raise BrokenPromise("clean stop", f"tasks outlived the stage: {'; '.join(result.leaked_tasks)}")


class _Bench:
    """One pipeline: an entry stage, the stage under test, and an exit that counts."""

    def __init__(self, kit: _Kit, env: SimEnv, promise: str) -> None:
        self.kit = kit
        self.env = env
        self.promise = promise
        self.dice = env.random("conformance")
        self.exit = CountingExit(kit.expected)
        self.watched = ObservedStage(kit.make_stage(), self.exit)
        self.pipeline = Pipeline()
        self.pipeline.use(env)
        for name, stage in (("door", EntryStage()), ("stage", self.watched), ("exit", self.exit)):
            self.pipeline.add(stage, name)
        self.pipeline.entry = Port("door", "in")
        self.pipeline.connect("door", "stage", capacity=kit.capacity, reason="as the caller says")
        self.pipeline.connect("stage", "exit", capacity=kit.capacity, reason="as the caller says")

    async def submit(self, i: int, make: MakeItem | None = None) -> None:
        """Submits item i as the request `request-i`."""
        request_id = f"request-{i}"
        item = (make or self.kit.make_item)(request_id, i)
        self.exit.note_item(i, request_id, item)
        await self.pipeline.submit(EntrantItem(request_id, item))

    async def submit_all(self) -> None:
        for i in range(NUM_ITEMS):
            await self.submit(i)

    async def stop(self) -> None:
        """Stops the pipeline. A stage that cannot be stopped breaks the promise of cancel."""
        try:
            async with asyncio.timeout(QUIET_S):
                await self.pipeline.stop()
        except TimeoutError:
            raise BrokenPromise("cancel", "the stage continues after it was cancelled") from None
        if self.watched.has_swallowed:
            raise BrokenPromise("cancel", "handle swallowed CancelledError, and returned: do not catch it")

    async def moment(self) -> None:
        """Waits for a random time, short or long, in which the stage runs."""
        if self.dice.random() < 0.5:
            for _ in range(self.dice.randrange(30)):
                await asyncio.sleep(0)
        else:
            await self.env.sleep(self.dice.choice([0.001, 0.1, 1.0, 10.0]) * self.dice.random())

    # -- checks

    def broken(self, what: str) -> BrokenPromise:
        return BrokenPromise(self.promise, what)

    def require_all_out(self, but: Iterable[int] = ()) -> None:
        """Checks that every item came out as often as it does alone, and no request failed."""
        left_out = set(but)
        self.require_nothing_failed(left_out)
        for i, expected in self.kit.expected.items():
            found = self.exit.num_out[i]
            if i not in left_out and found != expected:
                raise self.broken(f"item {i} came out {found} times with other items, and {expected} times alone")

    def require_nothing_failed(self, but: Iterable[int] = ()) -> None:
        failed = {i: error for i, error in self.exit.errors.items() if i not in set(but)}
        if failed:
            i, error = next(iter(failed.items()))
            raise self.broken(f"request {i} ended with {error!r}, though its item is valid") from error
        if self.pipeline.health.state == "dead":
            raise self.broken(f"the pipeline is dead: {self.pipeline.health.reason}")

    def require_forgotten(self) -> None:
        """Checks that no attribute of the stage names an ended request, or one of its sequences."""
        for name, value in vars(self.watched.stage).items():
            for key in keys_in(value):
                owner = self.exit.owner_of(key)
                if owner is not None:
                    raise BrokenPromise(
                        "forgetting",
                        f"{name} still holds {key!r} of {owner}, and all requests have ended: write "
                        "ended(request_id, cause), and drop there what the stage keeps for a request",
                    )

    def require_order(self) -> None:
        order = [i for i in self.exit.first_out if i in self.kit.expected]
        if self.kit.is_ordered and order != sorted(order):
            raise self.broken(f"items 0, 1, 2, ... came out as {', '.join(map(str, order))}")

    def require_bound(self) -> None:
        limit = max(self.kit.capacity, self.watched.concurrency or 1)
        if self.watched.most_held > limit:
            raise self.broken(
                f"the stage held {self.watched.most_held} items at once, and the channel before it holds "
                f"{self.kit.capacity}: it takes items while nothing leaves; send what you took before `handle` returns"
            )


# -- the promises


async def _once(bench: _Bench) -> None:
    await bench.submit_all()
    await bench.env.sleep(QUIET_S)
    bench.require_all_out()


async def _order(bench: _Bench) -> None:
    for i in range(NUM_ITEMS):
        await bench.submit(i)
        if bench.dice.random() < 0.3:
            await bench.moment()
    await bench.env.sleep(QUIET_S)
    bench.require_order()


async def _cancel(bench: _Bench) -> None:
    cancelled = bench.dice.sample(range(NUM_ITEMS), 3)
    feeding = asyncio.create_task(bench.submit_all())
    for i in cancelled:
        await bench.moment()
        bench.pipeline.cancel(f"request-{i}")
    await feeding
    await bench.env.sleep(QUIET_S)
    bench.require_all_out(but=cancelled)
    for i in cancelled:
        is_stopped = bench.watched.concurrency is not None and bench.exit.names_requests
        if bench.exit.num_after_end[i] and is_stopped:
            raise bench.broken(f"item {i} came out after its request was cancelled: its work was not stopped")
    bench.require_forgotten()


async def _stop(bench: _Bench) -> None:
    feeding = asyncio.create_task(bench.submit_all())
    await bench.moment()
    feeding.cancel()
    await asyncio.wait([feeding])
    await bench.stop()


async def _drain(bench: _Bench) -> None:
    await bench.submit_all()
    is_empty = await bench.pipeline.drain(QUIET_S)
    if not is_empty:
        left = sorted(request_id for request_id in bench.exit.live)
        raise bench.broken(f"no more items come in, and these never came out: {', '.join(left)}")
    bench.require_all_out()


async def _bounded_memory(bench: _Bench) -> None:
    bench.exit.gate.clear()
    feeding = asyncio.create_task(bench.submit_all())
    await bench.env.sleep(QUIET_S)
    bench.exit.gate.set()
    await feeding
    await bench.env.sleep(QUIET_S)
    bench.require_bound()
    bench.require_all_out()


async def _error_isolation(bench: _Bench) -> None:
    poisoned = bench.dice.randrange(NUM_ITEMS)
    for i in range(NUM_ITEMS):
        await bench.submit(i, bench.kit.make_poison if i == poisoned else None)
    await bench.env.sleep(QUIET_S)
    bench.require_all_out(but=[poisoned])
    if bench.exit.is_live(f"request-{poisoned}"):
        raise bench.broken(f"item {poisoned} failed, and its request never ended: its client waits forever")


_SCENARIOS: Mapping[str, Scenario] = {
    "once": _once,
    "order": _order,
    "cancel": _cancel,
    "clean stop": _stop,
    "drain": _drain,
    "bounded memory": _bounded_memory,
    "error isolation": _error_isolation,
}

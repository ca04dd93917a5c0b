"""The watch: records of edges, of a late loop, and of the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
from contextvars import ContextVar, copy_context
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.runtime.channel import Channel
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.stage_runner import StageTimes
from millrace.runtime.trace.tracer import EventKind, Tracer, as_dicts
from millrace.runtime.watch import MIN_LAG_US, TICK_S, Watch


def told(tracer: Tracer, kind: EventKind) -> list[dict[str, Any]]:
    events = as_dicts(tracer.read_all(), tracer.names())
    return [
        {field: value for field, value in event.items() if field not in ("time_ns", "kind", "step")}
        for event in events
        if event["kind"] == kind.name
    ]


@sim_test(seeds=1)
async def test_an_edge_that_carried_items_is_recorded_with_changes_since_the_last_record(env: SimEnv):
    tracer, edge, idle = (
        Tracer(env, strict=True),
        Channel[int]("a -> b", 3, env.now),
        Channel[int]("b -> c", 3, env.now),
    )
    watch = Watch(tracer, {"a -> b": edge, "b -> c": idle}, env.now)
    for item in range(3):
        edge.try_send(item)
    await asyncio.sleep(0.5)
    edge.recv_all()
    edge.try_send(3)
    watch.write_edge_depths()
    watch.write_edge_depths()
    await asyncio.sleep(1.0)
    edge.recv_all()
    watch.write_edge_depths()
    assert told(tracer, EventKind.EDGE_DEPTH) == [
        {"source": "a -> b", "num_waiting": 1, "high_water": 3, "num_sent": 4, "full_us": 500_000},
        {"source": "a -> b", "num_waiting": 0, "high_water": 1, "num_sent": 0, "full_us": 0},
    ]


@sim_test(seeds=1)
async def test_an_edge_that_stays_full_is_told_again_and_again(env: SimEnv):
    tracer, edge = Tracer(env), Channel[int]("a -> b", 1, env.now)
    watch = Watch(tracer, {"a -> b": edge}, env.now)
    edge.try_send(1)
    for _ in range(3):
        await asyncio.sleep(0.25)
        watch.write_edge_depths()
    assert [event["full_us"] for event in told(tracer, EventKind.EDGE_DEPTH)] == [250_000] * 3


@sim_test(seeds=1)
async def test_how_a_stage_spent_its_time_is_recorded_since_the_last_record(env: SimEnv):
    tracer, times = Tracer(env, strict=True), StageTimes(idle=1.0)
    watch = Watch(tracer, {}, env.now, stages={"busy": SimpleNamespace(times=times)})
    watch.write_stage_times()  # it was idle
    for busy_s, blocked_s, idle_s in ((0.5, 0.0, 0.5), (0.0, 0.0, 9.0), (0.25, 0.25, 0.0)):
        times.busy, times.blocked, times.idle = times.busy + busy_s, times.blocked + blocked_s, times.idle + idle_s
        watch.write_stage_times()
    assert told(tracer, EventKind.STAGE_TIME) == [
        {"source": "busy", "busy_us": 500_000, "blocked_us": 0, "idle_us": 500_000},
        {"source": "busy", "busy_us": 250_000, "blocked_us": 250_000, "idle_us": 0},
    ]


def test_a_loop_that_stood_still_and_collections_of_any_thread_are_told():
    async def main() -> Tracer:
        tracer = Tracer()
        tracer.emit(EventKind.STALL, tracer.source("a"))
        watch = Watch(tracer, {}, time.monotonic)
        watch.start()
        await asyncio.sleep(0.08)
        time.sleep(0.06)  # the loop, which is due at 0.1 s
        garbage = [[number] for number in range(300_000)]
        gc.collect()
        other = threading.Thread(target=gc.collect)
        other.start()
        other.join()
        await asyncio.sleep(0.12)
        watch.stop()
        watch.stop()
        assert len(garbage) and watch._on_gc not in gc.callbacks
        return tracer

    tracer = asyncio.run(main())
    assert max(event["lag_us"] for event in told(tracer, EventKind.LOOP_LAG)) >= max(40_000, MIN_LAG_US)
    assert sum(event["generation"] == 2 for event in told(tracer, EventKind.GC_PAUSE)) >= 2
    assert len(tracer.readers()) == 1, "the other thread got a ring for a collection alone"


def test_a_collection_while_a_ring_is_being_made_does_not_stop_the_thread():
    """The collector may run while the tracer holds its lock."""
    tracer, seconds = Tracer(), iter(range(100))  # any collection takes a second by this clock
    watch = Watch(tracer, {}, lambda: next(seconds))

    def collect() -> None:
        watch._on_gc("start", {})
        watch._on_gc("stop", {"generation": 2, "collected": 0, "uncollectable": 0})

    with tracer._lock:
        other = threading.Thread(target=collect, daemon=True)
        other.start()
        other.join(60.0)
        assert not other.is_alive()
    assert not tracer.readers()


def test_who_listens_hears_of_every_tick_and_every_collection_until_it_has_stopped():
    ticks: list[float] = []
    pauses: list[int] = []

    async def main() -> None:
        watch = Watch(Tracer(enabled=False), {}, time.monotonic)
        watch.on_tick.append(ticks.append)
        watch.on_pause.append(pauses.append)
        watch.start()
        time.sleep(0.2)  # the loop, which is due at 0.1 s
        gc.collect()
        while not ticks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        watch.stop()
        heard = len(ticks), len(pauses)
        gc.collect()
        await asyncio.sleep(0.15)
        assert heard == (len(ticks), len(pauses))

    asyncio.run(main())
    assert ticks[0] > 0.09 and min(pauses) >= 0


@pytest.mark.slow
def test_a_watch_ticks_less_often_while_no_request_lives_and_soon_again_once_woken():
    ticks: list[float] = []
    live: list[str] = []

    async def heard(num_ticks: int) -> float:
        while len(ticks) < num_ticks:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return ticks[-1]

    async def main() -> None:
        watch = Watch(Tracer(), {}, time.monotonic, lambda: bool(live))
        watch.on_tick.append(lambda _late_s: ticks.append(time.monotonic()))
        watch.idle_tick_s = 0.8
        watch.start()
        first_s = await heard(1)
        assert watch.tick_s == watch.idle_tick_s
        watch.idle_tick_s = 600.0  # from the next tick on
        assert await heard(2) - first_s > 0.7
        live.append("a")
        watch.wake()
        await heard(3)  # at once, and not in ten minutes
        assert watch.tick_s == TICK_S, "something lives"
        watch.stop()
        watch.wake()
        await asyncio.sleep(2 * TICK_S)
        assert len(ticks) == 3, "it was stopped"

    asyncio.run(main())


def test_an_overdue_tick_reports_its_lag_though_a_request_wakes_the_watch_before_it():
    late: list[float] = []
    seconds = [0.0]

    async def main() -> None:
        watch = Watch(Tracer(), {}, lambda: seconds[0], lambda: False)
        watch.tick_s, watch.idle_tick_s = 0.11, 0.11
        watch.on_tick.append(late.append)
        watch.start()
        seconds[0] = 5.0  # the loop was held, and then a request came
        watch.wake()
        while not late:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        watch.stop()
        assert watch.resumed_s == 5.0

    asyncio.run(main())
    assert late[0] > 4.0


def test_a_loop_that_stood_still_says_when_it_went_on():
    seconds = [0.0]

    async def main() -> None:
        watch = Watch(Tracer(enabled=False), {}, lambda: seconds[0])
        watch.start()
        seconds[0] = 0.2
        await asyncio.sleep(0.15)
        assert watch.resumed_s == -math.inf, "a little late is no standstill"
        seconds[0] = 30.0
        await asyncio.sleep(0.15)
        assert watch.resumed_s == 30.0
        watch.stop()

    asyncio.run(main())


def test_ticks_have_nothing_of_the_context_of_the_request_that_woke_them():
    request_id = ContextVar("request_id", default="")

    async def main() -> list[str]:
        watch, told = Watch(Tracer(enabled=False), {}, time.monotonic, lambda: False), list[str]()
        watch.on_tick.append(lambda late_s: told.append(request_id.get()))
        watch.start()
        await asyncio.sleep(0)
        context = copy_context()
        context.run(request_id.set, "of a client")
        context.run(watch._tick)  # the next tick is 1 s away
        context.run(watch.wake)
        await asyncio.sleep(1.5 * TICK_S)
        watch.stop()
        return told[1:]

    assert set(asyncio.run(main())) == {""}

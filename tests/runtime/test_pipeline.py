"""A pipeline's life: start, requests, taps, slices, drain, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from millrace.runtime.channel import Channel
from millrace.runtime.crash_recovery import StageCrashed
from millrace.runtime.graph import GraphError, Port
from millrace.runtime.pipeline import Busy, NotServing, Pipeline
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import no_leaked_tasks, sim_test
from millrace.runtime.stage import Crash, Outlet, Stage
from millrace.runtime.watch import TICK_S
from tests.runtime.flows import Pass, Poison, Slow, Word, WordBox, line


def test_a_pipeline_runs_on_a_live_loop_and_leaves_nothing() -> None:
    async def main() -> None:
        with no_leaked_tasks():
            async with line(Pass(), Pass2()) as pipeline:
                answers = await asyncio.gather(*(pipeline.call(Word(str(i), str(i))) for i in range(50)))
                assert answers == [[str(i)] for i in range(50)]
                stats = [channel.stats() for channel in pipeline.channels.values()]
                assert all(each.depth == 0 and each.high_water <= each.capacity for each in stats)

    asyncio.run(main())


class Pass2(Pass):
    pass


@sim_test(seeds=3)
async def test_a_pipeline_starts_once_and_says_where_it_is(env: SimEnv) -> None:
    pipeline = line(Pass(), env=env)
    assert pipeline.health.state == "new"
    with pytest.raises(NotServing, match="the engine is new"):
        await pipeline.call(Word("a"))
    await pipeline.start()
    assert pipeline.health.is_ready
    with pytest.raises(RuntimeError, match="a pipeline starts once, and this one is ready: build another"):
        await pipeline.start()
    await pipeline.stop()
    await pipeline.stop()
    assert pipeline.health.state == "stopped"


@sim_test(seeds=2)
async def test_start_checks_the_graph(env: SimEnv) -> None:
    broken = line(Pass(), env=env)
    broken.edges.clear()
    with pytest.raises(GraphError, match="output pass.out goes nowhere"):
        await broken.start()


@sim_test(seeds=6)
async def test_start_returns_when_every_stage_is_set_up(env: SimEnv) -> None:
    class Loads(Pass):
        is_loaded = False

        async def setup(self, context: Any) -> None:
            await env.sleep(3.0)
            self.is_loaded = True

    loads = Loads()
    pipeline = line(Pass(), loads, env=env)
    starting = asyncio.create_task(pipeline.start())
    await env.sleep(1.0)
    assert pipeline.health.state == "loading" and not starting.done()
    await starting
    assert loads.is_loaded and pipeline.health.is_ready
    await pipeline.stop()


@sim_test(seeds=6)
async def test_what_waits_before_the_start_comes_to_no_stage_until_all_are_set_up(env: SimEnv) -> None:
    came_s: list[float] = []

    class Notes(Pass):
        async def handle(self, batch: Sequence[Any], out: Outlet[Any]) -> None:
            came_s.append(env.now())
            await super().handle(batch, out)

    class Loads(Pass):
        async def setup(self, context: Any) -> None:
            await env.sleep(3.0)

    part = line(Notes(), Loads(), env=env).slice("notes", "loads")
    given = Channel[Any]("given", 4, env.now)
    given.try_send(Word("a"))
    part.give_channel("notes.in", given)
    began_s = env.now()
    await part.start()
    await env.sleep(0.1)
    assert came_s[0] - began_s >= 3.0
    await part.stop()


# -- requests


def test_a_request_wakes_the_watch_of_its_pipeline() -> None:
    async def main() -> None:
        async with line(Pass()) as pipeline:
            watch = pipeline.watch
            assert watch is not None
            while watch.tick_s == TICK_S:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await pipeline.call(Word("a", "a"))
            assert watch.tick_s == TICK_S

    asyncio.run(main())


@sim_test(seeds=6)
async def test_leaving_a_stream_early_cancels_the_request(env: SimEnv) -> None:
    async with line(Pass(), env=env) as pipeline:
        assert pipeline.exit is not None
        ended: list[tuple[str, str]] = []
        pipeline.exit.on_end.append(lambda box, cause, error: ended.append((box.request_id, cause)))
        stream = pipeline.stream(Word("a", "a", is_last=False))
        assert await anext(stream) == "a"
        await stream.aclose()
        assert ended == [("a", "cancel")] and not pipeline.exit.live


@sim_test(seeds=6)
async def test_a_deadline_ends_a_request_wherever_it_is(env: SimEnv) -> None:
    async with line(Slow(env), env=env) as pipeline:
        outbox = await pipeline.submit(Word("a", "a"), deadline_s=0.5)
        assert isinstance(outbox, WordBox)
        began = env.now()
        assert [event async for event in outbox] == []
        assert outbox.cause == "deadline" and env.now() - began == pytest.approx(0.5)


@sim_test(seeds=6)
async def test_without_waiting_a_full_first_channel_says_busy_and_the_request_is_over(env: SimEnv) -> None:
    async with line(Slow(env), env=env, capacity=1) as pipeline:
        capacity = pipeline.channels["slow.in"].capacity
        await pipeline.submit(Word("running"))
        await env.sleep(0.1)
        for i in range(capacity):
            await pipeline.submit(Word(str(i)), wait=False)
        with pytest.raises(Busy, match=f"{capacity} requests wait to be processed"):
            await pipeline.submit(Word("too many"), wait=False)
        assert pipeline.exit is not None and not pipeline.exit.is_live("too many")
        late = asyncio.create_task(pipeline.submit(Word("patient")))
        await env.sleep(0.1)
        assert not late.done() and pipeline.exit.is_live("patient")
        await late
        assert await pipeline.drain(10.0)


@sim_test(seeds=6)
async def test_a_submit_that_is_cancelled_while_it_waits_leaves_nothing_live(env: SimEnv) -> None:
    async with line(Slow(env), env=env) as pipeline:
        await pipeline.submit(Word("running"))
        await env.sleep(0.1)
        for i in range(pipeline.channels["slow.in"].capacity):
            await pipeline.submit(Word(str(i)))
        waiting = asyncio.create_task(pipeline.submit(Word("gone")))
        await env.sleep(0.1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert pipeline.exit is not None and not pipeline.exit.is_live("gone")
        assert await pipeline.drain(10.0)


@sim_test(seeds=6)
async def test_a_request_waiting_to_enter_a_pipeline_that_dies_gets_an_error(env: SimEnv) -> None:
    class Fatal(Slow):
        on_crash = Crash.ESCALATE

        async def handle(self, batch: Sequence[Any], out: Outlet[Any]) -> None:
            await env.sleep(1.0)
            raise LookupError("beyond mending")

    async with line(Fatal(env), env=env) as pipeline:
        await pipeline.submit(Word("running"))
        await env.sleep(0.1)
        for i in range(pipeline.channels["fatal.in"].capacity):
            await pipeline.submit(Word(str(i)))
        waiting = [asyncio.create_task(pipeline.submit(Word(name))) for name in "abc"]
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, NotServing) and error.health.state == "dead"
        assert pipeline.exit is not None and not pipeline.exit.live


# -- ending


@sim_test(seeds=6)
async def test_drain_takes_nothing_new_and_waits_for_what_is_live(env: SimEnv) -> None:
    async with line(Slow(env), Pass(), env=env) as pipeline:
        running = [asyncio.create_task(pipeline.call(Word(name, name))) for name in "abc"]
        await env.sleep(0.1)
        assert not await pipeline.drain(timeout_s=0.2)
        assert pipeline.health.state == "draining"
        with pytest.raises(NotServing, match="the engine is draining: shutting down"):
            await pipeline.call(Word("late"))
        assert await pipeline.drain(timeout_s=10.0)
        assert [await task for task in running] == [["a"], ["b"], ["c"]]


@sim_test(seeds=9)
async def test_stop_ends_what_is_live_once_and_leaves_no_task(env: SimEnv) -> None:
    pipeline = line(Slow(env), Pass(), env=env, capacity=1)
    await pipeline.start()
    boxes = [await pipeline.submit(Word(str(i), str(i))) for i in range(3)]
    await env.sleep(0.5)
    await pipeline.stop()
    for box in boxes:
        assert isinstance(box, WordBox)
        assert (box.num_ends, box.cause, box.error) == (1, "abort", None)
    with pytest.raises(NotServing):
        await pipeline.call(Word("late"))


# -- taps and slices


@sim_test(seeds=6)
async def test_a_tap_copies_what_leaves_a_port_and_ends_with_the_pipeline(env: SimEnv) -> None:
    pipeline = line(Pass(), Pass2(), env=env)
    tap = pipeline.tap("pass")
    seen: list[str] = []

    async def watch(copies: Any) -> None:
        seen.extend([word.text async for word in copies])

    watching = asyncio.create_task(watch(tap))
    async with pipeline:
        for i in range(5):
            await pipeline.call(Word(str(i), str(i)))
    await watching
    assert seen == ["0", "1", "2", "3", "4"]


@sim_test(seeds=6)
async def test_an_unread_tap_loses_items_and_delays_no_stage(env: SimEnv) -> None:
    pipeline = line(Pass(), env=env)
    tap = pipeline.tap("pass", capacity=2)
    async with pipeline:
        for i in range(20):
            assert await pipeline.call(Word(str(i), str(i))) == [str(i)]
    assert [word.text async for word in tap] == ["0", "1"]


@sim_test(seeds=3)
async def test_a_tap_may_be_added_while_the_pipeline_runs(env: SimEnv) -> None:
    async with line(Pass(), env=env) as pipeline:
        await pipeline.call(Word("a", "a"))
        tap = pipeline.tap("pass")
        await pipeline.call(Word("b", "b"))
    assert [word.text async for word in tap] == ["b"]


@sim_test(seeds=6)
async def test_a_slice_without_an_exit_is_fed_and_read_at_its_ends(env: SimEnv) -> None:
    class Upper(Stage[Word, Word]):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            for word in batch:
                out.send(Word(word.request_id, word.text.upper()))

    whole = line(Pass(), Upper(), Pass2(), env=env)
    async with whole.slice("upper", "upper") as part:
        await part.channel("upper.in").send(Word("a", "a"))
        async for word in part.channel("upper.out"):
            assert word.text == "A"
            break
        with pytest.raises(RuntimeError, match="this slice has no exit"):
            await part.call(Word("b"))
        assert await part.drain()
    assert whole.health.state == "new"


@sim_test(seeds=6)
async def test_a_slice_with_the_exit_carries_requests(env: SimEnv) -> None:
    first, second = Pass(), Pass2()
    async with line(first, second, env=env).slice("pass2", "exit") as part:
        assert part.entry == Port("pass2", "in")
        assert await part.call(Word("a", "a")) == ["a"]
    assert first.batches == [] and second.batches == [["a"]]


@sim_test(seeds=3)
async def test_a_poison_item_in_a_slice_without_an_exit_is_dropped_and_the_rest_goes_on(env: SimEnv) -> None:
    async with line(Poison(), Pass(), env=env).slice("poison", "poison") as part:
        for text in ("a", "poison", "b"):
            await part.channel("poison.in").send(Word(text, text))
        await env.sleep(1.0)
        assert [word.text for word in part.channel("poison.out").recv_all()] == ["a", "b"]


# -- the whole life under faults


@sim_test(seeds=60, fault_probability=0.1)
async def test_whatever_goes_wrong_each_request_ends_once_and_answers_are_whole(env: SimEnv) -> None:
    dice = env.random("test")
    pipeline = line(Slow(env), Pass(), Pass2(), env=env, capacity=2)
    boxes: list[WordBox] = []

    async def client(i: int) -> None:
        await env.sleep(dice.uniform(0.0, 5.0))
        try:
            box = await pipeline.submit(Word(str(i), str(i)), deadline_s=dice.choice([None, 3.0]))
        except NotServing:
            return
        assert isinstance(box, WordBox)
        boxes.append(box)
        if dice.random() < 0.3:
            await env.sleep(dice.uniform(0.0, 2.0))
            pipeline.cancel(box.request_id)
        try:
            events = [event async for event in box]
        except (StageCrashed, NotServing):
            return
        assert events == ([str(i)] if box.cause == "finished" else [])

    async with pipeline:
        await asyncio.gather(*(client(i) for i in range(20)))
        assert pipeline.exit is not None and not pipeline.exit.live
    assert all(box.num_ends == 1 for box in boxes)
    for channel in pipeline.channels.values():
        stats = channel.stats()
        assert stats.high_water <= stats.capacity and stats.num_sent == stats.num_received + stats.depth


def test_a_pipeline_without_entry_is_refused_with_the_mend() -> None:
    pipeline = Pipeline()
    pipeline.add(Pass())
    pipeline.open_ports = {Port("pass", "in"), Port("pass", "out")}
    with pytest.raises(GraphError, match="the graph has no entry"):
        pipeline.check()

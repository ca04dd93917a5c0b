"""Engines that are to stop: what becomes of their requests, and who gets new ones."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from millrace.stages.engine.engine import Engine
from millrace.stages.machines.engine_server import EngineServer
from millrace.stages.machines.engine_sources import FixedAddress
from tests.stages.machines.scripted_engines import (
    LONG,
    ScriptedMachines,
    answer,
    expected,
    states,
    until,
    with_machines,
)

PROMPTS = ["Zoe and 1", "Tom", "The sea is", "One", "I"]
A, B = FixedAddress("a", ("a", 1)), FixedAddress("b", ("b", 1))


async def start_slow(machines: ScriptedMachines, name: str) -> None:
    """Starts an engine that has not answered when a test goes on."""
    quick_s, machines.step_s = machines.step_s, 0.2
    await machines.start(name)
    machines.step_s = quick_s


def deaths(engine: Engine) -> int:
    return sum(one["num_deaths"] for one in engine.engines)


@with_machines
async def test_migrated_requests_go_on_elsewhere_at_once_and_it_is_no_death(machines: ScriptedMachines) -> None:
    await start_slow(machines, "a")
    await machines.start("b")
    first, second = machines.servers.values()
    async with machines.front(A, B) as engine, machines.front(B, A) as other:
        both = list(zip(itertools.cycle([engine, other]), PROMPTS * 2, strict=False))
        streams = [asyncio.ensure_future(answer(one, prompt, LONG)) for one, prompt in both]
        await until(lambda: first.num_live > 1)
        await until(lambda: first.report().core.scheduler.num_running > 1)
        assert await first.drain(60.0, "migrate")
        assert first.num_live == 0
        await machines.stop("a")
        assert await asyncio.gather(*streams) == [expected(prompt, LONG) for _, prompt in both]
        assert deaths(engine) == deaths(other) == 0
        assert states(engine) == {"a": "loading", "b": "ready"}
        await machines.start("a")
        await until(lambda: states(engine)["a"] == states(other)["a"] == "ready")


@with_machines
async def test_a_draining_engine_takes_no_request_after_one_round_trip(machines: ScriptedMachines) -> None:
    await machines.start("a", "b")
    first = machines.servers["a:1"]
    async with machines.front(A, B) as engine:
        asked: list[asyncio.Future[list[int]]] = []

        async def ask() -> None:
            for number in itertools.count():
                asked.append(asyncio.ensure_future(answer(engine, f"request {number}")))
                await asyncio.sleep(0.0005)

        asking = asyncio.ensure_future(ask())
        (link,) = first.fronts.values()
        await until(lambda: link.num_seen > 5)
        draining = asyncio.ensure_future(first.drain(60.0))
        await until(lambda: states(engine)["a"] == "draining")  # the word has come
        await engine.core.processes.cores[0].ask("stacks", (), 60.0)  # type: ignore[attr-defined]  # and back
        num_seen, num_asked = link.num_seen, len(asked)
        await until(lambda: len(asked) > num_asked + 15)
        assert link.num_seen == num_seen and await draining
        asking.cancel()
        due = [expected(f"request {number}") for number in range(len(asked))]
        assert await asyncio.gather(*asked) == due


@with_machines
async def test_the_last_engine_keeps_its_requests_until_another_one_is_there(machines: ScriptedMachines) -> None:
    await start_slow(machines, "a")
    first = machines.servers["a:1"]
    async with machines.front(A, B) as engine:
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS]
        await until(lambda: first.num_live == len(PROMPTS))
        draining = asyncio.ensure_future(first.drain(60.0, "migrate"))
        await until(lambda: engine.health.state == "loading")
        assert "take no new requests" in (engine.health.reason or "") and first.num_live
        await machines.start("b")
        outboxes = list(engine.core.front.exit.live.values())  # type: ignore[attr-defined]
        assert await draining
        assert await asyncio.gather(*streams) == [expected(prompt, LONG) for prompt in PROMPTS]
        assert deaths(engine) == 0 and [outbox.num_attempts for outbox in outboxes] == [2] * len(PROMPTS)


@with_machines
async def test_requests_left_at_the_limit_of_a_drain_go_on_where_there_is_an_engine(machines: ScriptedMachines) -> None:
    await start_slow(machines, "a")
    first = machines.servers["a:1"]
    async with machines.front(A, B) as engine:
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS]
        await until(lambda: first.num_live == len(PROMPTS))
        assert not await first.drain(0.01)
        await machines.stop("a")
        await until(lambda: states(engine)["a"] == "loading")
        await machines.start("b")
        assert await asyncio.gather(*streams) == [expected(prompt, LONG) for prompt in PROMPTS]
        assert deaths(engine) == 0


@with_machines
async def test_a_front_drains_an_engine_by_its_index_for_all_fronts(machines: ScriptedMachines) -> None:
    await machines.start("a", "b")
    first = machines.servers["a:1"]
    async with machines.front(A, B) as engine, machines.front(A, B) as other:
        engine.drain_engine(0, "migrate")
        async with asyncio.timeout(60.0):
            await first.drain_asked.wait()
        assert first.asked_by == "migrate"
        await first.drain(60.0, "migrate")
        await until(lambda: states(other)["a"] != "ready")
        with pytest.raises(LookupError, match="no engine 2"):
            engine.drain_engine(2)


def cut(server: EngineServer) -> None:
    """Ends the connections of all fronts, as a network does."""
    for front in list(server.fronts.values()):
        front.close()
        server.lost(front, "a cut")


@pytest.mark.parametrize("is_away", [False, True])
def test_an_order_to_drain_reaches_an_engine_whose_link_was_cut(is_away: bool) -> None:
    @with_machines
    async def test(machines: ScriptedMachines) -> None:
        await machines.start("a", "b")
        first, second = machines.servers.values()
        async with machines.front(A, B) as engine:
            if is_away:
                del machines.servers["a:1"]  # for new connections
                cut(first)
                await until(lambda: states(engine)["a"] == "loading")
            engine.drain_engine(0, "migrate")
            cut(first)  # with the order, if that is under way
            machines.servers["a:1"] = first
            async with asyncio.timeout(60.0):
                await first.drain_asked.wait()
            assert first.asked_by == "migrate" and not second.drain_asked.is_set()
            assert await answer(engine, "hello") == expected("hello") and not first.num_live
            assert await first.drain(60.0, "migrate")
            cut(first)
            await machines.stop("a")
            await machines.start("a")
            await until(lambda: states(engine)["a"] == "ready")
            assert not machines.servers["a:1"].drain_asked.is_set()

    test()


@with_machines
async def test_an_order_to_drain_is_not_for_the_next_engine_at_an_address(machines: ScriptedMachines) -> None:
    await machines.start("a", "b")
    async with machines.front(A, B) as engine:
        await machines.stop("a")
        await until(lambda: states(engine)["a"] == "loading")
        engine.drain_engine(0, "migrate")
        await machines.start("a")
        await until(lambda: states(engine)["a"] == "ready")
        cut(machines.servers["a:1"])
        await until(lambda: states(engine)["a"] != "ready")
        await until(lambda: states(engine)["a"] == "ready")
        assert not machines.servers["a:1"].drain_asked.is_set()

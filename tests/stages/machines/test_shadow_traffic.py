"""Copies of requests in engines of another version: compared, counted, and never seen by a client."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.stages.beam_search.algorithm import BeamParams
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import Refused
from millrace.stages.fleet.traffic.shadow_copies import without_copies
from millrace.stages.machines.engine_server import EngineServer
from millrace.stages.machines.engine_sources import FixedAddress
from millrace.stages.messages import Prompt, Request, Started
from millrace.stages.split.inflight_requests import FIRST_COPY_ID
from millrace.stages.step_messages import PromptProgress
from millrace.stages.testing.scripted.script import Script
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.stages.machines.scripted_engines import (
    LONG,
    SHORT,
    ScriptedMachines,
    answer,
    expected,
    states,
    until,
    with_machines,
)
from tests.stages.split.test_split import tokens

A, B = FixedAddress("a", ("a", 1)), FixedAddress("b", ("b", 1))
ALL = TrafficRules.parse(None, "version=v2:100")
OTHER = Script(key=1)
PROMPTS = [f"prompt {number}" for number in range(5)]


async def start_both(machines: ScriptedMachines, **of_second: Any) -> EngineServer:
    """Engine a of v1, and b of v2. Returns the second."""
    await machines.start("a", labels={"version": "v1"})
    await machines.start("b", labels={"version": "v2"}, **of_second)
    return machines.servers["b:1"]


def results(engine: Engine) -> dict[str, int]:
    """Without those that are zero."""
    assert engine.traffic is not None
    return {result: count for result, count in engine.traffic.copy_results.items() if count}


async def settled(engine: Engine, count: int) -> dict[str, int]:
    """The results, once there are so many."""
    await until(lambda: sum(results(engine).values()) == count)
    return results(engine)


async def ready(engine: Engine) -> None:
    await until(lambda: states(engine) == {"a": "ready", "b": "ready"})


async def check_quiet(engine: Engine, second: EngineServer) -> None:
    """Nothing is left of any copy."""
    await until(lambda: not second.num_live)
    assert second._loop is not None
    pool = second._loop.core.allocate.allocator.pool
    await until(lambda: not pool.num_in_use and not pool.num_quarantined)
    copies: Any = engine.traffic.copies  # type: ignore[union-attr]
    assert not len(copies) and not copies._ours and not copies._copied and not copies._of_client


@with_machines
async def test_equal_answers_are_counted_and_clients_see_nothing_of_copies(machines: ScriptedMachines) -> None:
    second = await start_both(machines)
    async with machines.front(A, B, traffic=ALL) as engine:
        await ready(engine)
        ended: list[str] = []
        engine.exit.on_end.append(lambda outbox, cause, error: ended.append(outbox.request_id))
        for number, prompt in enumerate(PROMPTS, 1):
            assert await answer(engine, prompt) == expected(prompt)
            assert await settled(engine, number) == {"equal": number}
        assert await answer(engine, "two choices", replace(SHORT, n=2))
        assert await settled(engine, 6) == {"equal": 6}
        (link,) = second.fronts.values()
        assert link.num_seen == 6 and len(ended) == 6
        assert all(choice["engine"] == 0 for choice in engine.choices)
        assert engine.engines[1]["num_requests"] == engine.engines[1]["num_deaths"] == 0
        await check_quiet(engine, second)


@with_machines
async def test_different_answers_are_counted_and_logged_without_text(machines: ScriptedMachines) -> None:
    second = await start_both(machines, script=OTHER)
    with captured_logs() as lines:
        async with machines.front(A, B, traffic=ALL) as engine:
            await ready(engine)
            for number, prompt in enumerate(PROMPTS, 1):
                assert await answer(engine, prompt) == expected(prompt)
                assert await settled(engine, number) == {"different": number}
            assert engine.traffic is not None
            engine.traffic.log_texts(5)
            await answer(engine, "with text")
            await settled(engine, 6)
            await check_quiet(engine, second)
    told = [line for line in lines if line["event"] == "shadow.different"]
    assert len(told) == 6 and {line["engine"] for line in told} == {1}
    ours, theirs = expected("with text"), expected("with text", script=OTHER)
    place = next(place for place in range(8) if ours[place] != theirs[place])
    assert told[5]["place"] == place and told[5]["num_tokens"] == 8
    assert told[5]["text"] == bytes(ours[place:]).decode(errors="replace")[:5]
    assert told[5]["copied_text"] == bytes(theirs[place:]).decode(errors="replace")[:5]
    assert not any("text" in line for line in told[:5])


@with_machines
async def test_an_engine_of_a_shadow_serves_no_client_even_alone(machines: ScriptedMachines) -> None:
    await start_both(machines, script=OTHER)
    async with machines.front(A, B, traffic=ALL) as engine:
        await ready(engine)
        await machines.stop("a")
        await until(lambda: engine.health.state == "loading")
        assert machines.servers["b:1"].num_live == 0
        await machines.start("a", labels={"version": "v1"})
        await until(lambda: engine.health.is_ready)
        assert await answer(engine, "again") == expected("again")


@with_machines
async def test_copies_in_a_lost_or_full_engine_cost_no_client_anything(machines: ScriptedMachines) -> None:
    machines.step_s = 0.01
    await start_both(machines)
    second = machines.servers["b:1"]
    async with machines.front(A, B, traffic=ALL) as engine:
        await ready(engine)
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS * 3]
        await until(lambda: second.num_live > 0 and "shed" in results(engine))
        await machines.stop("b")
        assert await asyncio.gather(*streams) == [expected(prompt, LONG) for prompt in PROMPTS * 3]
        found = await settled(engine, 15)
        assert found["shed"] and found["failed"] and set(found) <= {"shed", "failed"}
        assert sum(one["num_deaths"] for one in engine.engines) == engine.engines[1]["num_deaths"]


@with_machines
async def test_what_has_no_whole_greedy_answer_is_not_compared(machines: ScriptedMachines) -> None:
    machines.step_s = 0.005
    second = await start_both(machines)
    async with machines.front(A, B, traffic=ALL) as engine:
        await ready(engine)
        await answer(engine, "sampled", replace(SHORT, temperature=1.0, seed=3))
        assert await settled(engine, 1) == {"uncompared": 1}
        await check_quiet(engine, second)
        leaving = asyncio.ensure_future(answer(engine, "leaves", LONG))
        await until(lambda: second.num_live > 0)
        leaving.cancel()
        assert await settled(engine, 2) == {"uncompared": 2}
        text = bytes(expected("stops", LONG)).decode(errors="replace")
        stop = next(text[at : at + 3] for at in range(8, 50) if text[at : at + 3].isascii())
        found = await answer(engine, "stops", replace(LONG, stop=(stop,)))
        assert len(found) < 60
        assert await settled(engine, 3) == {"uncompared": 2, "equal": 1}, "the copy began with the same tokens"
        await check_quiet(engine, second)


@with_machines
async def test_a_shadow_becomes_a_split_while_copies_run_and_no_token_is_mixed_up(machines: ScriptedMachines) -> None:
    second = await start_both(machines, script=OTHER)
    async with machines.front(A, B, traffic=ALL) as engine:
        await ready(engine)
        assert engine.traffic is not None
        early = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS]
        await until(lambda: second.num_live > 2 and len(engine.choices) == len(PROMPTS))
        engine.traffic.change(TrafficRules.parse("version=v2:100", None))
        late = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS]
        assert await asyncio.gather(*early) == [expected(prompt, LONG) for prompt in PROMPTS]
        assert await asyncio.gather(*late) == [expected(prompt, LONG, OTHER) for prompt in PROMPTS]
        await check_quiet(engine, second)


def test_rows_of_copies_are_taken_out_of_a_step() -> None:
    copy = FIRST_COPY_ID + 5
    mixed = tokens(3, [(1, 0, 7), (copy, 0, 8), (2, 4, 9)])
    assert without_copies(tokens(3, [(1, 0, 7)])) is not None
    assert without_copies(tokens(3, [(copy, 0, 7)])) is None
    told = PromptProgress(copy, 4)
    assert without_copies(replace(tokens(3, [(1, 0, 7)]), progress=[told])).progress == []  # type: ignore[union-attr]
    started = Started(0, copy, "shadow-1", mixed.token_ids[:1], 1, SHORT, 0)
    left = without_copies(replace(mixed, started=(started,), logprobs={}))
    assert left is not None and left.started == ()
    assert left.sequence_ids.tolist() == [1, 2] and left.places.tolist() == [0, 4] and left.token_ids.tolist() == [7, 9]


@pytest.mark.parametrize("text", ["version=v2", "version=v2:200"])
def test_a_shadow_is_read_as_a_split_is(text: str) -> None:
    with pytest.raises(Exception, match="--shadow version=v2.*NAME=VALUE:PERCENT"):
        TrafficRules.parse(None, text)


@with_machines
async def test_no_request_of_a_client_has_the_id_of_a_copy_or_a_warm_up(machines: ScriptedMachines) -> None:
    await start_both(machines)
    async with machines.front(A, B, traffic=ALL) as engine:
        await ready(engine)
        for request_id in ("shadow-0", "warm-up"):
            request = Request(request_id, (Prompt(text="x"),), SHORT)
            with pytest.raises(Refused, match="must not begin as the engine's own do"):
                await engine.submit(request)
            with pytest.raises(Refused, match="must not begin as the engine's own do"):
                engine.submit_search(request, BeamParams(width=1))
        assert await answer(engine, "x") == expected("x") and await settled(engine, 1) == {"equal": 1}

"""Engines with other weights beside each other: kept apart by a split, and no answer goes from one to the other."""

from __future__ import annotations

import asyncio

import pytest

from millrace.stages.engine.engine import Engine
from millrace.stages.errors import ConfigError, Failed
from millrace.stages.fleet import resuming
from millrace.stages.machines.engine_sources import FixedAddress
from millrace.stages.testing.scripted.script import Script
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.stages.machines.scripted_engines import (
    LONG,
    ScriptedMachines,
    answer,
    expected,
    states,
    until,
    with_machines,
)

A, B = FixedAddress("a", ("a", 1)), FixedAddress("b", ("b", 1))
V1, V2 = {"version": "v1"}, {"version": "v2"}
OTHER = Script(key=1)
PROMPTS = ["Zoe and 1", "Tom", "The sea is"]
ALL_V2, HALF = TrafficRules.parse("version=v2:100", None), TrafficRules.parse("version=v2:50", None)


async def ready(engine: Engine) -> None:
    await until(lambda: states(engine) == {"a": "ready", "b": "ready"})


def num_begun(engine: Engine) -> int:
    """Requests whose first token has come."""
    return sum(outbox.has_started for outbox in engine.exit.live.values())


@with_machines
async def test_each_request_is_answered_by_one_model_whichever_it_gets(machines: ScriptedMachines) -> None:
    await machines.start("a", labels=V1)
    await machines.start("b", labels=V2, script=OTHER)
    async with machines.front(A, B, traffic=HALF) as engine:
        await ready(engine)
        for number in range(8):
            prompt = f"prompt {number}"
            found = await answer(engine, prompt)
            assert found == expected(prompt, script=(Script(), OTHER)[engine.choices[0]["engine"]])
        assert {choice["engine"] for choice in engine.choices} == {0, 1}


@with_machines
async def test_answers_wait_for_their_own_model_and_new_requests_do_not(machines: ScriptedMachines) -> None:
    await machines.start("a", labels=V1)
    machines.step_s = 0.02
    await machines.start("b", labels=V2, script=OTHER)
    async with machines.front(A, B, traffic=ALL_V2) as engine:
        await ready(engine)
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS]
        await until(lambda: num_begun(engine) == len(PROMPTS))
        await machines.stop("b")
        await until(lambda: states(engine)["b"] != "ready")
        assert await answer(engine, "meanwhile") == expected("meanwhile")
        assert not any(stream.done() for stream in streams)
        machines.step_s = 0.001
        await machines.start("b", labels=V2, script=OTHER)
        assert await asyncio.gather(*streams) == [expected(prompt, LONG, OTHER) for prompt in PROMPTS]


@with_machines
async def test_requests_that_no_engine_has_begun_go_to_the_other_model_at_once(machines: ScriptedMachines) -> None:
    await machines.start("a", labels=V1)
    machines.step_s = 0.02
    await machines.start("b", labels=V2, script=OTHER)
    async with machines.front(A, B, traffic=ALL_V2) as engine:
        await ready(engine)
        begun = [asyncio.ensure_future(answer(engine, f"begun {number}", LONG)) for number in range(8)]
        second = machines.servers["b:1"]
        await until(lambda: num_begun(engine) == 8)
        queued = [asyncio.ensure_future(answer(engine, prompt)) for prompt in PROMPTS]
        await until(lambda: second.num_live == 8 + len(PROMPTS))
        await machines.stop("b")
        assert await asyncio.gather(*queued) == [expected(prompt) for prompt in PROMPTS]
        for one in begun:
            one.cancel()


def test_answers_whose_model_does_not_come_back_end_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "ALONE_S", 0.1)

    @with_machines
    async def run(machines: ScriptedMachines) -> None:
        await machines.start("a", labels=V1)
        machines.step_s = 0.05
        await machines.start("b", labels=V2, script=OTHER)
        async with machines.front(A, B, traffic=ALL_V2) as engine:
            await ready(engine)
            lost = asyncio.ensure_future(answer(engine, "lost", LONG))
            await until(lambda: num_begun(engine) == 1)
            await machines.stop("b")
            with pytest.raises(Failed, match="no other model goes on with it; send it again") as failed:
                await lost
            assert failed.value.code == "engine_died"
            assert await answer(engine, "new") == expected("new")
            await machines.start("b", labels=V1)  # another model at its address
            await ready(engine)
            assert [await answer(engine, prompt) for prompt in PROMPTS] == list(map(expected, PROMPTS))

    run()


@with_machines
async def test_an_engine_whose_model_no_other_has_keeps_its_requests_when_it_drains(machines: ScriptedMachines) -> None:
    await machines.start("a", labels=V1)
    machines.step_s = 0.02
    await machines.start("b", labels=V2, script=OTHER)
    async with machines.front(A, B, traffic=ALL_V2) as engine:
        await ready(engine)
        streams = [asyncio.ensure_future(answer(engine, prompt, LONG)) for prompt in PROMPTS]
        second = machines.servers["b:1"]
        await until(lambda: second.num_live == len(PROMPTS))
        assert await second.drain(60.0, "migrate")
        assert await asyncio.gather(*streams) == [expected(prompt, LONG, OTHER) for prompt in PROMPTS]


@with_machines
async def test_without_a_split_another_model_is_refused_with_the_right_flag(machines: ScriptedMachines) -> None:
    await machines.start("a", labels=V1)
    await machines.start("b", labels=V2, script=OTHER)
    with pytest.raises(ConfigError, match=r"another model than engine \w:1: model.safetensors differ.*--split"):
        async with machines.front(A, B):
            pass
    async with machines.front(A, B, traffic=HALF) as engine:
        await ready(engine)
        assert engine.traffic is not None
        problem = engine.traffic.problem(TrafficRules())
        assert problem is not None and "engines 0 and 1 have different models" in problem
        assert engine.traffic.problem(ALL_V2) is None
        assert engine.traffic.problem(TrafficRules.parse(None, "version=v2:1")) is None
        await machines.stop("a")
        await until(lambda: states(engine)["a"] != "ready")
        problem = engine.traffic.problem(TrafficRules.parse(None, "version=v2:1"))
        assert problem is not None and "would serve copies alone" in problem, "clients would have no engine"


@with_machines
async def test_other_text_files_are_refused_on_either_side(machines: ScriptedMachines) -> None:
    await machines.start("a", labels=V1)
    await machines.start("b", labels=V2)
    second = machines.servers["b:1"]
    second._files = {**second._files, "tokenizer.json": "another"}
    with pytest.raises(ConfigError, match=r"has other text files than engine \w:1: tokenizer.json differ"):
        async with machines.front(A, B, traffic=HALF):
            pass

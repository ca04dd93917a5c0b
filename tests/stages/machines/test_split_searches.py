"""Beam searches under a split between two models: all steps of one are computed by the model of its first step."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from millrace.stages.beam_search.algorithm import BeamParams
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import Failed
from millrace.stages.fleet import resuming
from millrace.stages.machines.engine_sources import FixedAddress
from millrace.stages.messages import Prompt, Request, StepTokens
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.script import Script
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.stages.machines.scripted_engines import (
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
ALL_V2, NO_V2 = TrafficRules.parse("version=v2:100", None), TrafficRules.parse("version=v2:0", None)
HALF = TrafficRules.parse("version=v2:50", None)
PROMPT, NUM_STEPS = "The sea is", 40
PARAMS = SamplingParams(max_tokens=NUM_STEPS, temperature=0.0, ignore_eos=True)


class Watched:
    """The engines of which tokens came, by request of a client, with a search's steps under the search."""

    def __init__(self, engine: Engine) -> None:
        self.models: dict[str, set[str]] = defaultdict(set)
        self.num_steps = 0  # of searches
        self._engine: Any = engine
        for core in self._engine.core.processes.cores:
            core.tokens._on_arrival = self._noting(core, core.tokens._on_arrival)

    def _noting(self, core: Any, note: Any) -> Any:
        def noting(step: StepTokens) -> None:
            for number in step.sequence_ids.tolist():
                request = self._engine.exit.find_request(number)
                if request is not None:
                    self.models[request.parent_id or request.request_id].add(core.model_digest)
                    self.num_steps += request.parent_id is not None
            note(step)

        return noting


async def both(machines: ScriptedMachines, step_s: float = 0.01) -> None:
    """Engine a of v1, and b of v2 with other weights, whose steps take so long."""
    await machines.start("a", labels=V1)
    machines.step_s = step_s
    await machines.start("b", labels=V2, script=OTHER)


async def ready(engine: Engine) -> None:
    await until(lambda: states(engine) == {"a": "ready", "b": "ready"})


async def search(engine: Engine, *prompts: str, request_id: str = "search", width: int = 2) -> list[list[int]]:
    """The tokens of the best answer to each prompt."""
    request = Request(request_id, tuple(Prompt(text=prompt) for prompt in prompts), PARAMS)
    outbox = engine.submit_search(request, BeamParams(width=width))
    found: dict[int, list[int]] = {}
    async for deltas in outbox:
        for delta in deltas:
            found.setdefault(delta.index, []).extend(delta.token_ids)
    return [found[index] for index in range(len(prompts))]


async def begun(watched: Watched, num_steps: int = 3) -> None:
    await until(lambda: watched.num_steps >= num_steps)


@with_machines
async def test_a_search_whose_side_empties_waits_for_its_model_and_others_do_not(machines: ScriptedMachines) -> None:
    await both(machines)
    async with machines.front(A, B, traffic=ALL_V2) as engine:
        await ready(engine)
        watched = Watched(engine)
        whole = await search(engine, PROMPT, request_id="alone")
        searching = asyncio.ensure_future(search(engine, PROMPT))
        await until(lambda: bool(watched.models["search"]))
        await begun(watched, watched.num_steps + 3)
        await machines.stop("b")
        await until(lambda: states(engine)["b"] != "ready")
        for number in range(20):
            assert await answer(engine, f"meanwhile {number}") == expected(f"meanwhile {number}")
        assert not searching.done()
        await machines.start("b", labels=V2, script=OTHER)
        assert await searching == whole
        assert len(watched.models["search"]) == 1


def test_a_search_whose_model_does_not_come_back_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "ALONE_S", 0.1)

    @with_machines
    async def run(machines: ScriptedMachines) -> None:
        await both(machines)
        async with machines.front(A, B, traffic=ALL_V2) as engine:
            await ready(engine)
            watched = Watched(engine)
            searching = asyncio.ensure_future(search(engine, PROMPT))
            await begun(watched)
            await machines.stop("b")
            with pytest.raises(Failed, match="no other model goes on with it") as failed:
                await searching
            assert failed.value.code == "engine_died"
            assert await answer(engine, "new") == expected("new")
            table = engine.core.processes.table  # type: ignore[attr-defined]
            assert not table._searches and not len(table), "nothing is kept of it"

    run()


@with_machines
async def test_a_search_stays_with_its_model_when_the_split_changes(machines: ScriptedMachines) -> None:
    await both(machines)
    async with machines.front(A, B, traffic=ALL_V2) as engine:
        assert engine.traffic is not None
        await ready(engine)
        watched = Watched(engine)
        whole = await search(engine, PROMPT, request_id="alone")
        searching = asyncio.ensure_future(search(engine, PROMPT))
        await until(lambda: bool(watched.models["search"]))
        engine.traffic.change(NO_V2)
        assert await answer(engine, "new") == expected("new")
        assert await searching == whole and watched.models["search"] == watched.models["alone"]


@with_machines
async def test_searches_of_several_prompts_at_once_are_all_of_one_model(machines: ScriptedMachines) -> None:
    await both(machines, 0.001)
    async with machines.front(A, B, traffic=HALF) as engine:
        traffic = engine.core.processes.traffic  # type: ignore[attr-defined]
        await ready(engine)
        watched, dice = Watched(engine), iter(range(10**6))
        traffic.is_full = lambda cores: bool((next(dice) >> cores[0].index) & 1)  # now one side, now the other
        prompts = [f"{PROMPT} {number}" for number in range(4)]
        await asyncio.gather(*(search(engine, *prompts, request_id=f"s{number}") for number in range(8)))
        assert len(watched.models) == 8 and all(len(models) == 1 for models in watched.models.values())
        assert len(set.union(*watched.models.values())) == 2, "both sides have had some"


@with_machines
async def test_a_search_of_which_nothing_has_come_goes_on_in_the_other_model(machines: ScriptedMachines) -> None:
    await both(machines, 0.05)
    async with machines.front(A, B, traffic=ALL_V2) as engine:
        await ready(engine)
        watched, second = Watched(engine), machines.servers["b:1"]
        busy = [asyncio.ensure_future(answer(engine, f"busy {number}", PARAMS)) for number in range(8)]
        await until(lambda: second.num_live == 8)
        searching = asyncio.ensure_future(search(engine, PROMPT, "Tom"))
        await until(lambda: second.num_live == 10)
        await machines.stop("b")
        await searching
        assert len(watched.models["search"]) == 1 and watched.models["search"] != watched.models["busy"]
        for one in busy:
            one.cancel()


@with_machines
async def test_a_search_goes_on_with_its_model_in_another_engine_of_it(machines: ScriptedMachines) -> None:
    await machines.start("a", labels=V1)
    machines.step_s = 0.01
    await machines.start("b", "c", labels=V2, script=OTHER)
    async with machines.front(A, B, FixedAddress("c", ("c", 1)), traffic=ALL_V2) as engine:
        await until(lambda: set(states(engine).values()) == {"ready"})
        watched = Watched(engine)
        whole = await search(engine, PROMPT, request_id="alone")
        searching = asyncio.ensure_future(search(engine, PROMPT))
        await until(lambda: bool(watched.models["search"]))
        draining = asyncio.ensure_future(machines.servers["b:1"].drain(60.0))
        assert await searching == whole and watched.models["search"] == watched.models["alone"]
        await draining


def test_a_search_ends_in_the_last_engine_of_its_model_which_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "ALONE_S", 0.1)

    @with_machines
    async def run(machines: ScriptedMachines) -> None:
        await both(machines)
        async with machines.front(A, B, traffic=ALL_V2) as engine:
            await ready(engine)
            watched = Watched(engine)
            whole = await search(engine, PROMPT, request_id="alone")
            searching = asyncio.ensure_future(search(engine, PROMPT))
            await until(lambda: bool(watched.models["search"]))
            draining = asyncio.ensure_future(machines.servers["b:1"].drain(60.0))
            await until(lambda: states(engine)["b"] == "draining")
            assert await answer(engine, "new") == expected("new"), "of the other model"
            assert await searching == whole and watched.models["search"] == watched.models["alone"]
            assert await draining

    run()


@with_machines
async def test_a_search_ends_in_the_only_engine_which_drains(machines: ScriptedMachines) -> None:
    machines.step_s = 0.01
    await machines.start("a")
    async with machines.front(A) as engine:
        watched = Watched(engine)
        whole = await search(engine, PROMPT, request_id="alone")
        searching = asyncio.ensure_future(search(engine, PROMPT))
        await until(lambda: bool(watched.models["search"]))
        draining = asyncio.ensure_future(machines.servers["a:1"].drain(60.0))
        assert await searching == whole
        assert await draining and states(engine) != {"a": "ready"}


@with_machines
async def test_a_drain_is_seen_by_what_waits_for_its_model(machines: ScriptedMachines) -> None:
    await both(machines)
    async with machines.front(A, B, traffic=ALL_V2) as engine:
        await ready(engine)
        woken: list[str] = []
        resuming_now = engine.core.processes.resuming  # type: ignore[attr-defined]
        assert resuming_now is not None
        wake, resuming_now.wake = resuming_now.wake, lambda: (woken.append("wake"), wake())
        draining = asyncio.ensure_future(machines.servers["b:1"].drain(60.0))
        await until(lambda: states(engine)["b"] == "draining")
        assert woken, "the time that a step waits begins"
        await draining

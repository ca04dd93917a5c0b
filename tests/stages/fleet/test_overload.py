"""A fleet under several times the load that it can take, in virtual time. See `tests/bench/overload.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.engine.engine import Engine
from millrace.stages.fleet.fleet_processes import FleetProcesses
from millrace.stages.outputs import ModelInfo
from millrace.stages.split.remote_core import RemoteCore
from millrace.stages.testing.scripted.engine import SMALL, _device, _loaded, _model, _resolved
from millrace.stages.testing.scripted.script import Script
from millrace.stages.traffic.split_counts import Side, SideCounts
from millrace.stages.traffic.traffic_rules import TrafficRules
from tests.bench.overload import Figures, Overload, measure
from tests.counts import FULL
from tests.simulation.fleet import SimHosts
from tests.simulation.memory_link import MemoryChild, in_memory

STEP_S = 0.1  # of a job of the device: a step has two
NUM_TOKENS = 16
CONFIG = replace(SMALL, data_parallel_size=2, max_num_seqs=8, max_queue_s=5.0, max_admitted_requests=10_000)


class SimFleetEngine(Engine):
    """A fleet of scripted engines in virtual time."""

    def __init__(self, config: Any, env: SimEnv, traffic: TrafficRules | None = None) -> None:
        async def read_text(config: Any, phases: Any, env: Any) -> Callable[[ModelInfo], Any]:
            loaded = _loaded(config, _model(config, Script(), env))
            return lambda info: replace(loaded, info=info)

        processes = partial(FleetProcesses, make_hosts=SimHosts, traffic=traffic)
        core = partial(RemoteCore, make_processes=processes, read_text=read_text, warm_up=None)
        super().__init__(config, core=core, env=env)


def overloaded(
    seconds: float, factor: float = 4.0, split: str | None = None
) -> tuple[Figures, Mapping[Side, SideCounts]]:
    """The figures of two engines, of which the second one is of v2, and of the sides of a split."""
    children: list[MemoryChild] = []

    class Child(MemoryChild):
        def __init__(self, *ends: Any) -> None:
            children.append(self)
            super().__init__(*ends)

    def make(config: Any, env: Any, phases: Any) -> Any:
        model = _model(config, Script(), env)
        return _loaded(config, model), _device(model)

    async def tick(env: SimEnv) -> None:  # the watch of a pipeline does not tick in virtual time
        while True:
            await env.sleep(0.1)
            for child in children:
                child.process.report_to_router()

    async def main(env: SimEnv) -> tuple[Figures, Mapping[Side, SideCounts]]:
        with in_memory(env, make, Child):
            async with SimFleetEngine(_resolved(CONFIG, {}), env, TrafficRules.parse(split, None)) as engine:
                engine.core.processes.cores[1].labels = {"version": "v2"}  # type: ignore[attr-defined]
                ticking = asyncio.create_task(tick(env))
                slots = CONFIG.data_parallel_size * CONFIG.max_num_seqs
                figures = await measure(
                    Overload(
                        [engine],
                        env.now,
                        env.sleep,
                        slots,
                        factor,
                        seconds=seconds,
                        num_tokens=NUM_TOKENS,
                        capacity=slots / (2 * STEP_S),
                    )
                )
                ticking.cancel()
                await env.aclose()
                assert engine.traffic is not None
                return figures, engine.traffic.counts.sides

    with captured_logs():
        return run(main, seed=1, policy="fifo", worker_delay_s={"device": (STEP_S, STEP_S)}).value


@pytest.mark.timeout(120)
def test_at_four_times_the_load_the_engines_stay_busy_and_the_waits_told_are_true() -> None:
    figures, _ = overloaded(10.0)
    assert figures.share >= 0.9, figures
    assert figures.refusal_p99_s <= 0.1
    assert figures.retry_error <= 0.25
    assert figures.engines == {2}
    assert figures.num_late <= 0.05 * (figures.num_offered - len(figures.refusals_s))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("split", ["version=v2:100", "version=v2:0"] if FULL else ["version=v2:100"])
def test_what_one_side_of_a_split_has_no_room_for_goes_to_the_other(split: str) -> None:
    figures, sides = overloaded(2.5, 0.8, split)
    assert not figures.refusals_s, "four fifths of what both engines can do"
    assert figures.num_late <= 0.1 * figures.num_offered
    full, other = (sides[side] for side in (("labelled", "rest") if split.endswith("100") else ("rest", "labelled")))
    assert full.num_moved == other.num_requests > 0.1 * full.num_requests and other.num_moved == 0
    assert other.num_failed == 0, "only those that came before any engine had told its load are late"

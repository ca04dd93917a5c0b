"""The adapters of two engine processes, in virtual time: each has all of them, whatever dies and whenever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from millrace.model.errors import AdapterError
from millrace.runtime.env.log import captured_logs
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.adapters.gate import AdapterGate
from millrace.stages.adapters.registry import AdapterRegistry
from millrace.stages.adapters.store import AdapterStore
from millrace.stages.errors import Unavailable
from millrace.stages.fleet.fleet_adapters import LATE_S, FleetAdapters
from millrace.stages.messages import AdapterRef, Prompt, Request
from millrace.stages.params import SamplingParams
from millrace.stages.split.process_client import EngineDied
from millrace.stages.split.protocol import AdapterCard
from millrace.stages.split.remote_adapters import RemoteAdapters
from tests.stages.split.test_remote_adapters import LATENCY_S, Process


class Core:
    """A core whose process can be replaced."""

    def __init__(self, env: SimEnv, index: int) -> None:
        self.env, self.index, self.process, self.is_serving = env, index, LivingProcess(env), True
        self.adapters = RemoteAdapters(lambda: cast(Any, self.process))


class LivingProcess(Process):
    """A process that may end, refuse the adapter, or be stopped for a time."""

    is_dead = False
    refusal = ""
    stopped_s = 0.0

    async def read_adapter(self, path: str, name: str, digest: str) -> AdapterCard:
        if self.refusal:
            return AdapterCard(error=self.refusal)
        await self.env.sleep(self.stopped_s)
        card = await super().read_adapter(path, name, digest)
        if self.is_dead:
            raise EngineDied("signal 9 (SIGKILL)")
        return card


class Fleet:
    def __init__(self, env: SimEnv) -> None:
        self.env, self.cores = env, [Core(env, 0), Core(env, 1)]
        self.num_late = 0
        self.adapters = FleetAdapters(cast(Any, self.cores), self._note_late)
        registry = AdapterRegistry({name: Path(name) for name in "abc"})
        self.gate = AdapterGate(registry, AdapterStore(4, lambda digest: False, self.adapters.drop), self.adapters)

    def _note_late(self) -> None:
        self.num_late += 1

    async def admit(self, request_id: str, name: str) -> str:
        request = Request(request_id, (Prompt(text="x"),), SamplingParams(), adapter=AdapterRef(name))
        ref = (await self.gate.admit(self.env, request)).adapter
        assert ref is not None
        return ref.digest

    async def replace(self, index: int, wait_s: float = 0.0) -> None:
        core = self.cores[index]
        core.is_serving, core.process.is_dead = False, True
        await self.env.sleep(wait_s)
        core.process = LivingProcess(self.env)
        await core.adapters.restore(self.env, self.gate, lambda *_: None, keeps_unused=True)
        core.is_serving = True

    async def check(self) -> None:
        await self.env.sleep(1)
        digests = self.gate.store.digests()
        for core in self.cores:
            assert len(core.process.core) == len(digests)
            assert all(core.process.core.get(digest).digest == digest for digest in digests)


def simulate(test: Callable[[Fleet], Awaitable[None]]) -> None:
    async def live(env: SimEnv) -> None:
        await test(Fleet(env))

    run(live, seed=0)


def test_an_adapter_is_read_and_dropped_in_all_engine_processes() -> None:
    async def test(fleet: Fleet) -> None:
        for name in "ab":
            await fleet.admit(f"r{name}", name)
        await fleet.check()
        assert len(fleet.cores[1].process.core) == 2
        fleet.gate.unload("a")
        fleet.gate.leave("ra")
        await fleet.check()
        assert len(fleet.cores[0].process.core) == 1

    simulate(test)


@pytest.mark.parametrize("dies_s", [0.0, 0.005, 0.015, 0.025, 0.05])
@pytest.mark.parametrize("starts_s", [0.0, 0.01, 0.03])
def test_a_process_that_is_replaced_during_reads_has_all_adapters(dies_s: float, starts_s: float) -> None:
    async def test(fleet: Fleet) -> None:
        await fleet.admit("r1", "a")
        fleet.gate.leave("r1")  # unused from now on, and still in the other process
        reading = asyncio.ensure_future(fleet.admit("r2", "b"))
        await fleet.env.sleep(dies_s)
        replacing = asyncio.ensure_future(fleet.replace(1, starts_s))
        await fleet.env.sleep(LATENCY_S)
        await fleet.admit("r3", "c")
        await asyncio.gather(reading, replacing)
        await fleet.check()
        assert len(fleet.cores[1].process.core) == 3

    simulate(test)


def test_an_adapter_that_one_process_refuses_is_in_none() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.cores[1].process.refusal = "rank 99: must be at most 16"
        with pytest.raises(AdapterError, match="rank 99"):
            await fleet.adapters.read(fleet.env, Path("a"), "a", "")
        await fleet.check()
        for core in fleet.cores:
            core.is_serving, core.process.is_dead, core.process.refusal = False, True, ""
        with pytest.raises(Unavailable, match="the engine process ended"):
            await fleet.adapters.read(fleet.env, Path("a"), "a", "")

    simulate(test)


STOPPED_S = 25.0  # less than for what a process is killed


@pytest.mark.parametrize("then", ["it goes on", "it is dropped", "it is killed"])
def test_a_load_does_not_wait_for_a_process_that_is_not_heard_which_has_it_later(then: str) -> None:
    async def test(fleet: Fleet) -> None:
        stopped = fleet.cores[1]
        stopped.process.stopped_s = STOPPED_S
        began_s = fleet.env.now()
        with captured_logs() as lines:
            digest = await fleet.admit("r", "a")
        assert fleet.env.now() - began_s < LATE_S + 3 * LATENCY_S
        assert [line["engine"] for line in lines if line["event"] == "adapter.late"] == [1]
        assert [core.adapters.holds(digest) for core in fleet.cores] == [True, False]
        await fleet.admit("r2", "a")
        assert fleet.env.now() - began_s < 1.0, "what is loaded is not loaded again"
        if then == "it is dropped":
            for request_id in ("r", "r2"):
                fleet.gate.leave(request_id)
            fleet.gate.unload("a")
        if then == "it is killed":
            await fleet.replace(1)
            assert stopped.adapters.holds(digest)
        await fleet.env.sleep(STOPPED_S)
        await fleet.check()
        assert stopped.adapters.holds(digest) == (then != "it is dropped")
        assert fleet.num_late == (then == "it goes on")

    simulate(test)


def test_of_several_loads_at_once_a_stopped_process_has_all_when_it_goes_on() -> None:
    async def test(fleet: Fleet) -> None:
        fleet.cores[0].process.stopped_s = STOPPED_S
        digests = await asyncio.gather(*(fleet.admit(f"r{name}", name) for name in "abc"))
        assert not any(map(fleet.cores[0].adapters.holds, digests))
        await fleet.env.sleep(STOPPED_S)
        await fleet.check()
        assert all(map(fleet.cores[0].adapters.holds, digests)) and fleet.num_late == 3

    simulate(test)

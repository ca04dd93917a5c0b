"""Engines on a real Ray cluster of three nodes: placement, deaths of actors and nodes, and the driver's own.

The limits of time hold with MILLRACE_FULL=1, which is for a machine at rest; otherwise they are ten times as long.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from millrace.deploy.ray.ray_engine import RayEngine
from millrace.stages.config import EngineConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.engine.llm import LLM
from millrace.stages.errors import ConfigError
from millrace.stages.params import SamplingParams
from tests.deploy.ray.clusters import RayNodes, actors_alive, resident_bytes
from tests.deploy.running import ROOT

pytest.importorskip("ray", reason="needs pip install 'millrace-engine[ray]'")

pytestmark = [pytest.mark.slow, pytest.mark.ray]

LAX = 1.0 if os.environ.get("MILLRACE_FULL") else 10.0
ACTOR_S, NODE_S, DRIVER_S = 0.5 * LAX, 3.0 * LAX, 5.0  # until answers go on; until no actor is left
MAX_BYTES = 2e9
NUM_STREAMS = 16
PROMPTS = [f"{word} and {number}" for number in range(4) for word in ("Zoe", "Tom", "The sea", "One")]
GREEDY = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
# without drafts, as a request of a dead engine is tried alone for as many tokens as that can have been ahead
SETTINGS: dict[str, Any] = {
    "speculation": "off",
    "ray_timeout_s": 60.0,
    "threads": 1,
    "max_num_seqs": 32,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with RayNodes() as made:
        yield made


def config(nodes: RayNodes, **settings: Any) -> EngineConfig:
    return EngineConfig(executor="ray", ray_address=nodes.address, **SETTINGS | settings)


class Streams:
    """Streams of one engine, and the times at which their tokens came."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.times_s: list[list[float]] = [[] for _ in PROMPTS]
        self.task = asyncio.ensure_future(self._all())

    async def _all(self) -> list[list[int]]:
        return list(await asyncio.gather(*(self._one(index) for index in range(NUM_STREAMS))))

    async def _one(self, index: int) -> list[int]:
        tokens: list[int] = []
        async for output in self.engine.generate(PROMPTS[index], GREEDY):
            tokens += output.outputs[0].token_ids
            self.times_s[index].append(time.monotonic())
        return tokens

    async def until_each_has(self, count: int) -> None:
        while not all(len(times) >= count for times in self.times_s):  # noqa: ASYNC110 - what other processes do
            await asyncio.sleep(0.005)

    def resumed_s(self, noticed_s: float) -> float:
        """When each stream that goes on has a token that came after a moment."""
        return max(min(one for one in times if one > noticed_s) for times in self.times_s if times[-1] > noticed_s)


async def struck(engine: RayEngine, index: int, strike: Callable[[], object]) -> tuple[list[list[int]], float]:
    """The answers of all streams, whose engine is struck in their middle, and the time until all went on."""
    streams = Streams(engine)
    await streams.until_each_has(5)
    core, struck_s = engine.core.processes.cores[index], time.monotonic()
    on_thread = asyncio.ensure_future(asyncio.to_thread(strike))
    while core.is_serving:  # noqa: ASYNC110 - what another process does
        await asyncio.sleep(0.001)
    noticed_s = time.monotonic()
    tokens = await streams.task
    await on_thread
    return tokens, streams.resumed_s(noticed_s) - struck_s


async def until_all_serve(engine: RayEngine) -> None:
    async with asyncio.timeout(60):
        while not all(core.is_serving for core in engine.core.processes.cores):  # noqa: ASYNC110 - what other processes do
            await asyncio.sleep(0.02)


def test_answers_survive_the_deaths_of_an_actor_and_of_a_node(
    nodes: RayNodes, record_property: Callable[[str, object], None]
) -> None:
    async def main() -> None:
        began_s = time.monotonic()
        async with RayEngine(config(nodes, data_parallel_size=2, ray_placement="strict_spread")) as engine:
            start_s = time.monotonic() - began_s
            assert set(engine.core.processes.hosts.executor.placed) == {node.node_id for node in nodes.nodes}
            due = await Streams(engine).task
            pid = engine.core.processes.cores[0].pid
            assert pid is not None and pid in actors_alive()
            found, actor_s = await struck(engine, 0, lambda: os.kill(pid, signal.SIGKILL))
            assert found == due and engine.num_deaths == 1
            await until_all_serve(engine)

            nodes.add()
            lost = engine.core.processes.hosts.executor.placed[1]
            found, node_s = await struck(engine, 1, lambda: nodes.remove(lost))
            assert found == due and engine.num_deaths == 2
            await until_all_serve(engine)
            assert (
                lost not in engine.core.processes.hosts.executor.placed
                and len(set(engine.core.processes.hosts.executor.placed)) == 2
            )
            assert await Streams(engine).task == due
            size = resident_bytes()
        told = {"start_s": start_s, "actor_s": actor_s, "node_s": node_s, "resident_mb": size / 1e6}
        for name, value in told.items():
            record_property(name, round(value, 3))
        print({name: round(value, 3) for name, value in told.items()})
        assert actor_s <= ACTOR_S and node_s <= NODE_S and size <= MAX_BYTES

    asyncio.run(main())
    assert actors_alive() == []


def test_engines_are_placed_as_asked(nodes: RayNodes) -> None:
    with LLM(config=config(nodes, data_parallel_size=2, ray_placement="strict_pack")) as llm:
        engine = llm.engine
        assert isinstance(engine, RayEngine) and len(set(engine.core.processes.hosts.executor.placed)) == 1
        assert (
            engine.core.processes.hosts.executor.config_for(0, [0, 1]).data_parallel_size == 2
        )  # which share the node's memory
        answers = llm.generate(PROMPTS[:2], SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False)
        assert [len(one.outputs[0].token_ids) for one in answers] == [4, 4]


def test_the_ranks_of_an_engine_are_beside_its_actor_and_end_with_it(nodes: RayNodes) -> None:
    asked = SamplingParams(max_tokens=12, temperature=0.0)
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "threads": 2, "device": "cpu", "attention_backend": "torch"}
    settings |= {"ray_env": ("SAID=hello",)}
    with LLM(config=config(nodes, **settings)) as llm:
        (answer,) = llm.generate("The sea", asked, use_tqdm=False)
        engine = llm.engine
        assert isinstance(engine, RayEngine) and engine.engine_pid is not None
        ranks = [one for one in psutil.Process(engine.engine_pid).children() if "rank" in " ".join(one.cmdline())]
        assert len(ranks) == 1 and ranks[0].environ()["SAID"] == "hello"
        size = resident_bytes()
        os.kill(engine.engine_pid, signal.SIGKILL)
        assert psutil.wait_procs(ranks, timeout=10)[1] == []
    print({"resident_mb": round(size / 1e6)})
    assert size <= MAX_BYTES
    with LLM(config=EngineConfig(**SETTINGS)) as llm:
        (due,) = llm.generate("The sea", asked, use_tqdm=False)
    assert answer.outputs[0].token_ids == due.outputs[0].token_ids


def test_a_placement_that_is_impossible_is_an_error_with_what_there_is(nodes: RayNodes) -> None:
    with pytest.raises(ConfigError, match=r"3 x \{CPU: 2\}, STRICT_SPREAD; its 3 node\(s\) have in all .*\{CPU: 2"):
        wanted = config(nodes, data_parallel_size=3, ray_placement="strict_spread", threads=2, ray_timeout_s=1.0)
        LLM(config=wanted)
    with pytest.raises(ConfigError, match="ray start --head"):
        LLM(executor="ray", ray_address="127.0.0.1:1")


def test_no_actor_is_left_five_seconds_after_the_death_of_the_driver(nodes: RayNodes) -> None:
    command = [sys.executable, "-m", "millrace.deploy", "serve", "--executor", "ray", "--ray-address", nodes.address]
    command += ["--port", "0", "--data-parallel-size", "2", "--threads", "1", "--device", "cpu"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as driver:
        assert driver.stdout is not None and b'"event":"ready"' in driver.stdout.readline()
        assert len(actors_alive()) == 2
        driver.kill()
        killed_s = time.monotonic()
        while actors_alive() and time.monotonic() < killed_s + DRIVER_S:
            time.sleep(0.05)
        assert actors_alive() == []
        print({"driver_s": round(time.monotonic() - killed_s, 2)})

"""Real engine processes behind one front: deaths cost no token, and a request that kills ends alone.

In CI each process is killed once, by the request. With MILLRACE_FULL=1 a minute of kills goes before, best on a machine
at rest: its limit of time is told then.
"""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from typing import Any

import numpy as np
import pytest

from millrace.stages import LLM
from millrace.stages.config import EngineConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import RequestError
from millrace.stages.fleet.fleet_engine import FleetEngine
from millrace.stages.fleet.fleet_processes import FleetProcesses
from millrace.stages.params import SamplingParams
from millrace.stages.split.remote_core import RemoteCore
from tests.stages.split.poisoned_process import POISON
from tests.stages.split.test_split import is_idle

IS_FULL = bool(os.environ.get("MILLRACE_FULL"))
NUM_STREAMS, NUM_KILLS, EVERY_S = (32, 30, 2.0) if IS_FULL else (6, 0, 0.0)
CONFIG = EngineConfig(max_num_seqs=32, threads=1, dtype="float32")
GREEDY = SamplingParams(max_tokens=200 if IS_FULL else 60, temperature=0.0, ignore_eos=True)
PROMPTS = [f"{word} and {number}" for number in range(8) for word in ("Zoe", "Tom", "The sea", "One")][:NUM_STREAMS]
NOTICE_S = 0.2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_000)]


def poisoned_fleet(**settings: Any) -> Engine:
    """Its engine processes are killed by the token `POISON`."""
    module = "tests.stages.split.poisoned_process"
    return Engine(CONFIG, core=partial(RemoteCore, make_processes=FleetProcesses, module=module), **settings)


async def answer(engine: Engine, prompt: Any, params: SamplingParams = GREEDY) -> str:
    return "".join([output.outputs[0].text async for output in engine.generate(prompt, params)])


async def answers(engine: Engine) -> list[str]:
    return list(await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS)))


async def due_from(fleet: FleetEngine) -> list[str]:
    """What one engine answers; of a fleet at rest in CI."""
    if not IS_FULL:
        return await answers(fleet)
    async with Engine(CONFIG) as engine:
        return await answers(engine)


class Storm:
    """Kills engine processes in turns, and looks whether the fleet is ready meanwhile."""

    def __init__(self, engine: FleetEngine) -> None:
        self.engine = engine
        self.notices_s: list[float] = []
        self.num_looks = 0
        self.was_ready = True

    async def look(self) -> None:
        """Counts looks at health until it is cancelled."""
        while True:
            self.num_looks += 1
            self.was_ready &= self.engine.health.is_ready
            await asyncio.sleep(0.005)

    async def kill(self, num_kills: int, every_s: float) -> None:
        """Kills each process in its turn, once all serve and no suspect is on trial."""
        now = asyncio.get_running_loop().time
        for number in range(num_kills):
            due = now() + every_s
            while now() < due or not self.is_calm:  # noqa: ASYNC110 - what other processes do
                await asyncio.sleep(0.01)
            core = self.engine.core.processes.cores[number % len(self.engine.core.processes.cores)]
            assert core.pid is not None
            os.kill(core.pid, signal.SIGKILL)
            killed_s = now()
            while core.is_serving:  # noqa: ASYNC110 - what another process does
                await asyncio.sleep(0.001)
            self.notices_s.append(now() - killed_s)
        while not self.is_calm:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    @property
    def is_calm(self) -> bool:
        resuming = self.engine.core.processes.resuming
        assert resuming is not None
        return all(core.is_serving for core in self.engine.core.processes.cores) and not resuming.is_trying


def test_answers_survive_deaths_and_a_request_that_kills_ends_alone_after_two() -> None:
    async def main() -> None:
        async with poisoned_fleet(data_parallel_size=2) as engine:
            due = await due_from(engine)
            storm = Storm(engine)
            looking = asyncio.ensure_future(storm.look())
            killing = asyncio.ensure_future(storm.kill(NUM_KILLS, EVERY_S))
            num_answers = 0
            while not killing.done():
                assert await answers(engine) == due
                num_answers += len(PROMPTS)
            await killing
            assert engine.num_deaths == NUM_KILLS
            if IS_FULL:
                noticed_s = sorted(storm.notices_s)
                print(f"{num_answers} answers, {NUM_KILLS} deaths, noticed within {noticed_s[-1]:.3f} s: {noticed_s}")
                assert storm.was_ready and noticed_s[-1] <= NOTICE_S
            looking.cancel()

            under_way = [asyncio.ensure_future(answer(engine, prompt)) for prompt in PROMPTS]
            await asyncio.sleep(0.05)
            with pytest.raises(RequestError, match="the engine process ended each time it ran this request") as ended:
                await answer(engine, np.array([5, POISON, 9], np.int32))
            assert ended.value.code == "engine_died"
            assert await asyncio.gather(*under_way) == due
            assert engine.num_deaths == NUM_KILLS + 2
            while IS_FULL and not storm.is_calm:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            await engine.refresh()
            assert is_idle(engine) and not engine.exit.live
            assert not any(one["num_requests"] for one in engine.engines)
            pids = [core.pid for core in engine.core.processes.cores]
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid or 0, 0)

    asyncio.run(asyncio.wait_for(main(), 900.0 if IS_FULL else 240.0))


@pytest.mark.skipif(not IS_FULL, reason="needs MILLRACE_FULL=1: two more starts of a model")
def test_the_blocking_api_uses_several_engines() -> None:
    params = SamplingParams(max_tokens=20, temperature=0.0)
    with LLM(config=CONFIG, data_parallel_size=2) as llm, LLM(config=CONFIG) as one:
        assert isinstance(llm.engine, FleetEngine) and len(llm.engine.core.processes.cores) == 2
        texts = [[answer.outputs[0].text for answer in each.generate(PROMPTS, params, False)] for each in (llm, one)]
        assert texts[0] == texts[1]

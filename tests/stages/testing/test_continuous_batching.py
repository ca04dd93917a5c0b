"""Requests that arrive while others run, in virtual time, on a device with a given time per step."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.engine import Script, scripted_engine
from tests.counts import count

PHASE_S = 0.005  # of each of a step's two jobs on the device thread: forward pass, sampling
STEP_S = 2 * PHASE_S
NEVER_ENDS = Script(eos_probability=0.0)


def simulate(main: Any, seed: int) -> Any:
    return run(main, seed=seed, policy="fifo", worker_delay_s={"device": (PHASE_S, PHASE_S)}).value


async def time_to_first_token(engine: Any, env: SimEnv, num_prompt: int) -> float:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    began = env.now()
    first = None
    async for _ in engine.generate(list(range(3, 3 + num_prompt)), params):
        first = env.now() if first is None else first
    assert first is not None
    return first - began


@pytest.mark.parametrize("steps_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(count(1, 3)))
def test_short_requests_get_a_first_token_within_three_steps_beside_a_long_one(seed: int, steps_in_flight: int):
    """One answer of 1,000 tokens, and 50 short requests that arrive while it runs: none waits for it."""

    async def main(env: SimEnv) -> tuple[list[float], int]:
        sizes = {"max_model_len": 1100, "max_num_seqs": 64, "num_gpu_blocks": 512}
        async with scripted_engine(script=NEVER_ENDS, env=env, steps_in_flight=steps_in_flight, **sizes) as engine:
            long_params = SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)

            async def run_long() -> int:
                outputs = [o async for o in engine.generate([5, 6, 7], long_params, output_kind="final")]
                return len(outputs[-1].outputs[0].token_ids)

            long = asyncio.create_task(run_long())
            await env.sleep(20 * STEP_S)
            draw = env.random("arrivals")
            short = []
            for _ in range(50):
                short.append(asyncio.create_task(time_to_first_token(engine, env, draw.randint(1, 30))))
                await env.sleep(draw.uniform(0.0, 3 * STEP_S))
            waits = [await task for task in short]
            assert not long.done(), "the long request ended too early to delay others"
            return waits, await long

    waits, num_long = simulate(main, seed)
    assert num_long == 1000
    assert len(waits) == 50
    assert max(waits) <= 3 * STEP_S + 1e-6, f"a first token took {max(waits) / STEP_S:.2f} steps' time"


def test_a_finished_sequence_leaves_at_once_and_the_next_takes_its_place():
    """Eight slots, 40 requests of unequal length: no slot stays free while a request waits."""

    async def main(env: SimEnv) -> float:
        sizes = {"max_num_seqs": 8, "num_gpu_blocks": 256}
        async with scripted_engine(script=NEVER_ENDS, env=env, **sizes) as engine:

            async def one(number: int) -> None:
                params = SamplingParams(max_tokens=1 + number % 20, temperature=0.0, ignore_eos=True)
                async for _ in engine.generate([3, 4, 5], params):
                    pass

            began = env.now()
            await asyncio.gather(*(one(number) for number in range(40)))
            return (env.now() - began) / STEP_S

    num_tokens = sum(1 + number % 20 for number in range(40))
    num_steps = simulate(main, seed=0)
    assert num_steps <= num_tokens / 8 * 1.25 + 4, f"{num_steps:.0f} steps for {num_tokens} tokens in 8 slots"

"""What is cut short on its way through leaves nothing in the prefix cache that a later prompt could trip over."""

from __future__ import annotations

import asyncio

import pytest

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.stages.errors import Refused
from millrace.stages.messages import Prompt, Request
from millrace.stages.params import SamplingParams
from millrace.stages.request_limits import as_token_ids
from millrace.stages.testing.scripted.engine import Script, ScriptedEngine, scripted_engine
from tests.counts import count

TURNS = range(0, 120, count(17, full=5))
PROMPT = [97 + i % 26 for i in range(60)]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0)
SIZES = {
    "block_size": 4,
    "num_gpu_blocks": 64,
    "max_model_len": 128,
    "max_num_batched_tokens": 16,
    "num_cpu_blocks": 20,
}


def request(name: str, **fields: object) -> Request:
    return Request(name, (Prompt(token_ids=as_token_ids(PROMPT)),), PARAMS, **fields)


async def answer(engine: ScriptedEngine, name: str) -> list[int]:
    outbox = await engine.submit(request(name))
    return [token for deltas in [d async for d in outbox] for delta in deltas for token in delta.token_ids]


@sim_test(seeds=2)
async def test_a_prefill_aborted_at_any_turn_of_the_loop_leaves_the_next_same_prompt_right(env: SimEnv):
    """Four steps of prefill, cut after 0, 1, 2, ... turns; then the prompt again, beside one that is cut, too."""
    num_cut_midway = 0
    for turns in TURNS:
        async with scripted_engine(script=Script(eos_probability=0.0), env=env, **SIZES) as engine:
            right = engine.model.script.expected(PROMPT, PARAMS)
            await engine.submit(request("cut"))
            for _ in range(turns):
                await asyncio.sleep(0)
            is_cut = engine.abort("cut")
            assert await answer(engine, "again") == right
            await engine.submit(request("cut too"))
            for _ in range(turns):
                await asyncio.sleep(0)
            engine.abort("cut too")
            assert await answer(engine, "once more") == right
            await engine.check_quiet()
            assert engine.prefix_cache is not None
            num_cut_midway += is_cut and engine.model.num_steps > 0
    assert num_cut_midway > len(TURNS) / 4


@sim_test(seeds=2)
async def test_a_request_that_is_refused_leaves_no_entry(env: SimEnv):
    async with scripted_engine(script=Script(eos_probability=0.0), env=env, **SIZES) as engine:
        too_long = Request("long", (Prompt(token_ids=as_token_ids(PROMPT * 3)),), PARAMS)
        with pytest.raises(Refused):
            async for _ in await engine.submit(too_long):
                pass
        assert engine.prefix_cache is not None and len(engine.prefix_cache) == 0
        assert engine.prefix_cache.num_queries == 0

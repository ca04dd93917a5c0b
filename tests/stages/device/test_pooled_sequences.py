"""Pooled sequences in the pipeline, on the scripted device, which reports tokens that were not computed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.stages import SamplingParams
from millrace.stages.engine.pooled_requests import Pairs
from millrace.stages.errors import Refused
from millrace.stages.messages import Prompt
from millrace.stages.pooling_params import Kind, PoolingParams
from millrace.stages.testing.scripted.engine import scripted_engine


@sim_test(seeds=4)
async def test_embeddings_survive_pressure_cancels_and_company(env: SimEnv):
    """With a tiny pool, tiny steps and a host tier, each vector is that of its prompt, and nothing is left behind."""
    draw = random.Random(f"{env.seed}/prompts")
    sizes = {"num_gpu_blocks": 12, "max_model_len": 128, "max_num_batched_tokens": 24, "max_num_seqs": 6}
    async with scripted_engine(env=env, num_cpu_blocks=draw.choice((0, 30)), **sizes) as engine:
        script = engine.model.script

        async def embed(prompt: list[int], kind: Kind) -> None:
            output = await engine.embed(prompt, PoolingParams(kind=kind))
            assert np.allclose(output.embedding, script.embedding(prompt))

        async def generate(prompt: list[int]) -> None:
            params = SamplingParams(max_tokens=30, temperature=0.0)
            (output,) = [o async for o in engine.generate(prompt, params, output_kind="final")]
            assert output.outputs[0].token_ids == script.expected(prompt, params)

        jobs = []
        for _ in range(24):
            prompt = [draw.randrange(3, 250)] * draw.choice((1, 5, 16, 17, 60, 97))
            kind: Kind = draw.choice(("last", "mean", "cls"))
            jobs.append(asyncio.ensure_future(generate(prompt) if draw.random() < 0.4 else embed(prompt, kind)))
            await env.sleep(draw.random() * 0.01)
            if draw.random() < 0.2:
                draw.choice(jobs).cancel()
        for result in await asyncio.gather(*jobs, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result
        await engine.check_quiet()


@sim_test(seeds=5)
async def test_a_step_that_fails_is_computed_again_and_the_vector_is_whole(env: SimEnv):
    prompt = list(range(3, 90))
    async with scripted_engine(env=env, max_num_batched_tokens=16) as engine:
        real, fails = engine.model.forward, iter((False, False, True))

        def forward(grant: Any) -> Any:
            if next(fails, False):
                raise MemoryError("out of memory")
            return real(grant)

        engine.model.forward = forward
        engine.parts.pipeline.stages["execute"].runner = engine.model
        output = await engine.embed(prompt, PoolingParams(kind="mean"))
        assert np.allclose(output.embedding, engine.model.script.embedding(prompt))


@sim_test(seeds=1)
async def test_one_request_of_many_prompts_keeps_their_order(env: SimEnv):
    async with scripted_engine(env=env) as engine:
        scores = await engine.score("mill", [f"race {i}" * (i % 7 + 1) for i in range(20)])
        alone = [(await engine.score("mill", f"race {i}" * (i % 7 + 1)))[0].score for i in range(20)]
        assert [output.score for output in scores] == alone and len(set(alone)) == 20


@sim_test(seeds=1)
async def test_an_unsupported_task_is_refused_with_the_supported_ones(env: SimEnv):
    async with scripted_engine(env=env) as engine:
        with pytest.raises(Refused, match="dimensions = 3: this model's embeddings have 8 numbers"):
            await engine.embed("x", PoolingParams(dimensions=3))
        assert (await engine.embed("x", PoolingParams(dimensions=8))).embedding.shape == (8,)
        with pytest.raises(Refused, match="does not read pairs of texts; it generates text"):
            await engine.embed(Prompt(pair=("a", "b")))
        with pytest.raises(Refused, match="2 queries and 3 documents"):
            await engine.score(["a", "b"], ["c", "d", "e"])


def test_pairs_are_cut_into_parts_that_a_request_may_hold():
    one, each = Pairs(["q"], list("abcde")), Pairs(list("vwxyz"), list("abcde"))
    assert [(part.queries, part.documents) for part in one.cut(2)] == [
        (["q"], ["a", "b"]),
        (["q"], ["c", "d"]),
        (["q"], ["e"]),
    ]
    assert [part.queries for part in each.cut(4)] == [["v", "w", "x", "y"], ["z"]]

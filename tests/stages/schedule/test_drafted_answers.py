"""Drafts through a real model: the same tokens with and without, greedy and drawn, alone and together."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from millrace.stages import Engine, EngineConfig, SamplingParams
from millrace.stages.schedule.scheduler import Scheduler
from tests.counts import FULL
from tests.stages.pressure import begin_together

PROMPTS = (
    "One day the cat sat on the mat. One day the cat sat on the mat. One day the cat sat on",
    "Once upon a time",
    "a b c d a b c d a b c d a b",
)
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.3, "seed": 3},
    {"temperature": 0.8, "top_p": 0.9, "seed": 4, "logprobs": 1},
)


async def answer(engine: Engine, prompt: str, **params: Any) -> tuple[list[int], str, str | None]:
    outputs = engine.generate(prompt, SamplingParams(**{"max_tokens": 96, **params}), output_kind="final")
    (output,) = [output async for output in outputs]
    (choice,) = output.outputs
    return choice.token_ids, choice.text, choice.finish_reason


FULL_ONLY = [("torch", 2)] if FULL else []


async def answers(**settings: Any) -> tuple[list[Any], int]:
    """Of each prompt in each way, alone and then together; and how many drafts were right."""
    fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "max_num_seqs": 8}
    async with Engine(
        EngineConfig(**fields, prompt_lookup_max=3, prompt_lookup_min=1, num_speculative_tokens=15, **settings)
    ) as engine:
        found = [await answer(engine, prompt, **way) for prompt in PROMPTS for way in WAYS]
        for way in WAYS:
            found += await asyncio.gather(*(answer(engine, prompt, **way) for prompt in PROMPTS))
        return found, engine.status().core.scheduler.drafts.num_accepted_tokens


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "steps_in_flight"), [("auto", 1), ("auto", 2), *FULL_ONLY])
def test_answers_are_the_same_with_and_without_drafts(backend: str, steps_in_flight: int):
    settings = {"attention_backend": backend, "steps_in_flight": steps_in_flight}
    without, none = asyncio.run(answers(speculation="off", **settings))
    drafted, num_right = asyncio.run(answers(speculation="ngram", **settings))
    assert drafted == without
    assert none == 0 and num_right > 50


@pytest.mark.slow
def test_answers_are_the_same_when_memory_runs_out():
    """Of four answers at once, in blocks for little more than one: they take each other's memory, and draft."""

    async def run(**settings: Any) -> tuple[list[Any], Scheduler]:
        sizes: dict[str, Any] = {"block_size": 8, "num_gpu_blocks": 34, "num_cpu_blocks": 20, "max_model_len": 256}
        lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1, "num_speculative_tokens": 15}
        async with Engine(EngineConfig(dtype="float32", device="cpu", **sizes, **lookup, **settings)) as engine:
            params: dict[str, Any] = {"temperature": 0.1, "ignore_eos": True, "max_tokens": 160}
            asked = [(prompt, seed) for prompt in PROMPTS for seed in (1, 2)][:4]
            begin_together(engine, len(asked))
            answers = [answer(engine, prompt, seed=seed, **params) for prompt, seed in asked]
            return await asyncio.gather(*answers), engine.core.stages.schedule.scheduler

    without, _ = asyncio.run(run(speculation="off"))
    drafted, scheduler = asyncio.run(run(speculation="ngram"))
    assert drafted == without
    assert scheduler.num_preemptions > 0 and scheduler.speculation.num_accepted_tokens > 20


@pytest.mark.slow
def test_vectors_that_are_made_beside_drafts_are_what_they_are_alone():
    """Of a prompt of one token, which is in a step with a row that drafts, and has no logits."""

    async def run() -> None:
        fields: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "max_num_seqs": 4}
        lookup = {"speculation": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1, "num_speculative_tokens": 15}
        async with Engine(EngineConfig(**fields, **lookup)) as engine:
            way: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 200}
            alone = await answer(engine, PROMPTS[2], **way), await engine.embed([70])
            num_drafts = engine.status().core.scheduler.drafts.num_drafts
            answering = asyncio.create_task(answer(engine, PROMPTS[2], **way))
            vectors = []
            while not answering.done():
                vectors.append(await engine.embed([70]))
            assert await answering == alone[0] and len(vectors) > 1
            assert engine.status().core.scheduler.drafts.num_drafts > num_drafts
            assert all(np.array_equal(vector.embedding, alone[1].embedding) for vector in vectors)

    asyncio.run(run())

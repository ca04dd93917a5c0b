"""Log-probabilities of prompt tokens: those of transformers, each once, also with chunks and preemptions."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.stages import Engine, SamplingParams
from millrace.stages.device import scored_prompts
from millrace.stages.device.scored_prompts import LogitsWithPrompts, ScoredChunk, ScoredPrompts
from millrace.stages.messages import Prompt, PromptLogprobs, Request
from millrace.stages.outputs import RequestOutput
from millrace.stages.sample.sampler import prompt_logprobs
from millrace.stages.testing.scripted.engine import scripted_engine
from tests.model.checkpoints import make_checkpoint
from tests.stages.grants import grant, ints, started

LENGTHS = (1, 2, 16, 17, 130)
K = 3


async def ask(engine: Engine, prompt: Any, **params: Any) -> RequestOutput:
    chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": 0, "prompt_logprobs": K} | params)
    outputs = [o async for o in engine.generate(prompt, chosen, output_kind="final")]
    return outputs[-1]


# -- what they are


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"max_num_batched_tokens": 48, "max_num_seqs": 16, "steps_in_flight": 2}),
        ("mistral", {"enable_chunked_prefill": False, "steps_in_flight": 1, "max_num_seqs": 16}),
    ],
)
def test_they_are_those_of_transformers_however_the_work_is_cut_and_batched(
    tmp_path: Path, monkeypatch, family, settings
):
    monkeypatch.setattr(scored_prompts, "PIECE_BYTES", 7 * 4 * 640)  # seven rows
    model = make_checkpoint(family, tmp_path)
    draw = random.Random(3)
    prompts = [[draw.randrange(3, 640) for _ in range(length)] for length in LENGTHS]

    async def serve() -> list[RequestOutput]:
        async with Engine(
            model=str(tmp_path), dtype="float32", max_model_len=256, num_gpu_blocks=64, **settings
        ) as engine:
            others = [ask(engine, prompt[::-1], max_tokens=9, prompt_logprobs=None) for prompt in prompts]
            asked = [ask(engine, prompt, max_tokens=place % 3) for place, prompt in enumerate(prompts)]
            return (await asyncio.gather(*asked, *others))[: len(asked)]

    for prompt, output in zip(prompts, asyncio.run(serve()), strict=True):
        check_against_transformers(model, prompt, output.prompt_logprobs)


def check_against_transformers(model: Any, prompt: list[int], scores: PromptLogprobs | None) -> None:
    if len(prompt) == 1:
        assert scores is None
        return
    assert scores is not None and scores.start == 1 and scores.token_ids.tolist() == prompt[1:]
    with torch.inference_mode():
        right = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    chosen = right.gather(1, torch.tensor(prompt[1:])[:, None])
    np.testing.assert_allclose(scores.logprobs, chosen[:, 0], atol=1e-3)
    top = right.topk(K)
    np.testing.assert_allclose(scores.top_logprobs, top.values, atol=1e-3)
    assert np.abs(scores.ranks - ((right > chosen).sum(1) + 1).numpy()).max() <= 1  # where two are as good as equal
    assert (scores.top_ids == top.indices.numpy()).mean() > 0.99


# -- that each comes once


def check_scripted(prompt: list[int], scores: PromptLogprobs | None, k: int = K) -> None:
    """The scripted device's log-probabilities, a function of position and token."""
    ids, at = ints(*prompt[1:]), np.arange(1, len(prompt))
    assert scores is not None and scores.start == 1 and scores.token_ids.tolist() == prompt[1:]
    np.testing.assert_array_equal(scores.logprobs, np.float32(-(ids % 64) / 8 - (at % 2) / 16))
    assert scores.top_ids.shape == scores.top_logprobs.shape == (len(ids), k)


def prompts(count: int, lengths: tuple[int, int], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(97, 123) for _ in range(draw.randint(*lengths))] for _ in range(count)]


@pytest.mark.slow
@sim_test(seeds=2)
async def test_each_is_told_once_though_prompts_are_cut_and_preempted_on_their_way(env: SimEnv):
    asked = prompts(10, (2, 50), seed=env.random("prompts").getrandbits(32))
    small = {"num_gpu_blocks": 18, "block_size": 4, "max_model_len": 72, "max_num_batched_tokens": 16}
    for num_cpu_blocks in (0, 30):
        async with scripted_engine(env=env, max_num_seqs=8, num_cpu_blocks=num_cpu_blocks, **small) as engine:
            answers = await asyncio.gather(
                *(ask(engine, prompt, max_tokens=9, ignore_eos=True, n=1 + len(prompt) % 2) for prompt in asked)
            )
            assert engine.status().core.scheduler.num_preemptions > 0
            for prompt, answer in zip(asked, answers, strict=True):
                check_scripted(prompt, answer.prompt_logprobs)
                assert [len(choice.token_ids) for choice in answer.outputs] == [9] * len(answer.outputs)
            await engine.check_quiet()


@pytest.mark.slow
@sim_test(seeds=3, fault_probability=0.1, fault_names=["device.out_of_memory"])
async def test_a_step_that_fails_loses_none_and_repeats_none(env: SimEnv):
    asked = prompts(12, (2, 60), seed=env.random("prompts").getrandbits(32))
    async with scripted_engine(env=env, max_num_batched_tokens=16, block_size=4) as engine:
        tasks = [asyncio.ensure_future(ask(engine, prompt, max_tokens=5)) for prompt in asked]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        served = [(p, a) for p, a in zip(asked, answers, strict=True) if isinstance(a, RequestOutput)]
        assert served
        for prompt, answer in served:
            check_scripted(prompt, answer.prompt_logprobs)


# -- the prefix cache


@sim_test(seeds=1)
async def test_a_prompt_that_is_scored_finds_no_cached_prefix_and_leaves_one(env: SimEnv):
    (prompt,) = prompts(1, (70, 70))
    async with scripted_engine(env=env, block_size=4) as engine:
        first, second = [await ask(engine, prompt, max_tokens=1) for _ in range(2)]
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0)
        check_scripted(prompt, second.prompt_logprobs)
        plain = await ask(engine, prompt, max_tokens=1, prompt_logprobs=None)
        assert plain.num_cached_tokens == 69 and plain.prompt_logprobs is None


@sim_test(seeds=1)
async def test_of_several_choices_one_computes_the_prompt_and_the_others_share_its_blocks(env: SimEnv):
    (prompt,) = prompts(1, (70, 70))
    async with scripted_engine(env=env, block_size=4) as engine:
        outbox = await engine.submit(many([prompt, prompt[:40]], n=3, max_tokens=2))
        _ = [deltas async for deltas in outbox]
        assert [choice.begun.num_cached for choice in outbox.choices[:3]] == [0, 69, 69]
        for index, one in enumerate((prompt, prompt[:40])):
            check_scripted(one, outbox.prompt_logprobs(index))
            assert outbox.prompt_token_ids(index).tolist() == one


def many(asked: list[list[int]], **params: Any) -> Request:
    params = {"temperature": 0.0, "prompt_logprobs": K, **params}
    return Request("many", tuple(Prompt(token_ids=ints(*one)) for one in asked), SamplingParams(**params))


# -- nothing else


@sim_test(seeds=1)
async def test_with_no_tokens_asked_for_the_prompt_is_computed_and_nothing_is_answered(env: SimEnv):
    async with scripted_engine(env=env) as engine:
        output = await ask(engine, "Hello", stop=["x"], logprobs=1)
        (choice,) = output.outputs
        assert (choice.text, choice.token_ids, choice.finish_reason, choice.logprobs) == ("", [], "length", [])
        assert (output.num_prompt_tokens, output.num_generated_tokens) == (5, 0)
        assert output.prompt_token_ids == list(b"Hello")
        check_scripted(list(b"Hello"), output.prompt_logprobs)
        await engine.check_quiet()


def test_what_is_kept_is_bounded_by_rows_and_k(monkeypatch):
    monkeypatch.setattr(scored_prompts, "PIECE_BYTES", 10 * 4 * 50)
    seen = []

    def to_logits(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(len(hidden))
        return hidden @ weights

    weights = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    runs = [
        ScoredChunk(1, 1, np.arange(23, dtype=np.int32), 0, 4),
        ScoredChunk(2, 9, np.arange(7, dtype=np.int32), 23, 0),
    ]
    hidden = torch.randn(30, 8, generator=torch.Generator().manual_seed(1))
    made = prompt_logprobs(LogitsWithPrompts(torch.zeros(0, 50), runs, hidden, to_logits, max_rows=8))
    assert seen == [8, 8, 7, 7]
    columns = [(one.logprobs, one.ranks, one.top_ids, one.top_logprobs) for one in made]
    assert [sum(c.nbytes for c in one) for one in columns] == [23 * 5 * 8, 7 * 1 * 8]
    assert all(np.shares_memory(one.token_ids, run.token_ids) for one, run in zip(made, runs, strict=True))
    right = (hidden @ weights).log_softmax(-1)
    np.testing.assert_allclose(made[1].logprobs, right[range(23, 30), range(7)], atol=1e-5)
    np.testing.assert_allclose(made[0].top_logprobs, right[:23].topk(4).values, atol=1e-5)


def test_a_step_scores_the_tokens_behind_those_it_computes_and_none_of_an_answer():
    scored = ScoredPrompts(4)
    news = [started(0, range(10), prompt_logprobs=1), started(1, range(9)), started(2, (7,), prompt_logprobs=0)]
    for one in [*news, started(3, range(8), answer=(5,), prompt_logprobs=1)]:
        scored.start(one)

    def runs(*rows: Any) -> list[tuple[int, int, list[int], int]]:
        found = scored.runs(grant(rows))
        return [(run.sequence_id, run.start, run.token_ids.tolist(), run.first_row) for run in found]

    assert runs((1, 0, 4, False), (0, 0, 6, False), (2, 0, 1, True)) == [(100, 1, [1, 2, 3, 4, 5, 6], 5)]
    assert runs((0, 6, 4, True), (3, 0, 9, True)) == [(100, 7, [7, 8, 9], 0)]
    assert runs((0, 10, 1, True), (1, 9, 1, True)) == []

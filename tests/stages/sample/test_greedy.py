"""The whole engine against transformers: the same greedy tokens, however the work is cut, batched and interrupted."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from millrace.model.checkpoint.hub import bundled_model_path
from millrace.stages import Engine, EngineConfig, SamplingParams
from tests.counts import FULL, count
from tests.model.checkpoints import FAMILIES, make_checkpoint
from tests.stages.pressure import begin_together, swap_if_there_is_room

ROOT = Path(__file__).parents[3]
LENGTHS = (1, 15, 16, 17, 500)
NUM_NEW = 12
NUM_OTHERS = 16
NUM_LONG = count(60, 120)  # tokens of answers that take each other's memory

SETTINGS: dict[str, dict[str, Any]] = {
    "K = 2, blocks of 16, chunks": {"steps_in_flight": 2, "block_size": 16, "max_num_batched_tokens": 64},
    "K = 1, blocks of 32, chunks": {"steps_in_flight": 1, "block_size": 32, "max_num_batched_tokens": 100},
    "K = 2, blocks of 32, whole prompts": {"steps_in_flight": 2, "block_size": 32, "enable_chunked_prefill": False},
    "K = 1, blocks of 16, whole prompts": {"steps_in_flight": 1, "block_size": 16, "enable_chunked_prefill": False},
}

Prompts = list[list[int]]


class Subject:
    """A checkpoint, prompts for it, and transformers' answers."""

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        draw = random.Random(7)
        vocab_size = model.config.vocab_size
        self.folder = folder
        self.prompts: Prompts = [[draw.randrange(3, vocab_size) for _ in range(length)] for length in LENGTHS]
        self.others: Prompts = [
            [draw.randrange(3, vocab_size) for _ in range(draw.randint(1, 90))] for _ in range(NUM_OTHERS)
        ]
        self.answers = [greedy(model, prompt) for prompt in self.prompts]


def greedy(model: PreTrainedModel, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
    """transformers' own greedy tokens; no stop."""
    ids = torch.tensor([prompt])
    config = model.generation_config
    config.eos_token_id = None
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            do_sample=False,
            max_new_tokens=num_new,
        )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.fixture(scope="module", params=[*FAMILIES, "bundled"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    if request.param == "bundled":
        folder = bundled_model_path()
        return Subject(folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
    folder = tmp_path_factory.mktemp(request.param)
    return Subject(folder, make_checkpoint(request.param, folder))


async def answer(engine: Engine, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    token_ids: list[int] = []
    async for output in engine.generate(prompt, params):
        token_ids += output.outputs[0].token_ids
    return token_ids


def config(folder: Path, **settings: Any) -> EngineConfig:
    fields: dict[str, Any] = {"max_model_len": 640, "max_num_seqs": 32, "max_num_batched_tokens": 1024, "device": "cpu"}
    return EngineConfig(model=str(folder), dtype="float32", **{**fields, **settings})


def ways(*in_ci: tuple[Any, str]) -> list[tuple[Any, str]]:
    """Settings, each with the backend that it is tried on: by default ("auto": native where the machine has it) or on
    torch; the full count has both for each."""
    return [(each, name) for each, _ in in_ci for name in ("auto", "torch")] if FULL else list(in_ci)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "backend"), ways(*zip(SETTINGS, ("auto", "torch", "torch", "auto"), strict=True)))
def test_greedy_tokens_equal_transformers_alone_and_among_others(subject: Subject, name: str, backend: str):
    settings = {**SETTINGS[name], "attention_backend": backend}

    async def run() -> None:
        async with Engine(config(subject.folder, **settings)) as engine:
            assert [await answer(engine, prompt) for prompt in subject.prompts] == subject.answers
            among = await asyncio.gather(*(answer(engine, prompt) for prompt in [*subject.prompts, *subject.others]))
            assert among[: len(LENGTHS)] == subject.answers

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize(("counts", "backend"), ways(((1, 500), "torch"), ((2, 9), "auto")))
def test_greedy_tokens_equal_transformers_when_memory_runs_out(subject: Subject, counts: tuple[int, int], backend: str):
    """The pool holds one longest sequence and little more, so sequences are preempted: swapped to the host as long as
    there is room, computed again when there is none."""

    async def run() -> None:
        steps_in_flight, num_cpu_blocks = counts
        settings = {"steps_in_flight": steps_in_flight, "num_gpu_blocks": 42, "num_cpu_blocks": num_cpu_blocks}
        limits = {"max_num_batched_tokens": 128, "attention_backend": backend}
        async with Engine(config(subject.folder, **settings, **limits)) as engine:
            swap_if_there_is_room(engine)
            begin_together(engine, len(subject.others) + len(subject.prompts))
            long_answers = [answer(engine, other, num_new=NUM_LONG) for other in subject.others]
            answers = asyncio.gather(*(answer(engine, prompt) for prompt in subject.prompts))
            results = await asyncio.gather(*long_answers, answers)
            assert results[-1] == subject.answers
            scheduler = engine.pipeline.stages["schedule"].scheduler  # type: ignore[attr-defined]
            ways = {how for how, _ in scheduler.preemptions}
            # which of them meet a full host pool depends on the order in which their steps end
            assert ways and ways <= {0: {"recompute"}, 9: {"recompute", "swap"}, 500: {"swap"}}[num_cpu_blocks]
            for other, answered in list(zip(subject.others, results, strict=False))[:2]:
                assert answered == await answer(engine, other, num_new=NUM_LONG)

    asyncio.run(run())


INTERPRETED = """
import asyncio, json, sys
import tests.kernels.quick_interpreter
from millrace.stages import Engine, EngineConfig, SamplingParams

async def answers(folder, backend, prompts):
    config = EngineConfig(
        model=folder, dtype="float32", device="cpu", attention_backend=backend, max_model_len=48, max_num_seqs=4,
        max_num_batched_tokens=8, block_size=4, num_gpu_blocks=12,
    )
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    async with Engine(config) as engine:
        async def one(prompt):
            return [t async for out in engine.generate(prompt, params) for t in out.outputs[0].token_ids]
        answers = await asyncio.gather(*map(one, prompts))
        return answers, engine.pipeline.stages["schedule"].scheduler.num_preemptions

folder, prompts = sys.argv[1], json.loads(sys.argv[2])
print(json.dumps([asyncio.run(answers(folder, backend, prompts)) for backend in ("torch", "triton")]))
"""


@pytest.mark.slow
def test_interpreted_triton_kernels_give_the_torch_backends_greedy_tokens(tmp_path: Path):
    """Ten tokens each, in chunks of at most eight, with a pool so small that sequences are preempted."""
    shape = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    make_checkpoint("llama", tmp_path, **shape, intermediate_size=48, vocab_size=640)
    prompts = json.dumps([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [40], [9, 8, 7] * 5])
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED, str(tmp_path), prompts]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    torchs, tritons = json.loads(done.stdout.splitlines()[-1])
    assert tritons[0] == torchs[0]
    assert tritons[1] > 0

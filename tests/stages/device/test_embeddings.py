"""Embeddings of decoder models: transformers' own hidden states, pooled, however the work is cut and interrupted."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from millrace.stages import Engine, EngineConfig, SamplingParams
from millrace.stages.errors import Refused
from millrace.stages.pooling_params import Floats, Kind, PoolingParams
from tests.counts import FULL
from tests.families.checkpoint import make_model, write
from tests.families.rows import ROWS
from tests.model.checkpoints import FAMILIES, make_checkpoint

LENGTHS = (200, 80, 33, 17, 16, 15, 2, 1)
SMALL: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "max_num_seqs": 12}
SETTINGS: dict[str, dict[str, Any]] = {
    "in chunks": {"max_num_batched_tokens": 24},
    "in whole prompts, one step at a time": {"max_num_batched_tokens": 512, "steps_in_flight": 1},
    "with too few blocks": {"max_num_batched_tokens": 24, "num_gpu_blocks": 18, "num_cpu_blocks": 0},
    "with too few blocks and some on the host": {"max_num_batched_tokens": 24, "num_gpu_blocks": 18},
}
ALL = [(family, setting) for family in sorted(FAMILIES) for setting in SETTINGS]
FEW = [(family, "in chunks") for family in sorted(FAMILIES)] + [("qwen3", setting) for setting in list(SETTINGS)[1:]]
CASES = ALL if FULL else FEW
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    return {family: (folder, make_checkpoint(family, folder)) for family, folder in folders.items()}


def drawn(seed: int, lengths: tuple[int, ...]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 640) for _ in range(length)] for length in lengths]


def expected(model: PreTrainedModel, prompt: list[int], kind: Kind) -> Floats:
    """transformers' last hidden states, pooled and of length 1."""
    with torch.inference_mode():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
    vector = {"last": hidden[-1], "cls": hidden[0], "mean": hidden.mean(0)}[kind]
    pooled: Floats = torch.nn.functional.normalize(vector, dim=0).numpy()
    return pooled


async def everything(engine: Engine, prompts: list[list[int]], kinds: tuple[Kind, ...]) -> list[Floats]:
    """An embedding of each kind for each prompt, beside generating sequences of higher priority, also checked."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)

    async def embed(prompt: list[int], kind: Kind) -> Floats:
        return (await engine.embed(prompt, PoolingParams(kind=kind), priority=1)).embedding

    async def generate(prompt: list[int]) -> list[int]:
        (output,) = [o async for o in engine.generate(prompt, params, output_kind="final")]
        return output.outputs[0].token_ids

    others = drawn(2, (5, 40, 120))
    alone = [await generate(prompt) for prompt in others]
    engine.core.reset_prefix_cache()
    vectors = asyncio.gather(*(embed(prompt, kind) for prompt in prompts for kind in kinds))
    while not engine.status().core.scheduler.num_running:  # noqa: ASYNC110 - it has no event
        await asyncio.sleep(0)
    among = await asyncio.gather(*(generate(prompt) for prompt in others))
    assert among == alone, "an embedding changed what another sequence generates"
    return await vectors


@pytest.mark.slow
@pytest.mark.parametrize(("family", "setting"), CASES)
def test_embeddings_are_transformers_pooled_hidden_states_in_any_company(checkpoints: Any, family: str, setting: str):
    folder, model = checkpoints[family]
    kinds: tuple[Kind, ...] = ("last", "mean", "cls")
    prompts = drawn(1, LENGTHS)
    right = [expected(model, prompt, kind) for prompt in prompts for kind in kinds]

    async def main() -> int:
        async with Engine(EngineConfig(model=str(folder)), **SMALL | SETTINGS[setting]) as engine:
            lone = (await engine.embed(prompts[0])).embedding
            assert np.abs(lone - expected(model, prompts[0], "last")).max() < TOLERANCE
            for _ in range(10):  # preemptions depend on milliseconds: repeat until there are some
                for vector, other in zip(await everything(engine, prompts, kinds), right, strict=True):
                    assert np.abs(vector - other).max() < TOLERANCE
                if engine.status().core.scheduler.num_preemptions or "few" not in setting:
                    break
                engine.core.reset_prefix_cache()
            return engine.status().core.scheduler.num_preemptions

    num_preemptions = asyncio.run(main())
    assert num_preemptions > 0 or "few" not in setting


@pytest.mark.slow
@pytest.mark.parametrize(("family", "generates"), [("qwen3", True), ("mistral", False)])
def test_a_decoder_saved_without_a_head_embeds_and_with_a_tied_head_generates(
    checkpoints: Any, family: str, generates: bool, tmp_path: Path
):
    """Embedding models are published in this form."""
    source, model = checkpoints[family]
    model.model.save_pretrained(tmp_path)
    for file in source.glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (prompt,) = drawn(5, (40,))

    async def main() -> None:
        async with Engine(EngineConfig(model=str(tmp_path)), **SMALL) as engine:
            vector = (await engine.embed(prompt)).embedding
            assert np.abs(vector - expected(model, prompt, "last")).max() < TOLERANCE
            assert engine.info.tasks == ({"embed", "generate"} if generates else {"embed"})
            if not generates:
                with pytest.raises(Refused, match="does not generate text; it embeds texts"):
                    [output async for output in engine.generate(prompt)]

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_a_decoder_of_another_family_embeds_by_its_last_token(name: str, tmp_path: Path):
    (row,) = (row for row in ROWS if row.name == name)
    model = make_model(row)
    write(row, model, tmp_path)
    prompts = [[3 + (place * 31 + length) % 120 for place in range(length)] for length in (1, 7, 40)]

    async def main() -> None:
        async with Engine(EngineConfig(model=str(tmp_path)), **SMALL, max_num_batched_tokens=16) as engine:
            outputs = await asyncio.gather(*(engine.embed(prompt) for prompt in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert np.abs(output.embedding - expected(model, prompt, "last")).max() < TOLERANCE

    asyncio.run(main())


@pytest.mark.slow
def test_a_prompt_may_fill_the_context_and_finds_its_cached_prefix(checkpoints: Any):
    folder, model = checkpoints["qwen3"]
    (prompt,) = drawn(3, (256,))

    async def main() -> None:
        async with Engine(EngineConfig(model=str(folder)), **SMALL, num_gpu_blocks=17) as engine:
            for kind, num_cached in (("mean", 0), ("last", 255), ("mean", 0), ("last", 255)):
                output = await engine.embed(prompt, PoolingParams(kind=kind))
                assert np.abs(output.embedding - expected(model, prompt, kind)).max() < TOLERANCE
                assert (output.num_prompt_tokens, output.num_cached_tokens) == (256, num_cached)
            with pytest.raises(Refused, match="length is 256 tokens, and the prompt has 257"):
                await engine.embed([*prompt, 3])

    asyncio.run(main())

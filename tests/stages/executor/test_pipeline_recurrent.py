"""Models with recurrent layers over ranks of layers: each rank keeps its layers' states, with the bits of one process.

Ranks are threads here, and processes too with MILLRACE_FULL=1.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.stages.backends.torch.pipeline_runner import PipelineRunner
from millrace.stages.config import EngineConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import ConfigError
from millrace.stages.messages import STATES, Direction, StepGrant
from millrace.stages.params import SamplingParams
from tests.counts import FULL, count
from tests.families.oracle import prompts
from tests.families.zoo import Entry, Zoo, chosen
from tests.stages.executor.test_pipeline_parallel import Steps, check_steps
from tests.stages.pressure import begin_together, swap_if_there_is_room

NUM_NEW, LENGTHS = 9, (5, 41)
SIZES: dict[str, Any] = {
    "attention_backend": "torch", "device": "cpu", "threads": 1, "tokenizer_workers": 1, "block_size": 4,
    "num_gpu_blocks": 22, "num_cpu_blocks": 512, "max_model_len": 64, "max_num_seqs": 5, "max_num_batched_tokens": 24,
    "state_cache_bytes": 2**18,
}  # fmt: skip
CASES = [("qwen3.5", 2, "float32", "thread")]
if FULL:
    names = ("qwen3.5", "qwen3.5-moe", "lfm2", "lfm2-moe", "granite-hybrid", "bamba")
    CASES = [
        (name, 2, dtype, executor)
        for name in names
        for dtype in ("float32", "bfloat16")
        for executor in ("thread", "process")
    ]


def entry_of(name: str, tmp_path: Path) -> Entry:
    return Zoo(tmp_path, NUM_NEW, LENGTHS).entry(chosen([name])[0])


async def tokens_of(engine: Engine, prompt: list[int], **params: Any) -> tuple[list[list[int]], int]:
    """(the tokens of each choice, how many of the prompt were cached)"""
    asked = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True, **params)
    (output,) = [one async for one in engine.generate(prompt, asked, output_kind="final")]
    return [list(choice.token_ids) for choice in output.outputs], output.num_cached_tokens


@pytest.mark.parametrize(("name", "size", "dtype", "executor"), CASES)
def test_every_step_of_recurrent_layers_has_the_bits_of_one_process(
    name: str, size: int, dtype: str, executor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, preempted, swapped, behind prefixes of the cache, and with several choices of a prompt."""
    model = str(entry_of(name, tmp_path).folder)
    config = EngineConfig(model=model, dtype=dtype, pipeline_parallel_size=size, executor=executor, **SIZES)
    asked = prompts(tuple(5 + 7 * number % 46 for number in range(count(in_ci=7, full=40))))

    async def main() -> tuple[int, set[str]]:
        async with Engine(config) as engine:
            cached = 0
            swap_if_there_is_room(engine)
            for first in range(0, len(asked), 7):  # more would push all prefixes out of the cache
                part = asked[first : first + 7]
                for _ in range(2):
                    begin_together(engine, len(part))
                    every = [tokens_of(engine, prompt, n=1 + number % 3) for number, prompt in enumerate(part)]
                    cached += sum(num_cached for _, num_cached in await asyncio.gather(*every))
            return cached, {how for how, _ in engine.status().core.scheduler.preemptions}

    steps = Steps()
    with captured_logs(), monkeypatch.context() as patch:
        steps.watch(patch)
        num_cached, preempted = asyncio.run(main())
    assert num_cached > 0 and "swap" in preempted
    copied = {copy.direction for grant in steps.grants for copy in grant.copies if copy.kind == STATES}
    assert copied == {Direction.OUT, Direction.IN, Direction.FORK, Direction.SAVE}
    assert any((grant.num_tokens > 1).sum() > 1 for grant in steps.grants)
    check_steps(steps, config)


@pytest.mark.parametrize("failing", [(3,), (5, 6), (2, 11)] if FULL else [(5, 6)])
def test_states_of_steps_that_fail_on_the_last_rank_are_computed_again(
    failing: tuple[int, ...], entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks have changed their states in the steps behind, which are void too."""
    forward, num_steps = PipelineRunner.forward, 0
    is_serving, failed, twice = False, list[int](), [*entry.answers, *entry.answers]

    def fail(runner: PipelineRunner, grant: StepGrant) -> Any:
        nonlocal num_steps
        num_steps += is_serving
        if num_steps in failing and num_steps not in failed:
            failed.append(num_steps)
            raise RuntimeError("drawn")
        return forward(runner, grant)

    ranks: dict[str, Any] = {"pipeline_parallel_size": 2, "executor": "thread"}
    config = EngineConfig(model=str(entry.folder), dtype="float32", **ranks, **SIZES)

    async def main() -> list[list[int]]:
        nonlocal is_serving
        async with Engine(config) as engine:
            is_serving = True
            every = [tokens_of(engine, one.prompt) for one in twice]  # a step that fails has several rows
            return [choices[0] for choices, _ in await asyncio.gather(*every)]

    monkeypatch.setattr(PipelineRunner, "forward", fail)
    with captured_logs():
        found = asyncio.run(main())
    assert failed == list(failing)
    assert found == [one.token_ids for one in twice]


@pytest.fixture(scope="module")
def entry(tmp_path_factory: pytest.TempPathFactory) -> Entry:
    return entry_of("qwen3.5", tmp_path_factory.mktemp("zoo"))


def test_more_ranks_than_layers_with_attention_are_refused(entry: Entry) -> None:
    async def start() -> None:
        async with Engine(EngineConfig(model=str(entry.folder), pipeline_parallel_size=3, executor="thread", **SIZES)):
            pass

    with (
        captured_logs(),
        pytest.raises(
            ConfigError, match="has 4 layers, for 2 ranks at most, as each needs one with attention; use 2 or less"
        ),
    ):
        asyncio.run(start())

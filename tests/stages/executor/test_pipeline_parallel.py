"""Engines whose layers are on two or three ranks compute the bits of one process, with every feature.

A product may depend on the rows beside it, so the oracle computes the same steps in one process. Ranks are threads
here, and processes too with MILLRACE_FULL=1.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.runtime.env.env import LiveEnv
from millrace.runtime.env.log import captured_logs
from millrace.runtime.startup.phases import Phases
from millrace.stages.backends.torch.pipeline_runner import PipelineRunner
from millrace.stages.config import EngineConfig
from millrace.stages.device.scored_prompts import LogitsWithPrompts
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import ConfigError
from millrace.stages.execute.model_runner import ModelRunner
from millrace.stages.loading.model import load_model
from millrace.stages.messages import StepGrant
from millrace.stages.params import SamplingParams
from tests.counts import FULL, count
from tests.model.lora import peft_formats
from tests.model.lora.peft_formats import write_adapter, write_base
from tests.model.tiny_tokenizers import make_tokenizer
from tests.stages.executor.test_tensor_parallel import SIZES, VOCAB_SIZE, Said, answer
from tests.stages.pressure import begin_together, swap_if_there_is_room
from tests.stages.schedule.test_drafted_answers import PROMPTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(peft_formats.SHAPE, "vocab_size", VOCAB_SIZE)
        patch.setitem(peft_formats.SHAPE, "num_hidden_layers", 3)
        base = write_base("llama", root / "base")
        make_tokenizer("chatml", base, VOCAB_SIZE)
        for kind in ("plain", "q_v"):
            write_adapter(kind, base, root / "adapters" / kind)
    yield root


def config_of(folder: Path, **settings: Any) -> EngineConfig:
    sizes: dict[str, Any] = {**SIZES, "num_gpu_blocks": 36}
    return EngineConfig(model=str(folder / "base"), lora_dir=str(folder / "adapters"), **{**sizes, **settings})


@dataclass
class Steps:
    """What the runner of an engine was given and has returned, step by step."""

    grants: list[StepGrant] = field(default_factory=list)
    last_tokens: list[torch.Tensor] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    adapters: dict[str, Any] = field(default_factory=dict)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        forward, load = PipelineRunner.forward, PipelineRunner._load_adapter

        def recorded(runner: PipelineRunner, grant: StepGrant) -> Any:
            last_tokens = runner.last_tokens.clone()
            result = forward(runner, grant)
            self.grants.append(grant)
            self.last_tokens.append(last_tokens)
            self.results.append(copied(result))
            return result

        def loaded(runner: PipelineRunner, step: int, number: int, digest: str) -> None:
            load(runner, step, number, digest)
            assert runner._find_adapter is not None
            self.adapters[digest] = runner._find_adapter(digest)

        patch.setattr(PipelineRunner, "forward", recorded)
        patch.setattr(PipelineRunner, "_load_adapter", loaded)

    def check(self, runner: ModelRunner) -> None:
        """Computes the same steps in one process."""
        runner.find_adapters(self.adapters.__getitem__)
        for grant, last_tokens, expected in zip(self.grants, self.last_tokens, self.results, strict=True):
            runner.last_tokens.copy_(last_tokens)
            found = copied(runner.forward(grant))
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), f"step {grant.step}"


def copied(result: Any) -> list[torch.Tensor]:
    if isinstance(result, LogitsWithPrompts):
        return [result.sampled.clone(), result.hidden.clone()]
    return [result.clone()]


async def answers(config: EngineConfig, numbers: range) -> tuple[list[Said], set[str]]:
    """(All at once, how sequences were preempted)"""
    async with Engine(config) as engine:
        swap_if_there_is_room(engine)
        begin_together(engine, len(numbers))
        said = await asyncio.gather(*(answer(engine, number) for number in numbers))
        engine.core.stages.schedule.scheduler.check()
        return list(said), {how for how, _ in engine.status().core.scheduler.preemptions}


def check_steps(steps: Steps, config: EngineConfig) -> None:
    """Computes the steps with all layers together: in one process, or on ranks that share each."""
    with captured_logs():
        executor = config.executor if config.tensor_parallel_size > 1 else "auto"
        together = replace(config, pipeline_parallel_size=1, executor=executor)
        loaded: Any = load_model(together, Phases(lambda: 0.0), LiveEnv(0))
        try:
            steps.check(loaded.runner)
        finally:
            if loaded.close is not None:
                loaded.close()


CASES = [(2, "float32", "thread"), (3, "bfloat16", "thread")]
if FULL:
    CASES += [(size, dtype, "process") for size in (2, 3) for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(("size", "dtype", "executor"), CASES)
def test_every_step_has_the_bits_of_one_process_with_every_feature(
    folder: Path, size: int, dtype: str, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(folder, dtype=dtype, pipeline_parallel_size=size, executor=executor)
    steps = Steps()
    with captured_logs(), monkeypatch.context() as patch:
        steps.watch(patch)
        said, preempted = asyncio.run(answers(config, range(count(in_ci=7, full=50))))
    assert "swap" in preempted
    assert any(len(result) > 1 for result in steps.results), "no prompt was scored"
    assert any(grant.adapter_loads for grant in steps.grants) and any(len(one) == 4 for one in said)
    lanes = [len(grant.slots) for grant in steps.grants if grant.is_decode]
    assert lanes and max(lanes) < config.max_num_seqs, "all rows are in one step"
    check_steps(steps, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if FULL else ["float32"])
def test_layers_on_ranks_that_share_them_have_the_bits_of_ranks_that_share_all(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranges of layers, each on two ranks."""
    ranks: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    config = config_of(folder, dtype=dtype, executor="process" if FULL else "thread", **ranks)
    steps = Steps()
    with captured_logs(), monkeypatch.context() as patch:
        steps.watch(patch)
        _, preempted = asyncio.run(answers(config, range(count(in_ci=6, full=50))))
    assert preempted and any(grant.adapter_loads for grant in steps.grants)
    check_steps(steps, replace(config, executor="thread"))


def test_drafts_and_embeddings_have_the_bits_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {name: SIZES[name] for name in ("attention_backend", "device", "dtype", "threads")}
    sizes |= {"max_model_len": 256, "num_gpu_blocks": 64, "max_num_seqs": 4, "num_cpu_blocks": 0}
    drafts: dict[str, Any] = {"speculation": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    drafts |= {"num_speculative_tokens": 15}
    config = EngineConfig(pipeline_parallel_size=2, executor="thread", **sizes, **drafts)
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)

    async def ask(engine: Engine, prompt: str) -> None:
        async for _ in engine.generate(prompt, params, output_kind="final"):
            pass

    async def main() -> tuple[int, Any]:
        async with Engine(config) as engine:
            await asyncio.gather(*(ask(engine, text) for text in PROMPTS))
            vector = await engine.embed("Tom had a cat.")
            return engine.core.stages.schedule.scheduler.speculation.num_draft_tokens, vector

    steps = Steps()
    with captured_logs(), monkeypatch.context() as patch:
        steps.watch(patch)
        num_drafts, _ = asyncio.run(main())
    assert num_drafts > 0
    check_steps(steps, config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_request_at_a_time_gets_the_answer_of_one_process(folder: Path, dtype: str) -> None:
    async def ask(**settings: Any) -> list[Said]:
        async with Engine(config_of(folder, dtype=dtype, **settings)) as engine:
            return [await answer(engine, number) for number in (0, 3, 5)]

    with captured_logs():
        one, three = asyncio.run(ask()), asyncio.run(ask(pipeline_parallel_size=3, executor="thread"))
    assert [[choice[:2] for choice in said] for said in one] == [[choice[:2] for choice in said] for said in three]


@pytest.mark.parametrize("num_shares", [1, 2] if FULL else [2])
def test_steps_that_fail_on_the_last_rank_are_computed_again_by_all(
    num_shares: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks have computed the steps behind, which are void too."""
    forward, num_steps = PipelineRunner.forward, 0

    def failing(runner: PipelineRunner, grant: StepGrant) -> Any:
        nonlocal num_steps
        num_steps += runner._find_adapter is not None
        if num_steps in (4, 11, 18):
            num_steps += 1
            raise RuntimeError("drawn")
        return forward(runner, grant)

    async def tokens(config: EngineConfig) -> tuple[list[list[int]], int]:
        async with Engine(config) as engine:
            said = await asyncio.gather(*(answer(engine, 3 * number) for number in range(4)))
            return [choice[0] for one in said for choice in one], engine.core.stages.schedule.scheduler._generation

    ranks: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": num_shares, "executor": "thread"}
    config = config_of(folder, num_gpu_blocks=80, **ranks)
    with captured_logs():
        expected, _ = asyncio.run(tokens(config))
        monkeypatch.setattr(PipelineRunner, "forward", failing)
        found, num_voids = asyncio.run(tokens(config))
    assert num_voids == 3 and found == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"pipeline_parallel_size": 4},
            "pipeline_parallel_size = 4: llama has 3 layers, for 3 ranks at most; use 3 or",
        ),
        ({"pipeline_parallel_size": 16}, "pipeline_parallel_size = 16: must be at most 15"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size = 0: must be a whole number of at least 1"),
        ({"pipeline_parallel_size": 2, "emulate_tp": 2}, "with emulate_tp = 2: it is for one process; leave out one"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 3}, "tensor_parallel_size = 3: must divide 4 heads"),
        ({"pipeline_parallel_size": 2, "attention_backend": "native"}, "the native backend computes in one process"),
        ({"pipeline_parallel_size": 2, "kv_cache_dtype": "fp8"}, "keep keys and values as dtype; use kv_cache_dtype"),
    ],
)
def test_what_cannot_be_dealt_over_ranks_is_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    async def start() -> None:
        async with Engine(config_of(folder, **settings)):
            pass

    with captured_logs(), pytest.raises(ConfigError, match=message):
        asyncio.run(start())


def test_a_rank_that_fails_ends_the_group_and_its_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from millrace.stages.backends.torch import rank

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    async def main() -> str:
        async with Engine(config_of(folder, pipeline_parallel_size=3, executor="thread")) as engine:
            await answer(engine, 0)
            monkeypatch.setattr(rank.RankWorker, "_pass_on", fail)
            with pytest.raises(Exception, match="."):
                await answer(engine, 3)
            return str(engine.health.reason)

    with captured_logs():
        reason = asyncio.run(main())
    assert re.search(r"rank [12] in order \d+ \(a step of .*Input/output error", reason), reason
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if "rank" in name or name in ("millrace-orders", "millrace-pipeline")]

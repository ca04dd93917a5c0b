"""A whole engine whose native steps are chained on the library's own thread.

Its answers are those of an engine that starts the steps one by one, for all parameters and after preemptions.

The model's steps take some milliseconds, so that most of them are handed over while the one before them runs.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from millrace.kernels.native import build, machine
from millrace.runtime.env.cpus import Cpus
from millrace.runtime.env.env import LiveEnv
from millrace.runtime.env.log import captured_logs
from millrace.runtime.stage import Outlet, Stage
from millrace.stages.engine.engine import Engine
from millrace.stages.messages import StepGrant, StepLogits
from millrace.stages.params import SamplingParams, StructuredOutputs
from millrace.stages.sample.logits_processor import LogitsProcessor
from tests.model.checkpoints import make_checkpoint
from tests.stages.late_engines import SMALL, Ask, Ran, greedy, prompts, run

pytestmark = [
    pytest.mark.skipif(
        not machine.instruction_sets() or build.find_compiler() is None, reason="no AVX2, or no compiler"
    ),
    pytest.mark.slow,
]

NATIVE: dict[str, Any] = {"attention_backend": "native", "speculation": "off"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("qwen3", path, hidden_size=384, intermediate_size=1024, num_hidden_layers=6)
    return path


def both(
    checkpoint: Path, asks: list[Ask], prepare: Callable[[Engine], object] = lambda engine: None, **settings: Any
) -> tuple[Ran, Ran, int]:
    """(answers with one thread and no chain; with two threads; number of steps handed over by the second engine).

    `prepare` is called with the second engine.
    """
    found: list[Any] = []

    def find(engine: Engine) -> None:
        found.append(engine.pipeline.stages["execute"].runner)  # type: ignore[attr-defined]
        found.append(found[0].ahead.num_handed_over)
        prepare(engine)

    with captured_logs():
        right = asyncio.run(run(checkpoint, asks, None, **{**NATIVE, **settings, "threads": 1}))
        ran = asyncio.run(run(checkpoint, asks, None, find, **{**NATIVE, **settings, "threads": 2}))
    return right, ran, found[0].ahead.num_handed_over - found[1]


def in_line(*args: Any, **settings: Any) -> tuple[Ran, Ran, int]:
    """As `both`, and some steps were handed over: a busy machine may be late with all of few, so then it runs again."""
    for _ in range(20):
        right, ran, num_handed_over = both(*args, **settings)
        if num_handed_over or ran.answers != right.answers:
            break
    return right, ran, num_handed_over


@pytest.mark.parametrize("steps_in_flight", [1, 2, 16])  # the chain has room for 4
def test_greedy_and_drawn_answers_are_the_same_whatever_is_in_flight(checkpoint: Path, steps_in_flight: int) -> None:
    drawn = [SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=i, ignore_eos=True) for i in range(3)]
    asks = [(prompt, greedy(10 + 3 * i)) for i, prompt in enumerate(prompts(7, 60))]
    asks += list(zip(prompts(3, 9, seed=1), drawn, strict=True))
    run_it = in_line if steps_in_flight == 2 else both
    right, ran, num_handed_over = run_it(checkpoint, asks, steps_in_flight=steps_in_flight)
    assert ran.answers == right.answers
    if steps_in_flight < 3:  # with more, a step may be submitted before its predecessor starts
        assert (num_handed_over > 0) == (steps_in_flight == 2)


@pytest.mark.parametrize("swap_blocks", [0, 40], ids=["recompute", "swap"])
def test_sequences_that_lose_their_blocks_go_on_where_they_were(checkpoint: Path, swap_blocks: int) -> None:
    asks = [(prompt, greedy(28)) for prompt in prompts(8, 30)]
    settings = {"num_gpu_blocks": 14, "max_model_len": 100, "block_size": 8, "num_cpu_blocks": swap_blocks}
    right, ran, num_handed_over = in_line(checkpoint, asks, enable_prefix_caching=False, **settings)
    assert ran.answers == right.answers
    assert ran.num_preemptions > 0 and num_handed_over > 0


def test_answers_end_where_they_should_while_later_steps_are_in_line(checkpoint: Path) -> None:
    plain, _, _ = both(checkpoint, [(prompt, greedy(20)) for prompt in prompts(6, 20)])
    asks: list[Ask] = []
    for i, (prompt, ((ids, text, _),)) in enumerate(zip(prompts(6, 20), plain.answers, strict=True)):
        more: dict[str, Any] = {"stop_token_ids": (ids[7],)} if i % 2 else {"stop": (text[4:7],)}
        asks.append((prompt, greedy(20, **more)))
    right, ran, num_handed_over = in_line(checkpoint, asks)
    assert ran.answers == right.answers and num_handed_over > 0
    assert [reason for ((_, _, reason),) in ran.answers].count("stop") >= 5


def test_rows_that_need_more_than_logits_are_chosen_outside_the_chain(checkpoint: Path) -> None:
    more: list[dict[str, Any]] = [
        {"logprobs": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"logit_bias": {7: 4.0, 9: -3.0}},
        {"min_tokens": 4},
        {"structured_outputs": StructuredOutputs(regex="[a-f]{30,60}")},
        {"n": 3},
        {},
    ]
    asks: list[Ask] = [(prompt, greedy(30, **each)) for prompt, each in zip(prompts(7, 20), more, strict=True)]
    right, ran, _ = both(checkpoint, asks, max_num_seqs=16)
    assert ran.answers == right.answers
    told = [[choice.logprobs for choice in output.outputs] for output in ran.outputs]
    assert told == [[choice.logprobs for choice in output.outputs] for output in right.outputs]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_has_no_logits_where_all_its_rows_take_the_likeliest_token(checkpoint: Path, threads: int) -> None:
    """Prompts come beside decoding rows; the answers are those of an engine that chooses from logits."""
    num_rows: list[int] = []

    def count(engine: Engine) -> None:
        model = engine.pipeline.stages["execute"].runner.decoder.model  # type: ignore[attr-defined]
        take = model.logits_buffer

        def noting(count: int) -> Any:
            num_rows.append(count)
            return take(count)

        model.logits_buffer = noting

    def answers(asks: list[Ask], **settings: Any) -> Any:
        num_rows.clear()
        return asyncio.run(run(checkpoint, asks, None, count, **{**NATIVE, "threads": threads, **settings})).answers

    asks = [(prompt, greedy(8 + 5 * i)) for i, prompt in enumerate(prompts(7, 60))]
    with captured_logs():
        found = answers(asks)
        assert not num_rows
        assert found == answers(asks, logits_processor=LogitsProcessor()) and num_rows
        drawn: Ask = (prompts(1, 9, seed=1)[0], SamplingParams(max_tokens=20, temperature=1.0, seed=3))
        assert answers([*asks, drawn])[:-1] == found
        told: Ask = (prompts(1, 9, seed=2)[0], greedy(20, logprobs=2))
        assert answers([*asks, told])[:-1] == found and num_rows


def test_a_sample_stage_of_yours_gets_logits_of_greedy_rows_too(checkpoint: Path) -> None:
    shapes: list[tuple[int, ...]] = []

    class Watch(Stage[StepLogits, StepLogits]):
        outputs: ClassVar = {"out": StepLogits}

        async def handle(self, batch: Sequence[StepLogits], out: Outlet[StepLogits]) -> None:
            for item in batch:
                shapes.append(np.shape(await item.logits))
                out.send(item)

    async def answer() -> None:
        engine = Engine(model=str(checkpoint), **{**SMALL, **NATIVE})
        engine.insert(Watch(), after="execute", name="watch")
        async with engine:
            shapes.clear()
            [_ async for _ in engine.generate([5, 6, 7], greedy(5))]

    with captured_logs():
        asyncio.run(answer())
    assert shapes and all(len(shape) == 2 for shape in shapes)


def test_drafts_and_links_take_turns(checkpoint: Path) -> None:
    asks: list[Ask] = [([5, 6, 7, 8, 9, 10] * 8, greedy(60))]
    right, ran, num_handed_over = in_line(checkpoint, asks, speculation="ngram")
    assert ran.answers == right.answers and num_handed_over > 0


@pytest.mark.parametrize("settings", [{"async_scheduling": False}, {"logits_processor": LogitsProcessor()}])
def test_no_async_scheduling_and_a_logits_processor_take_step_by_step(
    checkpoint: Path, settings: dict[str, Any]
) -> None:
    asks = [(prompt, greedy(12)) for prompt in prompts(3, 20)]
    right, ran, num_handed_over = both(checkpoint, asks, **settings)
    assert ran.answers == right.answers and num_handed_over == 0


@pytest.mark.parametrize("swap_blocks", [0, 40], ids=["recompute", "swap"])
def test_a_step_that_fails_takes_those_in_line_with_it_and_all_go_on(checkpoint: Path, swap_blocks: int) -> None:
    asks = [(prompt, greedy(40)) for prompt in prompts(8, 30)]
    sampled: list[int] = []

    def spoil(engine: Engine) -> None:
        sampler = engine.pipeline.stages["sample"].sampler  # type: ignore[attr-defined]
        sample = sampler.sample

        def fail_now_and_then(grant: StepGrant, logits: Any) -> Any:
            sampled.append(grant.step)
            if len(sampled) in (12, 31, 47):
                raise RuntimeError("planted")
            return sample(grant, logits)

        sampler.sample = fail_now_and_then

    settings = {"num_gpu_blocks": 20, "max_model_len": 100, "block_size": 8, "num_cpu_blocks": swap_blocks}
    right, ran, num_handed_over = in_line(checkpoint, asks, spoil, enable_prefix_caching=False, **settings)
    assert ran.answers == right.answers
    assert len(sampled) > 47 and num_handed_over > 0


CORES = Cpus.of_this_process().cores


@pytest.mark.skipif(sys.platform != "linux" or len(CORES) < 2, reason="threads are not kept to CPUs, or have one core")
@pytest.mark.parametrize("threads", [len(CORES), 1], ids=["pinned", "not pinned"])
def test_other_threads_of_an_engine_keep_off_the_cpu_of_the_one_that_begins_steps(
    checkpoint: Path, threads: int
) -> None:
    async def of_others() -> set[int]:
        async with Engine(model=str(checkpoint), env=(env := LiveEnv(0)), **{**SMALL, **NATIVE, "threads": threads}):
            found = await env.run_in_thread(os.sched_getaffinity, 0)
        await env.aclose()
        return found

    with captured_logs():
        left = asyncio.run(of_others())
    assert left == os.sched_getaffinity(0) - ({CORES[0]} if threads == len(CORES) else set())

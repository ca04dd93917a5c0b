"""A whole engine whose device runs beside the host: it answers as the one that waits for each step.

The model is real, of some thousand weights, and its kernels are the PyTorch twins. The streams run late and out of
order, or at once; in either case the step line, the graphs, the slot tables and the completion thread are those that a
GPU has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from millrace.runtime.env import LiveEnv
from millrace.runtime.hoststreams import HostStreams
from millrace.runtime.log import captured_logs
from millrace.runtime.simstreams import SimStreams
from millrace.runtime.streams import Streams
from millrace.stages.engine import Engine
from millrace.stages.limits import as_token_ids
from millrace.stages.messages import Prompt, Request
from millrace.stages.outputs import RequestOutput
from millrace.stages.params import SamplingParams
from millrace.stages.reading import read_outputs
from millrace.stages.stepping.late_device import LateDevice
from millrace.stages.stepping.late_model import LateModel
from tests.model.checkpoints import make_checkpoint

SMALL: dict[str, Any] = {
    "attention_backend": "torch",
    "dtype": "float32",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
    "num_gpu_blocks": 64,
    "threads": 1,
}
Ask = tuple[Sequence[int], SamplingParams]
Answers = list[list[tuple[list[int], str, str | None]]]
MakeStreams = Callable[[], Streams]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("qwen3", path)
    return path


def late(seed: int = 0) -> SimStreams:
    """Torn copies, odd orders."""
    return SimStreams(Random(seed), laziness=0.3)


class Ran:
    """What one engine answered to some requests at once, and how it got there."""

    answers: Answers
    num_preemptions: int
    num_copied: int  # blocks to the host or back
    num_attended: int  # steps
    num_steps: int
    num_gaps: int
    outputs: list[RequestOutput]


async def run(checkpoint: Path, asks: Sequence[Ask], streams: Streams | None, **settings: Any) -> Ran:
    env, ran = LiveEnv(0), Ran()
    env.streams = streams
    try:
        async with Engine(model=str(checkpoint), env=env, **{**SMALL, **settings}) as engine:
            if engine.host_tier is not None:
                engine.host_tier.rates = None  # swap whenever there is room
            counted = _count_copies(engine) if streams is not None else []
            requests = [
                Request(f"r{i}", (Prompt(token_ids=as_token_ids(prompt)),), params)
                for i, (prompt, params) in enumerate(asks)
            ]
            ran.outputs = await asyncio.gather(*(_final(engine, request) for request in requests))
            ran.answers = [
                [(choice.token_ids, choice.text, choice.finish_reason) for choice in output.outputs]
                for output in ran.outputs
            ]
            ran.num_preemptions = engine.scheduler.num_preemptions
            model = engine.pipeline.stages["execute"].runner  # type: ignore[attr-defined]
            device = engine.pipeline.stages["execute"].device  # type: ignore[attr-defined]
            assert isinstance(model, LateModel) == isinstance(device, LateDevice) == (streams is not None)
            if isinstance(model, LateModel):
                ran.num_attended, ran.num_steps = model.num_attended, model.line._num_submitted
                ran.num_copied = len(counted)
                ran.num_gaps = device.idle_gaps_us.num_observed
            return ran
    finally:
        await env.aclose()


def _count_copies(engine: Engine) -> list[int]:
    """The host's blocks that are copied to or from, from now on."""
    work, counted = engine.pipeline.stages["execute"].runner._work, []  # type: ignore[attr-defined]
    host_block = work.host_block

    def count(block: int) -> Any:
        counted.append(block)
        return host_block(block)

    work.host_block = count
    return counted


async def _final(engine: Engine, request: Request) -> RequestOutput:
    outbox = await engine.submit(request, wait=True)
    (output,) = [output async for output in read_outputs(outbox, "final")]
    return output


def both(checkpoint: Path, asks: Sequence[Ask], streams: Streams, **settings: Any) -> tuple[Ran, Ran]:
    """(what the device that is waited for answers, what the late one does)."""
    with captured_logs():
        return (
            asyncio.run(run(checkpoint, asks, None, **settings)),
            asyncio.run(run(checkpoint, asks, streams, **settings)),
        )


def greedy(num_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **more)


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    dice = Random(seed)
    return [[dice.randrange(3, 200) for _ in range(dice.randint(1, longest))] for _ in range(count)]


# -- steps that are submitted and not waited for


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
@pytest.mark.parametrize("is_eager", [False, True], ids=["graphs", "eager"])
def test_greedy_answers_are_the_same_whatever_is_in_flight(
    checkpoint: Path, steps_in_flight: int, is_eager: bool
) -> None:
    asks = [(prompt, greedy(5 + i)) for i, prompt in enumerate(prompts(12, 60))]
    right, ran = both(checkpoint, asks, late(steps_in_flight), steps_in_flight=steps_in_flight, enforce_eager=is_eager)
    assert ran.answers == right.answers
    assert ran.num_attended == 0 and ran.num_gaps > 0


def test_prompts_longer_than_a_step_are_computed_in_parts(checkpoint: Path) -> None:
    asks = [(prompt, greedy()) for prompt in ([*range(3, 110)], [*range(40, 120)], [7], [*range(9, 100)])]
    right, ran = both(checkpoint, asks, late(), max_num_batched_tokens=16)
    assert ran.answers == right.answers and ran.num_attended == 0


@pytest.mark.parametrize("swap_blocks", [0, 40], ids=["recompute", "swap"])
def test_sequences_that_lose_their_blocks_go_on_where_they_were(checkpoint: Path, swap_blocks: int) -> None:
    asks = [(prompt, greedy(40)) for prompt in prompts(8, 30)]
    settings = {"num_gpu_blocks": 14, "max_model_len": 100, "block_size": 8, "num_cpu_blocks": swap_blocks}
    right, ran = both(checkpoint, asks, late(), enable_prefix_caching=False, **settings)
    assert ran.num_preemptions > 0 and (ran.num_copied > 0) == (swap_blocks > 0)
    assert ran.answers == right.answers and ran.num_attended == 0


def test_cached_prefixes_are_found_and_read(checkpoint: Path) -> None:
    first = [*range(3, 60)]
    asks = [([*first, last], greedy()) for last in (7, 8, 9, 7)] + [(first, greedy())]
    right, ran = both(checkpoint, asks, late(), max_num_seqs=1)
    assert ran.answers == right.answers
    assert [output.num_cached_tokens for output in ran.outputs] == [
        output.num_cached_tokens for output in right.outputs
    ]
    assert sum(output.num_cached_tokens for output in ran.outputs) > 100


def test_stop_ids_stop_strings_and_eos_end_answers_where_they_should(checkpoint: Path) -> None:
    plain = asyncio.run(run(checkpoint, [(prompt, greedy(20)) for prompt in prompts(6, 20)], None))
    asks = []
    for i, (prompt, ((ids, text, _),)) in enumerate(zip(prompts(6, 20), plain.answers, strict=True)):
        if i % 3 == 0:
            more: dict[str, Any] = {"stop_token_ids": (ids[7],)}
        elif i % 3 == 1:
            more = {"stop_token_ids": (*range(150, 160), ids[5])}  # more than the device's table has room for
        else:
            more = {"stop": (text[4:7],)}
        asks.append((prompt, greedy(20, **more)))
    right, ran = both(checkpoint, asks, late())
    assert ran.answers == right.answers and ran.num_attended == 0
    reasons = [reason for ((_, _, reason),) in ran.answers]
    assert reasons.count("stop") >= 5


def test_choices_of_one_prompt_share_its_blocks_and_part_when_they_differ(checkpoint: Path) -> None:
    drawn = SamplingParams(max_tokens=15, temperature=1.0, n=4, seed=3, ignore_eos=True)
    asks = [([*range(3, 33)], greedy(n=3)), ([*range(50, 71)], drawn), ([*range(3, 33)], greedy())]
    right, ran = both(checkpoint, asks, HostStreams())
    assert ran.answers[0] == right.answers[0] and ran.answers[2] == right.answers[2]
    texts = [text for _, text, _ in ran.answers[1]]
    assert len(set(texts)) == 4
    again = asyncio.run(run(checkpoint, asks, late(5), steps_in_flight=4))
    assert again.answers == ran.answers, "the noise depends on seed and position alone"

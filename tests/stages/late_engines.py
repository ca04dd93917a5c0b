"""Whole engines with a real model of some thousand weights, on a synchronous or an asynchronous device."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from millrace.runtime.device_streams.interface import DeviceStreams
from millrace.runtime.device_streams.simulated import SimStreams
from millrace.runtime.env.env import LiveEnv
from millrace.runtime.env.log import captured_logs
from millrace.stages.backends.cuda.async_device import AsyncDevice
from millrace.stages.backends.cuda.async_model import AsyncModel
from millrace.stages.engine.engine import Engine
from millrace.stages.engine.results import read_outputs
from millrace.stages.messages import Prompt, Request
from millrace.stages.outputs import ModelInfo, RequestOutput
from millrace.stages.params import SamplingParams
from millrace.stages.request_limits import as_token_ids
from tests.stages.pressure import begin_together, swap_if_there_is_room

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


def late(seed: int = 0) -> SimStreams:
    """Torn copies, odd orders."""
    return SimStreams(Random(seed), laziness=0.3)


class Ran:
    """What one engine answered to some requests at once, and how it got there."""

    answers: Answers
    num_preemptions: int
    num_copied: int  # blocks to the host or back
    num_attended: int  # steps
    num_eager: int  # forward passes without a graph
    num_steps: int
    num_gaps: int
    outputs: list[RequestOutput]
    info: ModelInfo


async def run(
    checkpoint: Path,
    asks: Sequence[Ask],
    streams: DeviceStreams | None,
    prepare: Callable[[Engine], object] = lambda engine: None,
    **settings: Any,
) -> Ran:
    """Runs the requests on one engine; `prepare` is called with it after its start."""
    env, ran = LiveEnv(0), Ran()
    env.streams = streams
    try:
        async with Engine(model=str(checkpoint), env=env, **{**SMALL, **settings}) as engine:
            swap_if_there_is_room(engine)
            if "num_gpu_blocks" in settings:  # as few that some are preempted, if all are there
                begin_together(engine, len(asks))
            prepare(engine)
            model = engine.pipeline.stages["execute"].runner  # type: ignore[attr-defined]
            device = engine.pipeline.stages["execute"].device  # type: ignore[attr-defined]
            assert isinstance(model, AsyncModel) == isinstance(device, AsyncDevice) == (streams is not None)
            before = _counts(engine, model, device)  # of the requests that warmed it up
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
            ran.info = engine.info
            counts = [now - then for now, then in zip(_counts(engine, model, device), before, strict=True)]
            ran.num_preemptions, ran.num_attended, ran.num_eager, ran.num_steps, ran.num_gaps = counts
            ran.num_copied = len(counted)
            return ran
    finally:
        await env.aclose()


def _counts(engine: Engine, model: Any, device: Any) -> tuple[int, int, int, int, int]:
    """Preemptions, then attended and eager steps, steps, and gaps of an asynchronous device, so far."""
    num_preemptions = engine.status().core.scheduler.num_preemptions
    if not isinstance(model, AsyncModel):
        return num_preemptions, 0, 0, 0, 0
    line, num_gaps = model.line, device.idle_gaps_us.num_observed
    return num_preemptions, model.num_attended, line.graphs.num_eager, line._num_submitted, num_gaps


def _count_copies(engine: Engine) -> list[int]:
    """The host's blocks that are copied to or from, from now on."""
    work, counted = engine.pipeline.stages["execute"].runner._work, []  # type: ignore[attr-defined]
    host_block = work.host_block

    def count(block: int, kind: int) -> Any:
        counted.append(block)
        return host_block(block, kind)

    work.host_block = count
    return counted


async def _final(engine: Engine, request: Request) -> RequestOutput:
    outbox = await engine.submit(request, wait=True)
    (output,) = [output async for output in read_outputs(outbox, "final")]
    return output


_waited_for: dict[str, Ran] = {}  # the last synchronous device's, for the next test that asks the same


def both(checkpoint: Path, asks: Sequence[Ask], streams: DeviceStreams, **settings: Any) -> tuple[Ran, Ran]:
    """(answers of the synchronous device, answers of the asynchronous one). The former has no steps in flight and no
    graphs, so it runs once for all settings of these."""
    alike = {name: value for name, value in settings.items() if name not in ("steps_in_flight", "enforce_eager")}
    case = repr((checkpoint, asks, alike))
    with captured_logs():
        if case not in _waited_for:
            _waited_for.clear()
            _waited_for[case] = asyncio.run(run(checkpoint, asks, None, **settings))
        return _waited_for[case], asyncio.run(run(checkpoint, asks, streams, **settings))


def greedy(num_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, **more)


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    dice = Random(seed)
    return [[dice.randrange(3, 200) for _ in range(dice.randint(1, longest))] for _ in range(count)]

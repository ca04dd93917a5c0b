"""Recordings for tests: a loaded engine on the scripted device, with preemptions, cancels and shared prefixes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.config import EngineConfig
from millrace.stages.messages import Prompt, Request
from millrace.stages.params import SamplingParams
from millrace.stages.recordings.recorded_engine import RecordedEngine
from millrace.stages.testing.scripted.engine import Script, ScriptedPipeline, scripted_pipeline

ENGINE = RecordedEngine(  # to simulate
    num_blocks=64,
    num_host_blocks=0,
    block_size=4,
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=8,
    steps_in_flight=1,
    enable_chunked_prefill=True,
    enable_prefix_caching=False,
    max_waiting=512,
    scheduler="priority",
    priority_ageing_s=None,
)

TIGHT = EngineConfig(
    max_model_len=96,
    block_size=4,
    num_gpu_blocks=26,
    num_cpu_blocks=16,
    max_num_seqs=8,
    max_num_batched_tokens=48,
    max_unread_tokens=8,
    max_admitted_requests=10_000,
    max_waiting_requests=10_000,
)


def requests(num_requests: int, seed: int = 0, longest: int = 40) -> list[Request]:
    """Prompts that begin alike by families, some of two prompts and of two choices, in two priorities."""
    dice = Random(f"requests/{seed}")
    families = [[dice.randrange(97, 123) for _ in range(longest)] for _ in range(4)]
    made = []
    for number in range(num_requests):
        family = dice.choice(families)[: dice.randrange(longest)]
        prompts = [
            Prompt(token_ids=np.array([*family, *(dice.randrange(97, 123) for _ in range(dice.randrange(1, 9)))], "i4"))
            for _ in range(dice.choice([1, 1, 1, 2]))
        ]
        params = SamplingParams(n=dice.choice([1, 1, 2]), max_tokens=dice.randrange(1, 48), seed=number)
        salt = dice.choice(["", "", "tenant"])
        made.append(Request(f"r{number}", tuple(prompts), params, priority=dice.choice([0, 0, 1]), cache_salt=salt))
    return made


def record(
    path: Path,
    num_requests: int = 40,
    *,
    seed: int = 0,
    config: EngineConfig = TIGHT,
    look: Callable[[ScriptedPipeline], object] | None = None,
    device_s: tuple[float, float] = (0.001, 0.02),
    script: Script | None = None,
) -> ScriptedPipeline:
    """A recording of a simulated run; the pipeline as it was left. `look` is called after each
    call of schedule and allocate; each phase of a step takes `device_s`, from and to."""

    async def live(env: SimEnv) -> ScriptedPipeline:
        parts = scripted_pipeline(config, script, env)
        recorder = parts.core.record(path, config, env)
        if look is not None:
            _look_after_each_call(parts, look)
        dice = Random(f"clients/{seed}")
        async with parts.pipeline:
            clients = [
                asyncio.create_task(_ask(parts, request, dice.random(), dice.choice([None, None, 3, 0]), env))
                for request in requests(num_requests, seed)
            ]
            await asyncio.gather(*clients)
            await env.sleep(1.0)
            parts.allocate.reset_prefix_cache()
        await recorder.aclose()
        return parts

    return run(live, seed=seed, worker_delay_s={"device": device_s}, max_callbacks=10**8).value


async def _ask(parts: ScriptedPipeline, request: Request, share: float, leaves_after: int | None, env: SimEnv) -> None:
    """Comes at a `share` of a second of each forty; reads all, or leaves after so many pieces of text."""
    await env.sleep(share * int(request.request_id[1:]) / 40)
    outbox = await parts.pipeline.submit(request)
    num_read = 0
    async for _ in outbox:
        num_read += 1
        if leaves_after is not None and num_read > leaves_after:
            parts.pipeline.cancel(request.request_id, "disconnect")


def _look_after_each_call(parts: ScriptedPipeline, look: Callable[[ScriptedPipeline], object]) -> None:
    log = parts.schedule.call_log
    assert log is not None
    tell_schedule, tell_allocate = log.schedule, log.allocate

    def schedule(*told: Any) -> None:
        tell_schedule(*told)
        look(parts)

    def allocate(*told: Any) -> None:
        tell_allocate(*told)
        look(parts)

    log.schedule, log.allocate = schedule, allocate  # type: ignore[method-assign]


def spoil(told: Any, dice: Random) -> None:
    """Changes one value of a line that was read, wherever."""
    while True:
        key = dice.choice(list(told) if isinstance(told, dict) else range(len(told)))
        if not isinstance(told[key], (dict, list)) or not told[key] or dice.random() < 0.2:
            break
        told = told[key]
    told[key] = dice.choice([None, -1, 0, 7, 2**40, 1.5, "x", "", [], {}, [[]], True, [1, 2, 3], {"step": 1}])

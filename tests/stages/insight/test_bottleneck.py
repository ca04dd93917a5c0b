"""Whether the sentence about a pipeline, and the causes of a request's latency, name what was staged."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.trace.tracer import request_names
from millrace.stages import SamplingParams
from millrace.stages.insight.bottleneck import Bottleneck, bottleneck
from millrace.stages.insight.causes import causes, in_words
from millrace.stages.insight.trace_view import TraceView
from millrace.stages.insight.waterfall import waterfall
from millrace.stages.testing.scripted.engine import Script, ScriptedEngine, scripted_engine

NEVER_ENDS = Script(eos_probability=0.0)
STEP_S = (0.0005, 0.0005)
TIGHT = {"num_gpu_blocks": 34, "max_num_seqs": 12, "block_size": 8, "max_model_len": 256}

staged = sim_test(seeds=1, policies=("fifo",), thread_delay_s=STEP_S)


def engine_of(env: SimEnv, **config: Any) -> ScriptedEngine:
    return scripted_engine(script=NEVER_ENDS, env=env, **config)


async def ask(engine: ScriptedEngine, num_prompt: int, max_tokens: int, name: str = "", delay_s: float = 0.0) -> None:
    await asyncio.sleep(delay_s)
    params = SamplingParams(max_tokens=max_tokens)
    prompt = [3 + len(name) % 7] * num_prompt
    async for _ in engine.generate(prompt, params, request_id=name or None):
        pass


def view_of(engine: ScriptedEngine) -> TraceView:
    return TraceView(engine.pipeline.tracer.read_all(), engine.pipeline.tracer.names())


def look(engine: ScriptedEngine, window_s: float) -> Bottleneck:
    assert engine.pipeline.watch is not None
    engine.pipeline.watch.write_stage_times()  # as its timer does, which does not run in virtual time
    return bottleneck(view_of(engine), engine.pipeline.env.now_ns(), window_s)


async def limit_of(engine: ScriptedEngine, asked: list[Any], after_s: float = 0.1) -> Bottleneck:
    """What limits the pipeline `after_s` after these requests came."""
    assert engine.pipeline.watch is not None
    engine.pipeline.watch.write_stage_times()
    tasks = [asyncio.ensure_future(one) for one in asked]
    await asyncio.sleep(after_s)
    found = look(engine, after_s)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


def causes_of(engine: ScriptedEngine, name: str) -> tuple[str, str]:
    """The first cause of a request's latency, and the sentence."""
    view = view_of(engine)
    (number,) = (number for number, told in request_names(view.records).items() if told == name)
    fall = waterfall(view, number)
    assert fall is not None
    found = causes(view, fall)
    assert sum(cause.ns for cause in found) == fall.end_ns - fall.begin_ns
    return found[0].name, in_words(fall, found)


# -- what limits the pipeline


@staged
async def test_a_pipeline_of_which_nothing_was_asked_is_idle(env: SimEnv):
    async with engine_of(env) as engine:
        assert (await limit_of(engine, [])).situation == "idle"
        await ask(engine, 5, 3)
        look(engine, 0.5)
        await asyncio.sleep(1.0)
        assert look(engine, 0.5).situation == "idle"


@staged
async def test_kv_memory_that_is_full_is_named(env: SimEnv):
    async with engine_of(env, **TIGHT) as engine:
        found = await limit_of(engine, [ask(engine, 40, 100, "x" * number) for number in range(1, 12)])
    assert (found.situation, found.stage) == ("kv full", "allocate") and "blocks" in found.sentence


@staged
async def test_slots_that_are_all_taken_are_named(env: SimEnv):
    async with engine_of(env, max_num_seqs=2) as engine:
        found = await limit_of(engine, [ask(engine, 5, 200) for _ in range(9)])
    assert found.situation == "slots full" and "7 sequences wait while 2 run" in found.sentence


@sim_test(seeds=1, policies=("fifo",), thread_delay_s=STEP_S, worker_delay_s={"tokenize": (0.02, 0.02)})
async def test_a_slow_tokenizer_is_named(env: SimEnv):
    async def ask_text(engine: ScriptedEngine) -> None:
        async for _ in engine.generate("long " * 50, SamplingParams(max_tokens=1)):
            pass

    async with engine_of(env) as engine:
        found = await limit_of(engine, [ask_text(engine) for _ in range(30)])
    assert (found.situation, found.stage) == ("tokenizer", "tokenize")


@staged
async def test_clients_that_do_not_read_are_named(env: SimEnv):
    async with engine_of(env, max_unread_tokens=4) as engine:
        readers = [engine.generate([3, 4, number], SamplingParams(max_tokens=300)) for number in range(5)]
        await asyncio.gather(*(anext(reader) for reader in readers))
        found = await limit_of(engine, [], after_s=0.5)
        assert found.situation == "slow client" and "5 sequences are parked" in found.sentence
        for reader in readers:
            await reader.aclose()


@staged
async def test_long_prompts_are_named(env: SimEnv):
    async with engine_of(env, max_num_batched_tokens=32) as engine:
        found = await limit_of(engine, [ask(engine, 400, 2, "x" * number) for number in range(1, 9)])
    assert found.situation == "long prefill"


@staged
async def test_grammars_whose_masks_come_late_are_named(env: SimEnv):
    async with engine_of(env) as engine:
        slow_masks(engine)
        found = await limit_of(engine, [ask(engine, 5, 300) for _ in range(4)])
    assert (found.situation, found.stage) == ("grammar", "sample")


@staged
async def test_a_device_that_is_always_busy_is_named(env: SimEnv):
    async with engine_of(env) as engine:
        found = await limit_of(engine, [ask(engine, 5, 300) for _ in range(4)])
        assert found.situation == "execute" and "4.0 rows" in found.sentence
        look(engine, 0.1)
        await ask(engine, 5, 50)
        await asyncio.sleep(0.3)
        assert look(engine, 0.4).situation == "none"


# -- why a request took long


@staged
async def test_waiting_behind_earlier_prompts_is_called_queue(env: SimEnv):
    async with engine_of(env, max_num_batched_tokens=16, num_gpu_blocks=800) as engine:
        await asyncio.gather(*(ask(engine, 100, 2, "x" * number) for number in range(1, 12)))
        name, sentence = causes_of(engine, "x" * 11)
    assert name == "queue" and "behind earlier requests" in sentence


@staged
async def test_waiting_for_a_slot_is_called_slots(env: SimEnv):
    async with engine_of(env, max_num_seqs=2) as engine:
        await asyncio.gather(*(ask(engine, 5, 100, name) for name in ("a", "b", "late")))
        assert causes_of(engine, "late")[0] == "slots"
        assert causes_of(engine, "a")[0] == "decoding"


@staged
async def test_waiting_for_blocks_is_called_blocks(env: SimEnv):
    async with engine_of(env, **TIGHT) as engine:
        await asyncio.gather(ask(engine, 200, 50, "large"), ask(engine, 150, 4, "late", delay_s=0.003))
        assert causes_of(engine, "late")[0] == "blocks"


@staged
async def test_waiting_on_the_host_is_called_swap_in(env: SimEnv):
    async with engine_of(env, **TIGHT, num_cpu_blocks=200) as engine:
        await asyncio.gather(ask(engine, 100, 150, "first"), ask(engine, 60, 40, "second", delay_s=0.05))
        assert engine.scheduler.preemptions["swap", "blocks"] == 1
        assert causes_of(engine, "second")[0] == "swap-in"


@staged
async def test_steps_that_others_prompts_make_long_are_called_long_prefill(env: SimEnv):
    async with engine_of(env, max_num_batched_tokens=128, num_gpu_blocks=800) as engine:
        cost_by_tokens(engine, lambda num_tokens: 0.0005 + 0.0005 * num_tokens)
        others = [ask(engine, 400, 1, "x" * number, delay_s=0.02 + 0.02 * number) for number in range(1, 6)]
        await asyncio.gather(ask(engine, 5, 60, "victim"), *others)
        name, sentence = causes_of(engine, "victim")
    assert name == "long prefill" and "other requests' long prompts" in sentence


@staged
async def test_a_client_that_does_not_read_is_called_slow_client(env: SimEnv):
    async with engine_of(env, max_unread_tokens=8) as engine:
        reader = engine.generate([3, 4, 5], SamplingParams(max_tokens=30), request_id="slow")
        await anext(reader)
        await asyncio.sleep(2.0)
        async for _ in reader:
            pass
        assert causes_of(engine, "slow")[0] == "slow client"


@staged
async def test_masks_that_come_late_are_called_grammar(env: SimEnv):
    async with engine_of(env) as engine:
        slow_masks(engine)
        cost_by_tokens(engine, lambda num_tokens: 0.0001)
        await ask(engine, 5, 50, "guided")
        assert causes_of(engine, "guided")[0] == "grammar"


# -- staging


def slow_masks(engine: ScriptedEngine) -> None:
    """Sampling reports that it spent most of its half millisecond waiting for masks."""
    sample = engine.model.sample
    sampler = engine.pipeline.stages["sample"].sampler  # type: ignore[attr-defined]
    sampler.sample = lambda grant, logits: replace(sample(grant, logits), grammar_us=450)


def cost_by_tokens(engine: ScriptedEngine, cost: Callable[[int], float]) -> None:
    """A forward pass takes `cost(its tokens)` seconds. A job's time is drawn when it begins."""
    device = engine.pipeline.stages["execute"].device  # type: ignore[attr-defined]
    submit, run_forward, run_sample = device.forward, device._run_forward, device._run_sample
    grants: deque[Any] = deque()  # not done

    def take_on() -> None:
        seconds = cost(int(grants[0].num_tokens.sum()))
        device._worker.delay_s = (seconds, seconds)

    def forward(grant: Any, run: Any) -> Any:
        grants.append(grant)
        if len(grants) == 1:
            take_on()
        return submit(grant, run)

    def forward_run(grant: Any, run: Any) -> Any:
        device._worker.delay_s = STEP_S
        return run_forward(grant, run)

    def sample_run(grant: Any, run: Any) -> Any:
        grants.popleft()
        if grants:
            take_on()
        return run_sample(grant, run)

    device.forward, device._run_forward, device._run_sample = forward, forward_run, sample_run

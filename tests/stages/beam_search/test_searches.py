"""Beam searches in the engine: among other requests, short of memory, and however they end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.stages import LLM, Engine, EngineConfig, SamplingParams
from millrace.stages.errors import Overloaded, Refused, TimedOut
from millrace.stages.outputs import RequestOutput
from millrace.stages.testing.scripted.engine import ScriptedEngine, scripted_engine
from millrace.stages.testing.scripted.script import Script
from tests.model.checkpoints import make_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
ENDLESS = Script(eos_probability=0.0)
PROMPTS = [[7 * i + j for j in range(20 + i)] for i in range(1, 4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("llama", path, num_hidden_layers=2)
    return path


def config(folder: Path, **settings: Any) -> EngineConfig:
    fields = {"max_model_len": 128, "max_num_seqs": 16, "num_gpu_blocks": 200, "device": "cpu", "threads": 1}
    return EngineConfig(model=str(folder), dtype="float32", **{**fields, **settings})


def found(output: RequestOutput) -> list[tuple[list[int], str]]:
    return [(one.token_ids, one.text) for one in output.outputs]


# -- with a model


@pytest.mark.slow
def test_a_search_finds_the_same_among_others_without_memory_and_without_the_cache(checkpoint: Path):
    """The pool of the tight engine holds one longest sequence and little more, so sequences are preempted."""

    async def search(engine: Engine, prompt: list[int]) -> list[tuple[list[int], str]]:
        return found(await engine.beam_search(prompt, 4, 10))

    async def others(engine: Engine) -> list[list[int]]:
        async def one(number: int) -> list[int]:
            prompt = [number + 9] * (5 + 7 * number)
            (output,) = [o async for o in engine.generate(prompt, GREEDY, output_kind="final")]
            return output.outputs[0].token_ids

        return list(await asyncio.gather(*map(one, range(6))))

    async def run(**settings: Any) -> tuple[Any, Any, int]:
        async with Engine(config(checkpoint, **settings)) as engine:
            made = await asyncio.gather(*(search(engine, prompt) for prompt in PROMPTS), others(engine))
            return made[:-1], made[-1], engine.status().core.scheduler.num_preemptions

    async def alone() -> list[Any]:
        async with Engine(config(checkpoint)) as engine:
            return [await search(engine, prompt) for prompt in PROMPTS]

    expected = asyncio.run(alone())
    roomy = asyncio.run(run())
    tight = asyncio.run(run(num_gpu_blocks=9, num_cpu_blocks=4))
    uncached = asyncio.run(run(enable_prefix_caching=False, max_num_seqs=3))
    assert roomy[0] == tight[0] == uncached[0] == expected
    assert roomy[1] == tight[1] == uncached[1]
    assert roomy[2] == 0 < tight[2]


@pytest.mark.slow
def test_eight_beams_on_a_long_prompt_hold_little_more_than_its_blocks(tmp_path: Path):
    make_checkpoint("qwen2", tmp_path, num_hidden_layers=1)
    peaks = {"used": 0, "shared": 0, "beams": 0}

    async def run() -> RequestOutput:
        async with Engine(
            config(tmp_path, max_model_len=1100, max_num_batched_tokens=8192, num_gpu_blocks=600)
        ) as engine:
            asking = asyncio.ensure_future(engine.beam_search([5 + i % 600 for i in range(1000)], 8, 20))
            while not asking.done():
                pool = engine.core.stages.allocate.allocator.pool
                peaks["used"] = max(peaks["used"], pool.num_in_use)
                peaks["shared"] = max(peaks["shared"], pool.num_shared)
                peaks["beams"] = max(peaks["beams"], engine.status().core.scheduler.num_running)
                await asyncio.sleep(0)
            return await asking

    output = asyncio.run(run())
    assert (len(output.outputs), output.num_prompt_tokens) == (8, 1000)
    assert peaks["beams"] == 8
    assert peaks["shared"] >= 62, "all full blocks of the prompt"
    assert peaks["used"] <= 62 + 8 * 3, "and of each beam those that its own tokens are in: 504 without sharing"


@pytest.mark.slow
def test_the_offline_interface_searches_for_a_list_of_prompts_with_text_and_logprobs(checkpoint: Path):
    with LLM(config=config(checkpoint)) as llm:
        params = SamplingParams(temperature=0.0, logprobs=3, ignore_eos=True)
        first, second = llm.beam_search(["Once upon", [5, 6, 7]], 3, 6, params=params, use_tqdm=False)
        assert (first.prompt, second.prompt_token_ids) == ("Once upon", [5, 6, 7])
        for output in (first, second):
            assert len(output.outputs) == 3 and output.finished
            scores = [one.score for one in output.outputs]
            assert scores == sorted(scores, reverse=True)
            for one in output.outputs:
                assert one.logprobs is not None and "".join(entry.token for entry in one.logprobs) == one.text
                assert one.text == llm.engine.decode(one.token_ids)
                assert sum(entry.logprob for entry in one.logprobs) / 6 == pytest.approx(one.score, rel=1e-5)
                assert all(len(entry.top) == 3 for entry in one.logprobs)
        text = second.outputs[0].text
        stop = text[len(text) // 2 :][:2]
        params = SamplingParams(temperature=0.0, stop=(stop,), ignore_eos=True)
        (stopped,) = llm.beam_search([[5, 6, 7]], 3, 6, params=params, use_tqdm=False)
        ended = [one for one in stopped.outputs if one.finish_reason == "stop"]
        assert ended and all(one.stop_reason == stop for one in ended)
        for one in stopped.outputs:
            assert stop not in one.text
            assert (stop in llm.engine.decode(one.token_ids)) == (one.finish_reason == "stop")


# -- with a scripted device


def with_engine(work: Any, **settings: Any) -> Any:
    async def run() -> Any:
        async with scripted_engine(script=ENDLESS, **settings) as engine:
            made = await work(engine)
            await engine.check_quiet()
            await engine.parts.searches.wait_until_over()
            return made

    return asyncio.run(run())


async def until_under_way(engine: ScriptedEngine, num_steps: int = 3) -> None:
    """A search has come so far."""
    while not any(request_id.endswith(f".{num_steps}") for request_id in engine.parts.exit.live):  # noqa: ASYNC110
        await asyncio.sleep(0)


async def outcome(asking: Awaitable[Any]) -> Any:
    try:
        return await asking
    except (TimedOut, Overloaded, Refused) as error:
        return error


def test_cancelling_its_caller_ends_a_search_and_the_step_it_is_at():
    async def work(engine: ScriptedEngine) -> None:
        asking = asyncio.ensure_future(engine.beam_search("a", 3, 400))
        await until_under_way(engine)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    with_engine(work)


def test_a_search_can_be_aborted_by_its_id_and_then_has_no_answers():
    async def work(engine: ScriptedEngine) -> RequestOutput:
        asking = asyncio.ensure_future(engine.beam_search("a", 3, 400, request_id="mine"))
        await until_under_way(engine)
        assert engine.abort("mine")
        return await asking

    output = with_engine(work)
    assert [(one.text, one.finish_reason) for one in output.outputs] == [("", "abort")] * 3


def test_the_deadline_is_that_of_the_whole_search():
    async def work(engine: ScriptedEngine) -> Any:
        return await outcome(engine.beam_search("a", 2, 500, timeout_s=0.05))

    assert isinstance(with_engine(work, step_s=0.002), TimedOut)


def test_draining_waits_for_a_search_and_stopping_does_not():
    async def drained(engine: ScriptedEngine) -> RequestOutput:
        asking = asyncio.ensure_future(engine.beam_search("a", 2, 20))
        await until_under_way(engine)
        assert await engine.drain()
        return await asking

    assert [one.finish_reason for one in with_engine(drained).outputs] == ["length"] * 2

    async def stopped() -> RequestOutput:
        async with scripted_engine(script=ENDLESS) as engine:
            asking = asyncio.ensure_future(engine.beam_search("a", 2, 400))
            await until_under_way(engine)
        return await asking

    assert [one.finish_reason for one in asyncio.run(stopped()).outputs] == ["abort"] * 2


def test_the_door_counts_a_search_once_and_never_turns_it_away_halfway():
    async def work(engine: ScriptedEngine) -> tuple[RequestOutput, list[Any]]:
        asking = asyncio.ensure_future(engine.beam_search("a", 3, 30))
        await until_under_way(engine)
        assert engine.parts.intake.admission.num_admitted == 1
        params = SamplingParams(max_tokens=400, temperature=0.0)
        more = [outcome(anext(engine.generate("b", params, output_kind="final"))) for _ in range(3)]
        tasks = [asyncio.ensure_future(one) for one in more]
        output = await asking
        return output, await asyncio.gather(*tasks)

    output, others = with_engine(work, max_admitted_requests=2)
    assert len(output.outputs[0].token_ids) == 30
    assert sum(isinstance(other, Overloaded) for other in others) == 2


@sim_test(seeds=8)
async def test_the_steps_of_a_search_keep_its_place_in_the_line(env: SimEnv):
    """With two slots, at most two later requests are admitted between two steps of the search."""
    ended: list[str] = []

    async def ask(name: str, asking: Awaitable[Any]) -> None:
        await asking
        ended.append(name)

    async with scripted_engine(script=ENDLESS, env=env, max_num_seqs=2) as engine:
        searching = asyncio.create_task(ask("search", engine.beam_search("a", 2, 8)))
        while not any(request_id.endswith(".1") for request_id in engine.parts.exit.live):
            await env.sleep(1e-4)
        params = SamplingParams(max_tokens=6, temperature=0.0)

        async def read(prompt: str) -> None:
            async for _ in engine.generate(prompt, params, output_kind="final"):
                pass

        others = [read(str(i)) for i in range(40)]
        await asyncio.gather(searching, *(ask("other", other) for other in others))
        await engine.check_quiet()
    assert ended.index("search") <= 2 * 8, ended


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"width": 65}, "width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 512}, "prompt"),
        ({"params": SamplingParams(temperature=1.0)}, "temperature"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [999]}, "prompt"),
    ],
)
def test_an_unsupported_search_is_refused(options, param):
    async def work(engine: ScriptedEngine) -> Any:
        return await outcome(engine.beam_search(**{"prompt": "abc", "width": 2, **options}))

    refused = with_engine(work)
    assert isinstance(refused, Refused) and refused.param == param


def test_an_id_that_is_in_use_is_refused_and_the_first_search_goes_on():
    async def work(engine: ScriptedEngine) -> tuple[Any, Any]:
        first = asyncio.ensure_future(engine.beam_search("a", 2, 9, request_id="same"))
        await until_under_way(engine)
        return await outcome(engine.beam_search("a", 2, 9, request_id="same")), await first

    second, first = with_engine(work)
    assert isinstance(second, Refused) and second.param == "request_id"
    assert [len(one.token_ids) for one in first.outputs] == [9, 9]


def test_a_search_goes_on_beside_a_request_with_the_id_of_one_of_its_steps():
    async def work(engine: ScriptedEngine) -> list[int]:
        other = asyncio.ensure_future(anext(engine.generate("b", GREEDY, output_kind="final", request_id="s/0.2")))
        while "s/0.2" not in engine.parts.exit.live:  # noqa: ASYNC110
            await asyncio.sleep(0)
        output = await engine.beam_search("a", 2, 9, request_id="s")
        assert not other.done() and len((await other).outputs[0].token_ids) == GREEDY.max_tokens
        return [len(one.token_ids) for one in output.outputs]

    assert with_engine(work, step_s=0.0005) == [9, 9]


def test_what_fails_in_a_step_fails_the_search_and_leaves_nothing():
    async def work(engine: ScriptedEngine) -> Any:
        asking = asyncio.ensure_future(engine.beam_search("a", 2, 50))
        await until_under_way(engine)
        step_id = next(request_id for request_id in engine.parts.exit.live if "/" in request_id)
        engine.parts.exit.fail(step_id, Overloaded("full", queue_depth=1, estimated_wait_s=1.0))
        return await outcome(asking)

    assert isinstance(with_engine(work), Overloaded)

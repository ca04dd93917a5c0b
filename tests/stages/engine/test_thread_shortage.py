"""An engine on a system that allows no further thread: refused at once with the cause, or served with what there is."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from millrace.runtime.env.log import captured_logs
from millrace.runtime.processes import helper_pool
from millrace.runtime.workers.thread_start import ThreadNotStarted
from millrace.stages.engine.llm import LLM
from millrace.stages.errors import OutOfResources
from millrace.stages.outputs import RequestOutput
from millrace.stages.params import SamplingParams
from millrace.stages.structured_outputs import StructuredOutputs
from millrace.stages.testing.scripted.engine import ScriptedEngine, scripted_engine

LONG = "Once upon a time " * 20  # is tokenized in a thread
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`allow(n)`: n more threads can be started."""
    start, left = threading.Thread.start, [1_000]

    def counted(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)

    def set_left(count: int) -> None:
        left[0] = count

    return set_left


def run(test: Callable[[ScriptedEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        async with scripted_engine() as engine:
            await test(engine)
            await engine.check_quiet()

    asyncio.run(asyncio.wait_for(main(), 100.0))


async def text_of(engine: ScriptedEngine, prompt: str, params: SamplingParams = PARAMS) -> str:
    outputs: list[RequestOutput] = [one async for one in engine.generate(prompt, params, output_kind="final")]
    return outputs[-1].outputs[0].text


@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_without_a_thread_says_so_and_leaves_nothing(allow: Callable[[int], None], is_async: bool) -> None:
    async def main(num_allowed: int) -> bool:
        engine = scripted_engine(is_async=is_async)
        allow(num_allowed)
        try:
            await asyncio.wait_for(engine.start(), 60.0)
        except ThreadNotStarted as error:
            assert "millrace-" in str(error)
            return False
        finally:
            allow(1_000)
            await engine.stop()
        return True

    before = set(threading.enumerate())
    started = [asyncio.run(asyncio.wait_for(main(count), 100.0)) for count in range(4)]
    assert started == [False, not is_async, not is_async, True], "one thread, or those of steps, results and the check"
    assert set(threading.enumerate()) == before


def test_a_long_prompt_without_a_thread_fails_alone_and_the_next_one_is_served(allow: Callable[[int], None]) -> None:
    async def test(engine: ScriptedEngine) -> None:
        streams = [asyncio.ensure_future(text_of(engine, f"short {number}")) for number in range(4)]
        allow(0)
        for _ in range(8):  # more than the restarts that a stage has
            with pytest.raises(OutOfResources, match="could not start a thread for this request") as refused:
                await text_of(engine, LONG)
            assert (refused.value.status, refused.value.code) == (503, "out_of_resources")
        assert all(await asyncio.gather(*streams))
        allow(1)
        assert len(await text_of(engine, LONG)) == 4
        assert all(runner.num_restarts == 0 for runner in engine.pipeline.runners.values())

    run(test)


def test_a_grammar_without_a_thread_or_a_process_fails_alone(
    allow: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    structured = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(regex="[ab]{3}"))

    async def no_process(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    async def test(engine: ScriptedEngine) -> None:
        allow(0)
        with pytest.raises(OutOfResources, match="could not start a thread"):
            await text_of(engine, "a", structured)
        allow(1_000)
        monkeypatch.setattr(helper_pool.asyncio, "create_subprocess_exec", no_process)
        for _ in range(2):
            with pytest.raises(OutOfResources, match="could not start a process"):
                await text_of(engine, "a", structured)
        assert "grammar.trial_failed" not in {event["event"] for event in events}, "the cause is no bug"
        gate = engine.parts.gate
        assert not gate.num_waiting and not gate._trials and not gate._held and not gate.helper_pids

    with captured_logs() as events:
        run(test)
    assert [event["event"] for event in events].count("grammar.not_tried") == 3


def test_a_blocking_api_without_a_thread_closes_its_loop(allow: Callable[[int], None]) -> None:
    allow(0)
    with pytest.raises(ThreadNotStarted, match="millrace-llm"):
        LLM()

"""A split engine from Python, with the bundled model: the failures it survives, and its errors for the others."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from millrace.runtime.health.flight_recorder import stack_of
from millrace.runtime.health.stalls import find_stall
from millrace.runtime.pipeline import NotServing
from millrace.stages.config import EngineConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.errors import ConfigError, RequestError
from millrace.stages.params import SamplingParams
from millrace.stages.split import engine_core, process_keeper, remote_core
from millrace.stages.split.split_engine import SplitEngine
from tests.stages.split.test_split import is_idle

pytestmark = pytest.mark.slow
CONFIG = EngineConfig(max_num_seqs=4, threads=1, inject=("stage=execute,delay=1ms",))
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)


def run(test: Callable[[SplitEngine], Awaitable[None]], **overrides: Any) -> None:
    async def main() -> None:
        async with SplitEngine(CONFIG, **overrides) as engine:
            await test(engine)
            pid = engine.engine_pid
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    asyncio.run(asyncio.wait_for(main(), 180.0))


async def answer(engine: Engine, prompt: str = "Once upon a time", after: Callable[[], None] = lambda: None) -> str:
    """The whole text; `after` is called when a few tokens have come."""
    text, count = "", 0
    async for output in engine.generate(prompt, GREEDY):
        text += output.outputs[0].text
        count += 1
        if count == 5:
            after()
    return text


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.01)


def strike(engine: SplitEngine, number: int) -> None:
    assert engine.engine_pid is not None
    os.kill(engine.engine_pid, number)


def test_an_engine_process_that_hangs_is_replaced_and_answers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(engine: SplitEngine) -> None:
        monkeypatch.setattr(engine_core, "HANG_S", 1)
        strike(engine, signal.SIGSTOP)

    async def be_patient_again(engine: SplitEngine) -> None:
        """A busy machine may hold up the successor for a second too."""
        await until(lambda: engine.num_deaths == 1)
        monkeypatch.undo()

    async def test(engine: SplitEngine) -> None:
        due, pid = await answer(engine), engine.engine_pid
        patience = asyncio.ensure_future(be_patient_again(engine))
        assert await answer(engine, after=lambda: hang(engine)) == due
        assert engine.engine_pid != pid and engine.health.is_ready and patience.done()

    run(test)


def test_an_engine_process_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(engine: SplitEngine) -> None:
        strike(engine, signal.SIGSTOP)
        monkeypatch.setattr(engine_core, "STOP_S", 300.0)
        began_s = asyncio.get_running_loop().time()
        await engine.stop()
        assert asyncio.get_running_loop().time() - began_s < 60.0

    run(test)


def test_a_foreign_frame_costs_the_engine_process_and_no_answer() -> None:
    async def test(engine: SplitEngine) -> None:
        due, pid = await answer(engine), engine.engine_pid

        def disturb() -> None:
            client = engine.core.processes.cores[0].client
            assert client is not None and client._child is not None
            client._child.sock.send(b"\x80\x04\x95 this is no frame of ours")

        assert await answer(engine, after=disturb) == due
        assert engine.engine_pid != pid

    run(test)


def test_many_answers_at_once_survive_several_deaths_and_none_has_a_token_twice() -> None:
    async def test(engine: SplitEngine) -> None:
        prompts = [f"{word} and" for word in ("Zoe", "Tom", "A cat", "The sea", "One", "Two", "Three")]
        due = await asyncio.gather(*(answer(engine, prompt) for prompt in prompts))
        under_way = [asyncio.ensure_future(answer(engine, prompt)) for prompt in prompts]
        await asyncio.sleep(0.03)
        strike(engine, signal.SIGKILL)
        assert await asyncio.gather(*under_way) == due
        await engine.refresh()
        assert is_idle(engine) and not engine.exit.live

    run(test)


def test_when_engine_processes_keep_dying_every_request_is_told_and_health_says_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_keeper, "MAX_DEATHS", 1)

    async def test(engine: SplitEngine) -> None:
        strike(engine, signal.SIGKILL)
        await until(lambda: not engine.health.is_ready)
        assert engine.health.stage == "engine" and "signal 9" in str(engine.health.reason)
        with pytest.raises(NotServing, match="another is starting"):
            await answer(engine)
        await until(lambda: engine.health.is_ready)
        with pytest.raises(RequestError, match="engine processes keep ending") as told:
            await answer(engine, after=lambda: strike(engine, signal.SIGKILL))
        assert (told.value.status, told.value.code) == (503, "dead")
        assert engine.health.state == "dead"

    run(test)


def test_a_request_that_cannot_be_sent_fails_alone() -> None:
    async def test(engine: SplitEngine) -> None:
        params: Any = SamplingParams(max_tokens=3, extra_args={"it": object()})
        with pytest.raises(RequestError, match="cannot be sent to the engine process"):
            async for _ in engine.generate("a", params):
                pass
        assert await answer(engine)

    run(test)


def test_cancels_and_deadlines_free_what_the_engine_process_held() -> None:
    async def test(engine: SplitEngine) -> None:
        long = SamplingParams(max_tokens=1500, temperature=0.0, ignore_eos=True)
        stream = engine.generate("a", long)
        await anext(stream)
        await stream.aclose()
        with pytest.raises(RequestError, match="the request ran out of time at execute: its answer was not complete"):
            async for _ in engine.generate("b", long, timeout_s=0.2):
                pass

        async def is_free() -> bool:
            await engine.refresh()
            return is_idle(engine)

        while not await is_free():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.01)

    run(test)


def test_sequences_are_swapped_and_come_back_as_in_one_process() -> None:
    prompts = [f"{word} went" for word in ("Zoe", "Tom", "A cat", "The sea")]
    small: dict[str, Any] = {"num_gpu_blocks": 9, "max_model_len": 128, "num_cpu_blocks": 16, "inject": ()}
    due: list[str] = []

    async def inline() -> None:
        async with Engine(CONFIG, **small) as engine:
            due.extend(await asyncio.gather(*(answer(engine, prompt) for prompt in prompts)))
            assert engine.status().core.scheduler.num_preemptions > 0

    async def test(engine: SplitEngine) -> None:
        assert await asyncio.gather(*(answer(engine, prompt) for prompt in prompts)) == due
        await engine.refresh(with_blocks=True)
        core = engine.status(with_blocks=True).core
        assert core is not None and core.cache.host is not None and core.cache.blocks is not None
        assert core.scheduler.num_preemptions == sum(core.scheduler.preemptions.values()) > 0
        assert core.cache.host.pool.num_blocks == 16
        assert is_idle(engine) and (core.cache.blocks.num_tables == 0).all()

    asyncio.run(inline())
    run(test, **small)


def test_a_stage_that_fails_over_there_is_told_of_here_and_the_guilty_request_ends() -> None:
    async def test(engine: SplitEngine) -> None:
        told: list[tuple[str, str, bool]] = []
        engine.pipeline.on_crash.append(lambda stage, e, ids: told.append((stage, type(e).__name__, bool(stack_of(e)))))
        with pytest.raises(RequestError, match="the model failed on this request"):
            await answer(engine)
        await engine.refresh()
        assert set(told) == {("execute", "InjectedError", True)}
        assert engine.status().pipeline.stages["execute"].num_restarts == len(told) >= 2 and engine.health.is_ready

    run(test, inject=("stage=execute,error",))


def test_a_stage_that_stands_still_over_there_is_found_from_here_with_where_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote_core, "SUSPECT_S", 0.2)

    async def test(engine: SplitEngine) -> None:
        asking = asyncio.ensure_future(answer(engine))
        await until(lambda: bool(engine.pipeline.stacks_elsewhere))
        stall = find_stall(engine.pipeline, 0.2)
        assert stall is not None and stall.name == "execute"
        stacks = {told.get("task"): told["stack"] for told in engine.pipeline.stacks_elsewhere}
        assert "strike" in " ".join(stacks["execute"])
        asking.cancel()

    run(test, inject=("stage=execute,freeze",))


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ('{"model_type": "bert", "architectures": ["BertModel"]}', "mode = split: must be inline for an encoder model"),
        (None, "max_model_len = 1: must be at least 2"),
    ],
)
def test_what_cannot_be_served_is_reported_as_inline(tmp_path: Path, config: str | None, complaint: str) -> None:
    options: dict[str, Any] = {"max_model_len": 1}
    if config is not None:
        (tmp_path / "config.json").write_text(config)
        options = {"model": str(tmp_path)}

    async def main() -> None:
        with pytest.raises(ConfigError, match=complaint):
            await SplitEngine(EngineConfig(**options)).start()

    asyncio.run(asyncio.wait_for(main(), 180.0))

"""What the runner promises a stage that takes its items one by one: forms of functions, concurrency, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from millrace.runtime.crash_recovery import StageCrashed
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.stage import Outlet, Stage, stage
from tests.runtime.flows import Slow, Word, line, outcome


@sim_test(seeds=6)
async def test_a_function_may_return_await_yield_or_swallow(env: SimEnv) -> None:
    @stage
    def returns(word: Word) -> Word:
        return Word(word.request_id, word.text + "r")

    @stage
    async def awaits(word: Word) -> Word | None:
        await env.sleep(0.01)
        return None if word.text.startswith("gone") else Word(word.request_id, word.text + "a")

    @stage
    async def yields(word: Word) -> AsyncIterator[Word]:
        yield Word(word.request_id, word.text + "y", is_last=False)
        yield Word(word.request_id, word.text + "z")

    async with line(returns, awaits, yields, env=env) as pipeline:
        assert await pipeline.call(Word("a", "")) == ["ray", "raz"]
        outbox = await pipeline.submit(Word("b", "gone"))
        await env.sleep(1.0)
        assert pipeline.exit is not None and pipeline.exit.is_live("b")
        assert pipeline.cancel(outbox.request_id)


@sim_test(seeds=6)
async def test_the_work_on_an_item_is_cancelled_with_its_request_and_others_go_on(env: SimEnv) -> None:
    cancelled: list[str] = []

    @stage(concurrency=3)
    async def slow(word: Word) -> Word:
        try:
            await env.sleep(5.0)
        except asyncio.CancelledError:
            cancelled.append(word.text)
            raise
        return word

    async with line(slow, env=env) as pipeline:
        tasks = [asyncio.create_task(pipeline.call(Word(name, name))) for name in "abc"]
        await env.sleep(1.0)
        pipeline.cancel("b", "disconnect")
        await env.sleep(0.01)
        assert cancelled == ["b"]
        assert await tasks[0] == ["a"] and await tasks[1] == [] and await tasks[2] == ["c"]


@sim_test(seeds=6)
async def test_concurrency_is_a_limit_and_one_keeps_the_order(env: SimEnv) -> None:
    at_once: list[int] = []
    order: list[str] = []

    def make(limit: int) -> Any:
        running = 0

        @stage(name="work", concurrency=limit)
        async def work(word: Word) -> Word:
            nonlocal running
            running += 1
            at_once.append(running)
            await env.sleep(env.random("work").uniform(0.1, 1.0))
            running -= 1
            order.append(word.text)
            return word

        return work

    for limit in (1, 2):
        at_once.clear()
        order.clear()
        async with line(make(limit), env=env, capacity=8) as pipeline:
            outboxes = [await pipeline.submit(Word(str(i), str(i))) for i in range(6)]
            for outbox in outboxes:
                assert [event async for event in outbox] == [outbox.request_id]
        assert max(at_once) == limit
        if limit == 1:
            assert order == [str(i) for i in range(6)]


@sim_test(seeds=6)
async def test_a_crash_among_items_at_once_hits_one_request(env: SimEnv) -> None:
    @stage(concurrency=4)
    async def work(word: Word) -> Word:
        await env.sleep(0.1)
        if word.text == "poison":
            raise LookupError
        await env.sleep(0.1)
        return word

    async with line(work, env=env) as pipeline:
        words = [Word(name, "poison" if name == "b" else name) for name in "abcd"]
        answers = await asyncio.gather(*(outcome(pipeline, word) for word in words))
        assert [answers[i] for i in (0, 2, 3)] == [["a"], ["c"], ["d"]] and isinstance(answers[1], StageCrashed)


@sim_test(seeds=3)
async def test_a_function_may_raise_as_often_as_it_likes(env: SimEnv) -> None:
    @stage
    def strict(word: Word) -> Word:
        if word.text == "bad":
            raise LookupError(word.text)
        return word

    async with line(strict, env=env) as pipeline:
        for i in range(20):
            answer = await outcome(pipeline, Word(str(i), "bad" if i % 4 else "good"))
            assert isinstance(answer, StageCrashed) if i % 4 else answer == ["good"]
        assert pipeline.health.is_ready and pipeline.runners["strict"].num_restarts == 0


@sim_test(seeds=6)
async def test_a_stage_is_blocked_while_all_its_items_wait_for_room(env: SimEnv) -> None:
    @stage(concurrency=3)
    async def quick(word: Word) -> Word:
        return word

    async with line(quick, Slow(env, 10.0), env=env, capacity=1) as pipeline:
        began_s = env.now()
        await asyncio.gather(*(pipeline.call(Word(str(i), str(i))) for i in range(6)))
        times = pipeline.runners["quick"].times
        assert times.busy == pytest.approx(0.0, abs=1e-6) and 10.0 < times.blocked < env.now() - began_s
        assert times.idle + times.busy + times.blocked == pytest.approx(env.now() - began_s)


@sim_test(seeds=6)
async def test_items_at_once_count_as_busy_once(env: SimEnv) -> None:
    @stage(concurrency=3)
    async def slow(word: Word) -> Word:
        await env.sleep(5.0)
        return word

    async with line(slow, env=env) as pipeline:
        began_s = env.now()
        await asyncio.gather(*(pipeline.call(Word(str(i), str(i))) for i in range(3)))
        await env.sleep(2.0)
        times = pipeline.runners["slow"].times
        assert (times.busy, times.blocked) == (pytest.approx(5.0, abs=0.1), 0.0)
        assert times.idle + times.busy == pytest.approx(env.now() - began_s)


@sim_test(seeds=6)
async def test_stopping_in_the_middle_of_items_leaves_no_task_and_tears_down_after_them(env: SimEnv) -> None:
    told: list[str] = []

    class Careful(Stage[Word, Word]):
        concurrency = 2  # type: ignore[assignment]

        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            try:
                await env.sleep(100.0)
            finally:
                await env.sleep(0.1)
                told.append("item over")

        async def teardown(self) -> None:
            told.append("teardown")

    pipeline = line(Careful(), env=env)
    await pipeline.start()
    tasks = [asyncio.create_task(pipeline.call(Word(name, name))) for name in "ab"]
    await env.sleep(1.0)
    await pipeline.stop()
    assert [await task for task in tasks] == [[], []]
    assert told == ["item over", "item over", "teardown"]

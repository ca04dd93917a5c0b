"""What the runner promises every stage: batches, delivery, back-pressure, items that fail or are answered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from millrace.runtime.crash_recovery import StageCrashed
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.stage import Context, Outlet, Stage
from tests.runtime.flows import Pass, Slow, Word, line, outcome


@sim_test(seeds=6)
async def test_a_stage_gets_everything_that_waits_as_one_batch(env: SimEnv) -> None:
    slow = Slow(env)
    async with line(slow, env=env) as pipeline:
        first = asyncio.create_task(pipeline.call(Word("0", "0")))
        await env.sleep(0.5)
        rest = [asyncio.create_task(pipeline.call(Word(name, name))) for name in "123"]
        await asyncio.gather(first, *rest)
        assert slow.batches[0] == ["0"] and sorted(slow.batches[1]) == ["1", "2", "3"] and len(slow.batches) == 2
        times = pipeline.runners["slow"].times
        assert times.busy == pytest.approx(2.0) and times.idle == pytest.approx(0.0, abs=1e-9)


@sim_test(seeds=6)
async def test_a_full_channel_holds_the_stage_before_it_back(env: SimEnv) -> None:
    async with line(Pass(), Slow(env, 10.0), env=env, capacity=2) as pipeline:
        tasks = [asyncio.create_task(pipeline.call(Word(str(i), str(i)))) for i in range(12)]
        await env.sleep(5.0)
        assert [pipeline.channels[edge.name].stats().high_water for edge in pipeline.edges] == [2, 0]
        assert sum(not task.done() for task in tasks) == 12
        await asyncio.gather(*tasks)
        assert pipeline.runners["pass"].times.blocked > 5.0


@sim_test(seeds=6)
async def test_a_stage_that_rings_its_own_lane_is_called_with_nothing_when_it_said(env: SimEnv) -> None:
    class Later(Stage[Word, Word]):
        reads_lane = True
        held: Word | None = None

        async def setup(self, context: Context) -> None:
            self.lane = context.lane

        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            self.lane.take()
            if batch:
                (self.held,) = batch
                env.call_at(env.now() + 7.0, self.lane.set)
            elif self.held is not None:
                out.send(self.held)

    async with line(Later(), env=env) as pipeline:
        began = env.now()
        assert await pipeline.call(Word("a", "said")) == ["said"] and env.now() - began == pytest.approx(7.0, abs=0.1)


@sim_test(seeds=3)
async def test_flush_delivers_before_handle_ends(env: SimEnv) -> None:
    class Many(Stage[Word, Word]):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            for word in batch:
                for i in range(5):
                    out.send(Word(word.request_id, str(i), is_last=i == 4))
                    await out.flush()
                    await env.sleep(1.0)

    async with line(Many(), env=env, capacity=1) as pipeline:
        began = env.now()
        assert [round(env.now() - began) async for _ in pipeline.stream(Word("a"))] == [0, 1, 2, 3, 4]


@sim_test(seeds=2)
async def test_sending_to_a_port_that_is_not_there_names_those_that_are(env: SimEnv) -> None:
    class Wrong(Stage[Word, Word]):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            out.send(batch[0], port="left")

    async with line(Wrong(), env=env) as pipeline:
        error = await outcome(pipeline, Word("a"))
        assert isinstance(error, StageCrashed) and "stage wrong has no output left: it has out" in str(error.__cause__)


@sim_test(seeds=2)
async def test_a_stage_without_handle_says_what_to_write(env: SimEnv) -> None:
    class Unwritten(Stage[Word, Word]):
        pass

    async with line(Unwritten(), env=env) as pipeline:
        error = await outcome(pipeline, Word("a"))
        assert "stage unwritten: write handle(batch, out)" in str(error.__cause__)


@sim_test(seeds=6)
async def test_items_of_ended_requests_are_dropped_before_handle_sees_them(env: SimEnv) -> None:
    slow = Slow(env)
    async with line(slow, env=env) as pipeline:
        tasks = [asyncio.create_task(pipeline.call(Word(name, name))) for name in "abc"]
        await env.sleep(0.5)
        in_hand = [word for batch in slow.batches for word in batch]
        pipeline.cancel("b")
        await asyncio.gather(*tasks)
        assert "b" not in in_hand
        handled = sorted(word for batch in slow.batches for word in batch)
        assert handled in (["a", "c"], ["a", "b", "c"])
        assert pipeline.runners["slow"].num_dropped == 3 - len(handled)


@sim_test(seeds=3)
async def test_an_unwanted_port_holds_its_sender_back_until_it_is_wanted_again(env: SimEnv) -> None:
    class Picky(Pass):
        is_open = False

        def wants(self, port: str) -> bool:
            return self.is_open

    picky = Picky()
    async with line(Pass(), picky, env=env, capacity=1) as pipeline:
        tasks = [asyncio.create_task(pipeline.call(Word(str(i), str(i)))) for i in range(4)]
        await env.sleep(1.0)
        times = pipeline.runners["pass"].times
        assert picky.batches == [] and 0.9 < times.blocked <= 1.0  # counted while the send still waits
        picky.is_open = True
        pipeline.runners["picky"]._wakeup.set()
        await asyncio.gather(*tasks)
        assert pipeline.runners["pass"].times.blocked > 0.9


@sim_test(seeds=3)
async def test_an_arrival_that_does_not_wake_is_handled_with_the_next_one_that_does(env: SimEnv) -> None:
    class Sleepy(Pass):
        def wakes(self, port: str) -> bool:
            return self.is_awake

    sleepy = Sleepy()
    sleepy.is_awake = False
    async with line(sleepy, env=env, capacity=4) as pipeline:
        tasks = [asyncio.create_task(pipeline.call(Word("a", "a")))]
        await env.sleep(1.0)
        assert sleepy.batches == []
        sleepy.is_awake = True
        tasks.append(asyncio.create_task(pipeline.call(Word("b", "b"))))
        await asyncio.gather(*tasks)
        assert sleepy.batches == [["a", "b"]]


@sim_test(seeds=6)
async def test_failing_an_item_ends_its_request_and_the_rest_of_the_batch_goes_on(env: SimEnv) -> None:
    class Strict(Stage[Word, Word]):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            for word in batch:
                if word.text == "bad":
                    out.fail(word, ValueError("bad word"))
                else:
                    out.send(word)

    async with line(Strict(), env=env) as pipeline:
        answers = await asyncio.gather(
            *(outcome(pipeline, word) for word in (Word("a", "a"), Word("b", "bad"), Word("c", "c")))
        )
        assert answers[0] == ["a"] and answers[2] == ["c"] and str(answers[1]) == "bad word"
        assert pipeline.runners["strict"].num_restarts == 0


@sim_test(seeds=6)
async def test_a_reply_reaches_the_client_past_the_stages_between(env: SimEnv) -> None:
    class Cache(Stage[Word, Word]):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            for word in batch:
                if word.text == "known":
                    out.reply(Word(word.request_id, "from the cache"))
                else:
                    out.send(word)

    behind = Pass()
    async with line(Cache(), behind, env=env) as pipeline:
        assert await pipeline.call(Word("a", "known")) == ["from the cache"]
        assert await pipeline.call(Word("b", "new")) == ["new"]
        assert behind.batches == [["new"]]

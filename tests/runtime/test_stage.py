"""What the runner promises every stage: batches, delivery, isolation, restarts, cancellation, concurrency."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from millrace.runtime.graph import Port
from millrace.runtime.pipeline import NotServing
from millrace.runtime.runner import MAX_RESTARTS, RESTART_WINDOW_S, StageCrashed
from millrace.runtime.simloop import SimEnv
from millrace.runtime.stage import Crash, Outlet, Stage, stage
from millrace.runtime.testing import sim_test
from tests.runtime.flows import Pass, Word, line


class Poison(Pass):
    """Crashes on words that say so, after it has sent the ones before."""

    async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
        for word in batch:
            out.send(word)
            if word.text.startswith("poison"):
                raise LookupError(word.text)
        self.batches.append([word.text for word in batch])


async def outcome(pipeline: Any, word: Word) -> Any:
    """The answer, or the error that ended the request."""
    try:
        return await pipeline.call(word)
    except Exception as error:
        return error


# -- batches


@sim_test(seeds=6)
async def test_a_stage_gets_everything_that_waits_as_one_batch(env: SimEnv) -> None:
    class Slow(Pass):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            await env.sleep(1.0)
            await super().handle(batch, out)

    slow = Slow()
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
    class Stuck(Pass):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            await env.sleep(10.0)
            await super().handle(batch, out)

    first, stuck = Pass(), Stuck()
    async with line(first, stuck, env=env, capacity=2) as pipeline:
        tasks = [asyncio.create_task(pipeline.call(Word(str(i), str(i)))) for i in range(12)]
        await env.sleep(5.0)
        assert [pipeline.channels[edge.name].stats().high_water for edge in pipeline.edges] == [2, 0]
        assert sum(not task.done() for task in tasks) == 12
        await asyncio.gather(*tasks)
        assert pipeline.runners["pass"].times.blocked > 5.0


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
    class Slow(Pass):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            await env.sleep(1.0)
            await super().handle(batch, out)

    slow = Slow()
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
        assert picky.batches == [] and pipeline.runners["pass"].times.blocked == 0.0  # the send has not returned yet
        picky.is_open = True
        pipeline.runners["picky"]._bell.ring()
        await asyncio.gather(*tasks)
        assert pipeline.runners["pass"].times.blocked > 0.9


@sim_test(seeds=3)
async def test_an_arrival_that_wakes_nobody_is_handled_with_the_next_one_that_does(env: SimEnv) -> None:
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


# -- crashes


@sim_test(seeds=9)
async def test_a_poison_item_ends_its_own_request_and_the_rest_of_the_batch_arrives_once(env: SimEnv) -> None:
    poison = Poison()
    async with line(poison, env=env, capacity=8) as pipeline:
        words = [Word(name, "poison" if name == "c" else name) for name in "abcde"]
        answers = await asyncio.gather(*(outcome(pipeline, word) for word in words))
        assert [answers[i] for i in (0, 1, 3, 4)] == [["a"], ["b"], ["d"], ["e"]]
        assert isinstance(answers[2], StageCrashed) and answers[2].stage == "poison"
        assert str(answers[2]) == "stage poison failed on this request (LookupError)"
        assert pipeline.runners["poison"].num_restarts == 1
        assert (poison.num_setups, poison.num_teardowns) == (2, 1)
        assert await pipeline.call(Word("f", "f")) == ["f"]
        assert pipeline.health.is_ready


@sim_test(seeds=3)
async def test_an_item_that_crashes_only_once_is_carried_by_the_retry(env: SimEnv) -> None:
    class Flaky(Pass):
        has_failed = False

        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            await super().handle(batch, out)
            if not self.has_failed:
                self.has_failed = True
                raise OSError("once")

    async with line(Flaky(), env=env) as pipeline:
        assert await pipeline.call(Word("a", "a")) == ["a"]


@sim_test(seeds=3)
async def test_a_batch_that_had_flushed_is_not_tried_again_as_nothing_may_arrive_twice(env: SimEnv) -> None:
    class Leaky(Pass):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            out.send(Word(batch[0].request_id, "half", is_last=False))
            await out.flush()
            await env.sleep(1.0)
            raise LookupError("after the flush")

    async with line(Leaky(), env=env) as pipeline:
        stream = pipeline.stream(Word("a"))
        assert await anext(stream) == "half"
        with pytest.raises(StageCrashed):
            await anext(stream)


@sim_test(seeds=3)
async def test_a_panic_that_is_no_exception_is_a_crash_like_any_other(env: SimEnv) -> None:
    class PanicException(BaseException):
        """As PyO3 raises for a Rust panic."""

    class Panics(Pass):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            if batch[0].text == "panic":
                raise PanicException("index out of bounds")
            await super().handle(batch, out)

    async with line(Panics(), env=env) as pipeline:
        assert isinstance(await outcome(pipeline, Word("a", "panic")), StageCrashed)
        assert await pipeline.call(Word("b", "b")) == ["b"]


@sim_test(seeds=3)
async def test_a_cancelled_error_that_a_stage_makes_itself_is_a_crash_and_does_not_stop_it(env: SimEnv) -> None:
    class Cancels(Pass):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            if batch[0].text == "cancel":
                raise asyncio.CancelledError
            await super().handle(batch, out)

    async with line(Cancels(), env=env) as pipeline:
        assert isinstance(await outcome(pipeline, Word("a", "cancel")), StageCrashed)
        assert await pipeline.call(Word("b", "b")) == ["b"]


@sim_test(seeds=3)
async def test_more_restarts_than_allowed_in_the_window_end_the_pipeline_with_the_stages_name(env: SimEnv) -> None:
    async with line(Poison(), Pass(), env=env) as pipeline:
        bystander = asyncio.create_task(outcome(pipeline, Word("bystander", "x", is_last=False)))
        for i in range(MAX_RESTARTS):
            assert isinstance(await outcome(pipeline, Word(str(i), "poison")), StageCrashed)
        assert pipeline.health.is_ready
        assert isinstance(await outcome(pipeline, Word("one more", "poison")), NotServing)
        assert (pipeline.health.state, pipeline.health.stage) == ("dead", "poison")
        assert isinstance(await bystander, NotServing)
        with pytest.raises(NotServing, match="the engine is dead: stage poison failed: LookupError"):
            await pipeline.call(Word("late"))


@sim_test(seeds=2)
async def test_restarts_that_are_far_apart_never_add_up(env: SimEnv) -> None:
    async with line(Poison(), env=env) as pipeline:
        for i in range(3 * MAX_RESTARTS):
            await outcome(pipeline, Word(str(i), "poison"))
            await env.sleep(1.01 * RESTART_WINDOW_S / MAX_RESTARTS)
        assert pipeline.health.is_ready


@sim_test(seeds=3)
async def test_a_stage_with_state_puts_itself_right_and_keeps_what_it_had_collected(env: SimEnv) -> None:
    class Counter(Stage[Word, Word]):
        on_crash = Crash.RECOVER
        num_recovered = 0

        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            for word in batch:
                if word.text == "poison":
                    raise LookupError
                out.send(word)

        async def recover(self, batch: Sequence[Word], error: BaseException, out: Outlet[Word]) -> None:
            self.num_recovered += 1
            for word in batch:
                if word.text == "poison":
                    out.fail(word, error)

    counter = Counter()
    async with line(counter, env=env) as pipeline:
        assert isinstance(await outcome(pipeline, Word("a", "poison")), LookupError)
        assert await pipeline.call(Word("b", "b")) == ["b"]
        assert counter.num_recovered == 1


@sim_test(seeds=3)
async def test_a_recovery_that_fails_and_a_stage_that_escalates_give_the_pipeline_up(env: SimEnv) -> None:
    class Hopeless(Poison):
        on_crash = Crash.RECOVER

    class Proud(Poison):
        on_crash = Crash.ESCALATE

    for lost in (Hopeless(), Proud()):
        async with line(lost, env=env) as pipeline:
            assert isinstance(await outcome(pipeline, Word("a", "poison")), NotServing)
            assert (pipeline.health.state, pipeline.health.stage) == ("dead", lost.name)


@sim_test(seeds=3)
async def test_a_crash_in_setup_leaves_start_with_the_error_and_no_task_behind(env: SimEnv) -> None:
    class NoModel(Pass):
        async def setup(self, context: Any) -> None:
            await env.sleep(0.1)
            raise FileNotFoundError("no such model")

    pipeline = line(Pass(), NoModel(), env=env)
    with pytest.raises(FileNotFoundError, match="no such model"):
        await pipeline.start()
    assert pipeline.health.state == "stopped"


@sim_test(seeds=3)
async def test_a_restart_whose_setup_fails_gives_the_pipeline_up(env: SimEnv) -> None:
    class Once(Poison):
        async def setup(self, context: Any) -> None:
            await super().setup(context)
            if self.num_setups == 2:
                raise OSError("the tokenizer's file has gone")

    async with line(Once(), env=env) as pipeline:
        assert isinstance(await outcome(pipeline, Word("a", "poison")), NotServing)
        assert pipeline.health.stage == "once"


# -- failing and replying


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


# -- single items


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
async def test_items_at_once_that_wait_for_room_count_as_blocked_each_for_itself(env: SimEnv) -> None:
    @stage(concurrency=3)
    async def quick(word: Word) -> Word:
        return word

    class Stuck(Pass):
        async def handle(self, batch: Sequence[Word], out: Outlet[Word]) -> None:
            await env.sleep(10.0)
            await super().handle(batch, out)

    async with line(quick, Stuck(), env=env, capacity=1) as pipeline:
        await asyncio.gather(*(pipeline.call(Word(str(i), str(i))) for i in range(6)))
        times = pipeline.runners["quick"].times
        assert times.busy >= 0.0 and times.blocked > 10.0


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


# -- fault points


@sim_test(seeds=20, fault_names={"pass.crash.before": 0.3, "pass.crash.after": 0.3, "channel.delay": 0.5})
async def test_injected_crashes_and_delays_change_no_answer(env: SimEnv) -> None:
    async with line(Pass(), env=env) as pipeline:
        for i in range(4):
            assert await pipeline.call(Word(str(i), str(i))) == [str(i)]
            await env.sleep(RESTART_WINDOW_S)
    assert Port("pass", "in") == pipeline.entry

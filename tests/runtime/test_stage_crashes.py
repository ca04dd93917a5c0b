"""The cost of a stage's crash: at most its own item, a restart, or, if it cannot go on, the pipeline."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from millrace.runtime.crash_recovery import MAX_RESTARTS, RESTART_WINDOW_S, StageCrashed
from millrace.runtime.graph import Port
from millrace.runtime.pipeline import NotServing
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.stage import Crash, Outlet, Stage
from tests.runtime.flows import Pass, Poison, Word, line, outcome


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

    async with line(Poison(PanicException), env=env) as pipeline:
        assert isinstance(await outcome(pipeline, Word("a", "poison")), StageCrashed)
        assert await pipeline.call(Word("b", "b")) == ["b"]


@sim_test(seeds=3)
async def test_a_cancelled_error_that_a_stage_makes_itself_is_a_crash_and_does_not_stop_it(env: SimEnv) -> None:
    async with line(Poison(asyncio.CancelledError), env=env) as pipeline:
        assert isinstance(await outcome(pipeline, Word("a", "poison")), StageCrashed)
        assert await pipeline.call(Word("b", "b")) == ["b"]


@sim_test(seeds=3)
async def test_too_many_restarts_in_the_window_end_the_pipeline_with_the_stages_name(env: SimEnv) -> None:
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


@sim_test(seeds=20, fault_names={"pass.crash.before": 0.3, "pass.crash.after": 0.3, "channel.delay": 0.5})
async def test_injected_crashes_and_delays_change_no_answer(env: SimEnv) -> None:
    async with line(Pass(), env=env) as pipeline:
        for i in range(4):
            assert await pipeline.call(Word(str(i), str(i))) == [str(i)]
            await env.sleep(RESTART_WINDOW_S)
    assert Port("pass", "in") == pipeline.entry

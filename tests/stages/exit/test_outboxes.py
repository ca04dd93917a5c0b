"""The exit: each request ends once, its text arrives once, and schedule is notified of ended sequences."""

import asyncio
import time
from dataclasses import replace

import numpy as np
import pytest

from millrace.runtime.channel import ControlLane
from millrace.runtime.crash_recovery import StageCrashed
from millrace.runtime.pipeline import Busy, Health, NotServing
from millrace.runtime.simulation.run import SimEnv, run
from millrace.runtime.simulation.testing import sim_test
from millrace.runtime.stage import Stage
from millrace.runtime.wakeups import WakeupBatch
from millrace.stages.errors import Failed, Overloaded, Refused, TimedOut, Unavailable
from millrace.stages.exit.outboxes import Outboxes, RequestOutbox
from millrace.stages.messages import (
    NO_INTS,
    Begun,
    Finish,
    FinishReason,
    Pooled,
    PromptLogprobs,
    Request,
    StepText,
    TokenLogprobs,
)
from millrace.stages.outputs import ChoiceDelta
from tests.stages.front import Collected, join, request, step, text_step

STOP, LENGTH = Finish(FinishReason.STOP), Finish(FinishReason.LENGTH)


def exit_with_lane() -> tuple[Outboxes, ControlLane]:
    exit = Outboxes()
    exit.lane = ControlLane("test")
    return exit, exit.lane


async def read(outbox: RequestOutbox) -> list[ChoiceDelta]:
    return [delta for deltas in [batch async for batch in outbox] for delta in deltas]


@sim_test(seeds=1)
async def test_text_between_two_reads_is_joined_choice_by_choice(env: SimEnv):
    exit, _ = exit_with_lane()
    outbox = exit.open(request("p", n=2))
    exit.deliver(text_step(0, (0, "Hel", 1), (1, "By", 2), prompt_lengths={0: 3, 1: 3}))
    exit.deliver(text_step(1, (0, "lo", 3), (1, "e", 4)))
    assert await anext(outbox) == [ChoiceDelta(0, "Hello", (1, 3)), ChoiceDelta(1, "Bye", (2, 4))]
    exit.deliver(text_step(2, (0, "!", 5), finishes={0: LENGTH}))
    assert await anext(outbox) == [ChoiceDelta(0, "!", (5,), finish_reason="length")]
    exit.deliver(text_step(3, (1, "", 6), finishes={0: STOP}))
    assert await read(outbox) == [ChoiceDelta(1, "", (6,), finish_reason="stop")]
    assert (outbox.num_prompt_tokens, outbox.num_generated_tokens, outbox.cause) == (3, 6, "finish")


@sim_test(seeds=1)
async def test_sequences_are_numbered_in_order_of_arrival_and_the_request_enters_stamped(env: SimEnv):
    seen: list[Request] = []

    class Note(Stage[Request, StepText]):
        async def handle(self, batch, out) -> None:
            seen.extend(batch)

    exit, _ = exit_with_lane()
    pipeline = join(Note(), exit)
    pipeline.use(env)
    async with pipeline:
        await pipeline.submit(request("a", "b", request_id="x", n=3))
        await pipeline.submit(request("c", request_id="y"))
        await env.sleep(1)
    assert [(r.request_id, r.first_sequence_id) for r in seen] == [("x", 0), ("y", 6)]
    assert all(r.arrival_s > 0 for r in seen)


@sim_test(seeds=1)
async def test_prompts_count_once_however_many_choices_they_have(env: SimEnv):
    exit, _ = exit_with_lane()
    outbox = exit.open(request("a", "b", n=2))
    exit.deliver(text_step(0, (0, "x", 1), prompt_lengths={0: 5, 1: 5, 2: 7, 3: 7}))
    assert outbox.num_prompt_tokens == 12 and outbox.num_generated_tokens == 1


@sim_test(seeds=1)
async def test_only_a_stop_string_is_told_to_schedule_when_an_answer_finishes(env: SimEnv):
    exit, lane = exit_with_lane()
    exit.open(request("a", n=3))
    finishes = {0: LENGTH, 1: Finish(FinishReason.STOP, 33), 2: Finish(FinishReason.STOP, "END")}
    exit.deliver(text_step(0, (0, "", 1), (1, "", 33), (2, "", 3), finishes=finishes))
    assert lane.take() == {2: "finish"}


@pytest.mark.parametrize("cause", ["cancel", "disconnect", "server_shutdown"])
@sim_test(seeds=1)
async def test_a_request_cut_short_ends_with_abort_and_schedule_hears_the_cause(env: SimEnv, cause: str):
    exit, lane = exit_with_lane()
    outbox = exit.open(request("a", n=2))
    exit.deliver(text_step(0, (0, "done", 1), (1, "half", 2), finishes={0: STOP}))
    assert exit.end("r", cause) and not exit.end("r", cause)
    exit.deliver(text_step(1, (1, "late", 3)))
    assert await read(outbox) == [
        ChoiceDelta(0, "done", (1,), finish_reason="stop"),
        ChoiceDelta(1, "half", (2,), finish_reason="abort"),
    ]
    assert lane.take() == {1: cause} and outbox.cause == cause


class Secret(Exception):
    pass


@pytest.mark.parametrize(
    ("cause", "error", "expected", "status", "code"),
    [
        ("error", Refused("no", code="x"), Refused, 400, "x"),
        ("error", StageCrashed("tokenize", "tokenizer_error", Secret("/etc/passwd")), Failed, 500, "tokenizer_error"),
        ("error", Secret("/etc/passwd"), Failed, 500, "internal_error"),
        ("error", NotServing(Health("dead", "execute", "stage execute failed")), Unavailable, 503, "dead"),
        ("deadline", None, TimedOut, 504, "deadline_exceeded"),
    ],
)
@sim_test(seeds=1)
async def test_a_failed_request_raises_what_its_client_may_know(env: SimEnv, cause, error, expected, status, code):
    exit, lane = exit_with_lane()
    outbox = exit.open(request("a"))
    exit.deliver(text_step(0, (0, "half", 1)))
    exit.end("r", cause, error)
    assert await anext(outbox) == [ChoiceDelta(0, "half", (1,))]
    with pytest.raises(expected) as caught:
        await anext(outbox)
    assert (caught.value.status, caught.value.code) == (status, code)
    assert "passwd" not in caught.value.message
    assert await read(outbox) == []  # and nothing after the end
    assert list(lane.take()) == [0]


@pytest.mark.parametrize("broken", ["token", "vector", "prompt"])
@sim_test(seeds=1)
async def test_what_is_not_finite_is_an_error_of_its_request_and_no_finish(env: SimEnv, broken: str):
    exit, lane = exit_with_lane()
    outbox = exit.open(request("a", n=2))
    exit.deliver(text_step(0, (0, "half", 1)))
    if broken == "token":
        exit.deliver(text_step(1, (0, "", 0), finishes={0: Finish(FinishReason.ERROR)}))
    elif broken == "vector":
        exit.deliver(StepText(1, (), (), (), pooled=(Pooled(0, None, Begun(NO_INTS)),)))
    else:
        scored = PromptLogprobs(0, 1, *np.full((3, 1), 5, np.int32), *np.full((2, 1, 1), 5, np.int32))
        scores = replace(scored, logprobs=np.full(1, np.nan, np.float32))
        exit.deliver(StepText(1, (), (), (), prompt_logprobs=(scores,)))
    assert await anext(outbox) == [ChoiceDelta(0, "half", (1,))]
    with pytest.raises(Failed, match="finite|NaN") as caught:
        await anext(outbox)
    assert (caught.value.status, caught.value.code) == (500, "model_error")
    assert lane.take() == {0: "error", 1: "error"} and outbox.num_generated_tokens == 1


@sim_test(seeds=1)
async def test_schedule_is_not_bothered_with_requests_turned_away_at_the_door(env: SimEnv):
    exit, lane = exit_with_lane()
    exit.open(request("a", n=128))
    exit.end("r", "error", Overloaded("full", queue_depth=1, estimated_wait_s=1.0))
    assert lane.take() == {} and not exit._choices


@sim_test(seeds=5)
async def test_a_deadline_ends_a_request_that_is_still_waiting(env: SimEnv):
    class Hold(Stage[Request, StepText]):
        async def handle(self, batch, out) -> None:
            await env.sleep(100)

    exit, lane = exit_with_lane()
    pipeline = join(Hold(), exit)
    pipeline.use(env)
    async with pipeline:
        outbox = await pipeline.submit(request("a"), deadline_s=2.5)
        began = env.now()
        with pytest.raises(TimedOut):
            await read(outbox)
        assert env.now() - began == pytest.approx(2.5)
        assert lane.take() == {0: "deadline"}


@sim_test(seeds=10)
async def test_a_reader_that_sleeps_delays_no_other_and_gets_all_text_once(env: SimEnv):
    exit, _ = exit_with_lane()
    outboxes = [exit.open(request("p", request_id=f"{i}")) for i in range(3)]
    texts = ["", "", ""]

    async def reader(i: int) -> None:
        async for deltas in outboxes[i]:
            await env.sleep(env.random(f"reader{i}").uniform(0, 10 * i))
            texts[i] += "".join(delta.text for delta in deltas)

    tasks = [asyncio.create_task(reader(i)) for i in range(3)]
    for place in range(50):
        finishes = {row: LENGTH for row in range(3)} if place == 49 else {}
        exit.deliver(text_step(place, *[(i, f"{place},", 1) for i in range(3)], finishes=finishes))
        await env.sleep(0.5)
    assert env.now() < 1_026
    await asyncio.gather(*tasks)
    assert texts == ["".join(f"{place}," for place in range(50))] * 3
    assert not exit.live and not exit._choices


def entry(text: str) -> TokenLogprobs:
    return TokenLogprobs(1, text, text.encode(), -1.0, 1, ())


@sim_test(seeds=1)
async def test_logprobs_come_with_the_text_they_spell_and_go_with_a_stop_string(env: SimEnv):
    exit, _ = exit_with_lane()
    outbox = exit.open(request("a", logprobs=0))
    deltas = []
    # "one", then "tw" and "EN" held back with it, then "D": the stop string "END" was in three tokens
    for place, (text, token) in enumerate([("one", "one"), ("", "twE"), ("tw", "ND")]):
        finishes = {0: Finish(FinishReason.STOP, "END")} if place == 2 else {}
        exit.deliver(text_step(place, (0, text, place), logprobs={0: entry(token)}, finishes=finishes))
        deltas += await anext(outbox)
    assert [[e.token for e in delta.logprobs] for delta in deltas] == [["one"], [], ["tw"]]
    assert "".join(delta.text for delta in deltas) == "onetw"


@sim_test(seeds=1)
async def test_rows_of_strangers_are_dropped(env: SimEnv):
    exit, _ = exit_with_lane()
    outbox = exit.open(request("a"))
    exit.deliver(
        text_step(0, (7, "x", 1), (0, "a", 2), finishes={0: STOP}, logprobs={0: entry("x")}, prompt_lengths={7: 1})
    )
    assert await anext(outbox) == [ChoiceDelta(0, "a", (2,))]


def test_an_item_belongs_to_the_requests_of_its_rows():
    exit, _ = exit_with_lane()
    exit._choices = {
        i: choice for i, choice in enumerate(RequestOutbox(request("a", n=2), WakeupBatch().wakeup()).choices)
    }
    assert list(exit.requests_of(text_step(0, (0, "x", 1), (1, "y", 1), (9, "z", 1)))) == ["r"]
    assert list(exit.requests_of(step(0, (0, 1, 0, "x")))) == ["r"]
    assert list(exit.requests_of(request("a", request_id="q"))) == ["q"]
    assert list(exit.requests_of(np.zeros(1))) == []


@sim_test(seeds=4)
async def test_what_was_delivered_before_a_crash_is_not_delivered_again(env: SimEnv):
    exit, _ = exit_with_lane()
    outboxes = [exit.open(request("a", request_id=f"r{i}")) for i in range(2)]
    batch = [text_step(i, (0, f"{i}", i), (1, f"{i}", i)) for i in range(3)]
    out = Collected()
    await exit.recover(batch, RuntimeError("before"), out)  # nothing had been touched
    await exit.recover(batch, RuntimeError("after"), out)  # all had been delivered
    assert [delta.text for box in outboxes for delta in await anext(box)] == ["012", "012"]
    poison = StepText(3, [1], ["x"], [])  # columns of two lengths
    batch = [text_step(3, (0, "3", 3)), poison, text_step(4, (0, "4", 4))]
    with pytest.raises(ValueError):
        await exit.handle(batch, out)
    await exit.recover(batch, ValueError("middle"), out)
    assert [delta.text for delta in await anext(outboxes[0])] == ["34"]
    with pytest.raises(Failed):
        await read(outboxes[1])
    assert exit.is_live("r0") and not exit.is_live("r1")


def test_every_request_has_one_end_whatever_crashes_or_cancels():
    fired = 0

    async def main(env: SimEnv) -> None:
        class Chatter(Stage[Request, StepText]):
            async def handle(self, batch, out) -> None:
                for asked in batch:
                    for place in range(5):
                        finishes = {0: LENGTH} if place == 4 else {}
                        out.send(text_step(place, (asked.first_sequence_id, f"{place}", place), finishes=finishes))

        exit, _ = exit_with_lane()
        pipeline = join(Chatter(), exit)
        pipeline.use(env)
        ends: list[str] = []
        exit.on_end.append(lambda outbox, cause, error: ends.append(outbox.request_id))

        async def client(i: int) -> None:
            outbox = await pipeline.submit(request("p", request_id=f"{i}"))
            if i % 3 == 0:
                pipeline.cancel(f"{i}")
            deltas = await read(outbox)
            assert sum(delta.finish_reason is not None for delta in deltas) == 1
            assert "01234".startswith("".join(delta.text for delta in deltas))
            if deltas[-1].finish_reason == "length":
                assert "".join(delta.text for delta in deltas) == "01234"

        async with pipeline:
            await asyncio.gather(*(client(i) for i in range(6)))
        assert sorted(ends) == [f"{i}" for i in range(6)] and not exit._choices

    for seed in range(40):
        faults = {"exit.crash.before": 0.1, "exit.crash.after": 0.1}
        fired += sum(run(main, seed=seed, fault_names=faults).faults_fired.values())
    assert fired > 10


@sim_test(seeds=3)
async def test_a_full_entrance_is_said_at_once_and_leaves_nothing_behind(env: SimEnv):
    class Hold(Stage[Request, StepText]):
        async def handle(self, batch, out) -> None:
            await env.sleep(100)

    exit, _ = exit_with_lane()
    pipeline = join(Hold(), exit)
    pipeline.use(env)
    async with pipeline:
        with pytest.raises(Busy):
            for i in range(1_000):
                await pipeline.submit(request("a", request_id=f"{i}"), wait=False)
        assert len(exit.live) == len(exit._choices)


@pytest.mark.slow
def test_a_step_of_256_rows_is_delivered_in_a_fraction_of_a_millisecond():
    async def main(env: SimEnv) -> float:
        exit, _ = exit_with_lane()
        for i in range(256):
            exit.open(request("p", request_id=f"{i}"))
        steps = [text_step(place, *[(i, "word ", 1) for i in range(256)]) for place in range(100)]
        began = time.process_time()
        for message in steps:
            exit.deliver(message)
        return (time.process_time() - began) / len(steps)

    assert min(run(main, seed=0).value for _ in range(3)) < 500e-6  # 65 us measured on a busy machine

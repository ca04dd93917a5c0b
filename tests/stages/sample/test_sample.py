"""The sample stage: each step is reported once, in order, when the device has finished it, whatever fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from millrace.runtime.env.env import Env, LiveEnv
from millrace.runtime.graph import Port
from millrace.runtime.pipeline import Pipeline
from millrace.runtime.simulation.run import run
from millrace.runtime.simulation.testing import sim_test
from millrace.stages.device.device import Device
from millrace.stages.execute.stage import Execute
from millrace.stages.messages import FinishReason, StepDone, StepGrant, StepTokens, StepVoid
from millrace.stages.sample.stage import Sample
from tests.stages.grants import decode, grant, started


class Scripted:
    """Model and sampler in one: records what runs, chooses token = step, and fails in the given steps."""

    def __init__(self, fails: Sequence[str] = (), finishes: Sequence[int] = (), forward_s: float = 0.0) -> None:
        self.fails, self.finishes, self.forward_s = set(fails), set(finishes), forward_s
        self.ran: list[str] = []
        self.spans: list[tuple[str, float, float]] = []

    def forward(self, grant: StepGrant) -> str:
        return self._run(f"forward {grant.step}", f"logits {grant.step}")

    def prepare(self, started: object) -> None:
        pass

    def sample(self, grant: StepGrant, logits: Any) -> StepTokens:
        assert logits == f"logits {grant.step}"
        self._run(f"sample {grant.step}", "")
        slots = grant.slots[grant.is_sampled]
        ends = FinishReason.LENGTH if grant.step in self.finishes else FinishReason.NONE
        return StepTokens(
            step=grant.step,
            slots=slots,
            sequence_ids=slots + np.int64(100),
            places=np.full_like(slots, grant.step),
            token_ids=np.full_like(slots, grant.step),
            finishes=np.full(len(slots), ends, np.int8),
            started=grant.started,
        )

    def _run(self, name: str, result: str) -> str:
        began = time.perf_counter()
        self.ran.append(name)
        if name in self.fails:
            raise MemoryError(name)
        if self.forward_s and name.startswith("forward"):
            time.sleep(self.forward_s)
        self.spans.append((name, began, time.perf_counter()))
        return result


def make(model: Scripted, env: Env, capacity: int = 2, device: Device | None = None) -> Pipeline:
    """execute -> sample, both ends open."""
    device = device or Device()
    pipeline = Pipeline()
    pipeline.add(Execute(model, device))
    pipeline.add(Sample(model, device))
    pipeline.connect("execute", "sample", capacity=capacity, reason="steps in flight")
    pipeline.entry = Port("execute", "in")
    pipeline.open_ports = {Port("execute", "rates"), Port("sample", "out"), Port("sample", "feedback")}
    pipeline.use(env)
    return pipeline


async def receive(pipeline: Pipeline, port: str, count: int) -> list[Any]:
    async with aclosing(aiter(pipeline.channel(port))) as items:
        return [await anext(items) for _ in range(count)]


async def answers(env: Env, model: Scripted, *grants: StepGrant) -> tuple[list[Any], list[Any]]:
    """The feedback for these grants, sent at once, and what detokenize has received by then."""
    async with make(model, env) as pipeline:
        for each in grants:
            await pipeline.channel("execute.in").send(each)
        feedback = await receive(pipeline, "sample.feedback", len(grants))
        assert pipeline.health.is_ready
        return feedback, pipeline.channel("sample.out").recv_all()


def steps(*generations: int) -> list[StepGrant]:
    return [decode(0, step=step, generation=generation) for step, generation in enumerate(generations)]


def told(feedback: Sequence[Any]) -> list[str]:
    """`done 3`, `void 4 (MemoryError)`."""
    return [
        f"done {item.step}"
        if isinstance(item, StepDone)
        else f"void {item.step}" + (f" ({type(item.error).__name__})" if item.error is not None else "")
        for item in feedback
    ]


# -- what goes where


@sim_test(seeds=6)
async def test_schedule_gets_the_outcome_and_detokenize_the_tokens(env):
    model = Scripted(finishes=[0])
    news = [started(3), started(1)]
    feedback, tokens = await answers(env, model, decode(3, 1, step=0, started=news))
    (done,) = feedback
    assert isinstance(done, StepDone) and done.step == 0
    assert done.slots.tolist() == [3, 1] and done.sequence_ids.tolist() == [103, 101]
    assert done.places.tolist() == [0, 0] and done.token_ids.tolist() == [0, 0]
    assert done.is_finished.tolist() == [True, True] and done.is_finished.dtype == np.bool_
    assert tokens[0].started == tuple(news) and tokens[0].finishes.tolist() == [2, 2]


@sim_test(seeds=6)
async def test_a_step_that_says_nothing_new_goes_to_schedule_only(env):
    feedback, tokens = await answers(
        env,
        Scripted(),
        grant([(0, 0, 2, False)], step=0, started=[started(0)]),
        grant([(0, 2, 1, False)], step=1),
        decode(0, step=2),
    )
    assert told(feedback) == ["done 0", "done 1", "done 2"]
    assert [item.step for item in tokens] == [0, 2]
    assert feedback[1].slots.tolist() == [] and feedback[1].is_finished.tolist() == []


def test_schedule_is_told_how_long_each_step_took_since_the_one_before():
    async def main(env: Env) -> list[Any]:
        async with make(Scripted(), env) as pipeline:
            for step in (0, 1):
                await pipeline.channel("execute.in").send(decode(0, step=step))
            first = await receive(pipeline, "sample.feedback", 2)
            await env.sleep(60.0)  # in which the device does nothing
            await pipeline.channel("execute.in").send(decode(0, step=2))
            return [*first, *await receive(pipeline, "sample.feedback", 1)]

    done = run(main, seed=0, worker_delay_s={"device": (0.25, 0.25)}).value
    assert [each.took_us for each in done] == pytest.approx([500_000] * 3, abs=10_000)  # two phases each


@sim_test(seeds=12)
async def test_the_device_samples_each_step_before_it_runs_the_next(env):
    model = Scripted()
    await answers(env, model, *steps(0, 0, 0, 0))
    assert model.ran == [f"{phase} {step}" for step in range(4) for phase in ("forward", "sample")]


# -- voids


@sim_test(seeds=12)
async def test_a_failed_forward_pass_voids_its_step_and_those_behind_it(env):
    model = Scripted(fails=["forward 1"])
    feedback, tokens = await answers(env, model, *steps(0, 0, 0, 1))
    assert told(feedback) == ["done 0", "void 1 (MemoryError)", "void 2", "done 3"]
    assert [item.generation for item in feedback[1:3]] == [0, 0]
    assert [item.step for item in tokens] == [0, 3]
    assert model.ran == ["forward 0", "sample 0", "forward 1", "forward 3", "sample 3"]


@sim_test(seeds=12)
async def test_a_failed_choice_voids_its_step_and_those_behind_it(env):
    model = Scripted(fails=["sample 0"])
    feedback, tokens = await answers(env, model, *steps(4, 4, 5))
    assert told(feedback) == ["void 0 (MemoryError)", "void 1", "done 2"]
    assert [item.step for item in tokens] == [2]
    assert model.ran == ["forward 0", "sample 0", "forward 2", "sample 2"]


@sim_test(seeds=12)
async def test_an_older_generation_behind_a_void_is_void_too(env):
    feedback, _ = await answers(env, Scripted(fails=["forward 0"]), *steps(2, 1, 2, 3))
    assert told(feedback) == ["void 0 (MemoryError)", "void 1", "void 2", "done 3"]


# -- crashes of the stages themselves


class LateInName(Device):
    """Steps arrive at the sample stage one by one, as with an asynchronous device."""

    is_async = True


FAULTS = {
    "execute.crash.before": 0.25,
    "execute.crash.after": 0.25,
    "sample.crash.before": 0.25,
    "sample.crash.after": 0.25,
    "device.forward": 0.15,
    "device.sample": 0.15,
}


@pytest.mark.slow
@sim_test(seeds=60, fault_names=FAULTS)
async def test_every_step_is_answered_once_in_order_and_when_the_device_is_done_with_it(env):
    """A small scheduler: two steps in flight, a higher generation after a void, credits returned with each report."""
    model = Scripted()
    generation, voided, sent, answered, num_done = 0, -1, 0, 0, 0
    device = LateInName() if env.seed % 2 else Device()
    async with (
        make(model, env, device=device) as pipeline,
        aclosing(aiter(pipeline.channel("sample.feedback"))) as feedback,
    ):
        while answered < 12:
            while sent < 12 and sent - answered < 2:
                await pipeline.channel("execute.in").send(decode(0, step=sent, generation=generation))
                sent += 1
            item = await anext(feedback)  # a lost credit is a deadlock, which the simulated loop reports
            ran_before = list(model.ran)
            assert item.step == answered
            answered += 1
            if isinstance(item, StepVoid):
                assert (item.error is None) == (item.generation <= voided)
                if item.generation > voided:
                    voided, generation = item.generation, item.generation + 1
            else:
                num_done += 1
                assert f"sample {item.step}" in ran_before
            await env.sleep(5.0)  # crashes must stay below the stage's restart limit; a step takes milliseconds
            late = [name for name in model.ran[len(ran_before) :] if name.endswith(f" {item.step}")]
            assert not late, f"{late} ran after step {item.step} was answered"
        assert pipeline.health.is_ready
        tokens = [item.step for item in pipeline.channel("sample.out").recv_all()]
    assert len(tokens) == num_done and tokens == sorted(set(tokens))
    order = [tuple(reversed(name.split())) for name in model.ran]
    assert order == sorted(order, key=lambda each: (int(each[0]), each[1])) and len(set(order)) == len(order)


@pytest.mark.slow
def test_the_faults_of_that_walk_are_all_met():
    fired = dict.fromkeys(FAULTS, 0)
    walk = test_every_step_is_answered_once_in_order_and_when_the_device_is_done_with_it.__wrapped__
    for seed in range(25):
        found = run(lambda env: walk(env), seed=seed, fault_names=FAULTS).faults_fired
        fired = {name: count + found[name] for name, count in fired.items()}
    assert min(fired.values()) >= 3, fired


@sim_test(seeds=10)
async def test_a_crash_while_the_device_works_voids_the_step_after_it_has_worked(env):
    """The error is raised inside handle, before the report, with several steps on the device."""
    model = Scripted()
    async with make(model, env) as pipeline:
        sample = pipeline.stages["sample"]
        answer = sample._answer

        async def crash_once(grant, out, crash=None):
            if crash is None and grant.step == 0:
                raise ZeroDivisionError("a bug in the stage")
            await answer(grant, out, crash)

        sample._answer = crash_once
        for each in steps(0, 0, 0, 1):
            await pipeline.channel("execute.in").send(each)
        feedback = await receive(pipeline, "sample.feedback", 4)
        assert told(feedback) == ["void 0 (ZeroDivisionError)", "void 1", "void 2", "done 3"]
        assert pipeline.health.is_ready


@sim_test(seeds=10)
async def test_a_crash_behind_a_steps_answer_does_not_answer_it_again(env):
    device = LateInName() if env.seed % 2 else Device()
    async with make(Scripted(), env, 3, device) as pipeline:
        sample = pipeline.stages["sample"]
        note, has_crashed = sample._note_done, []

        def crash_once(grant, done, step_s):
            if not has_crashed:
                has_crashed.append(grant.step)
                raise ZeroDivisionError("a bug in the stage")
            note(grant, done, step_s)

        sample._note_done = crash_once
        for each in steps(0, 0, 0):
            await pipeline.channel("execute.in").send(each)
        feedback = await receive(pipeline, "sample.feedback", 3)
        assert [item.step for item in feedback] == [0, 1, 2] and told(feedback[:1]) == ["done 0"]
        assert pipeline.health.is_ready and not pipeline.channel("sample.feedback").recv_all()
        if device.is_async:
            assert told(feedback) == ["done 0", "done 1", "done 2"], "the others were none of its business"


# -- steps in flight


class Untold(Device):
    """Samples each step, and resolves none before `tell`."""

    is_async = True

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[int, tuple[Any, asyncio.Future[Any]]] = {}

    def sample(self, grant: StepGrant, sample: Any) -> asyncio.Future[Any]:
        told = asyncio.get_running_loop().create_future()
        self._told[grant.step] = super().sample(grant, sample), told
        return told

    def tell(self, step: int) -> None:
        submitted, told = self._told[step]
        told.set_result(submitted.result())


@sim_test(seeds=12)
async def test_a_step_goes_to_the_device_when_it_arrives_and_is_answered_in_its_turn(env):
    model, device = Scripted(), Untold()
    async with make(model, env, 4, device) as pipeline:
        feedback = pipeline.channel("sample.feedback")
        for each in steps(0, 0, 0, 0):
            await pipeline.channel("execute.in").send(each)
            await env.sleep(1.0)
            assert f"sample {each.step}" in model.ran, "it waits for the one before to be told"
        for step in (3, 1, 2):
            device.tell(step)
        await env.sleep(1.0)
        assert not feedback.recv_all()
        device.tell(0)
        assert told(await receive(pipeline, "sample.feedback", 4)) == [f"done {step}" for step in range(4)]


# -- time


@pytest.mark.slow
def test_the_device_does_not_idle_between_steps_that_overlap():
    """With two steps in flight, the next forward pass begins as soon as the last choice is made."""

    async def main() -> Scripted:
        model = Scripted(forward_s=0.005)
        env = LiveEnv()
        async with make(model, env) as pipeline:
            for sent in range(2):
                await pipeline.channel("execute.in").send(decode(0, step=sent))
            async for item in pipeline.channel("sample.feedback"):
                if item.step >= 40:
                    break
                await pipeline.channel("execute.in").send(decode(0, step=item.step + 2))
                time.sleep(0.001)  # the loop is busy with planning
        await env.aclose()
        return model

    spans = asyncio.run(main()).spans
    gaps = [
        begin - end
        for (name, _, end), (_, begin, _) in zip(spans[10:], spans[11:], strict=False)
        if name.startswith("sample")
    ]
    assert sorted(gaps)[len(gaps) // 2] < 0.0005

"""The asynchronous device with real threads: its answers, when it reports them, and its idle time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millrace.runtime.env.log import captured_logs
from millrace.stages.backends.cuda.idle_time import IdleGaps
from millrace.stages.messages import FinishReason
from millrace.stages.outputs import RequestOutput
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.engine import scripted_engine
from millrace.stages.testing.scripted.script import Script
from tests.stages.grants import grant, ints

PROMPTS = [f"prompt {i} " + "and more" * (i % 5) for i in range(12)]


async def answers(*, is_async: bool, steps_in_flight: int) -> list[list[int]]:
    """The answers of one engine to all prompts at once, with too few blocks for them."""
    sizes = {"num_gpu_blocks": 16, "num_cpu_blocks": 20, "max_model_len": 128, "max_num_seqs": 8, "block_size": 8}
    script = Script(key=5, eos_probability=0.0)

    async def ask(engine: Any, prompt: str, seed: int) -> list[int]:
        last: RequestOutput | None = None
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=seed)
        async for output in engine.generate(prompt, params, output_kind="final"):
            last = output
        assert last is not None
        return last.outputs[0].token_ids

    async with scripted_engine(script=script, is_async=is_async, steps_in_flight=steps_in_flight, **sizes) as engine:
        found = await asyncio.gather(*(ask(engine, prompt, i) for i, prompt in enumerate(PROMPTS)))
        await engine.check_quiet()
        if is_async:
            assert engine.idle_gaps_us is not None and engine.idle_gaps_us.num_observed > 20
            assert engine.parts.schedule.scheduler.num_preemptions > 0
        return found


@pytest.fixture(scope="module")
def right() -> list[list[int]]:
    """The answers of a synchronous device."""
    with captured_logs():
        return asyncio.run(answers(is_async=False, steps_in_flight=2))


@pytest.mark.parametrize("steps_in_flight", [1, 2, 4])
def test_it_answers_as_the_device_that_is_never_late(right: list[list[int]], steps_in_flight: int) -> None:
    with captured_logs():
        assert asyncio.run(answers(is_async=True, steps_in_flight=steps_in_flight)) == right


# -- idle gaps


class At:
    """An event at a moment of the device's clock."""

    def __init__(self, us: float) -> None:
        self.us = us

    def us_since(self, earlier: Any) -> float:
        return self.us - float(earlier.us)


def told(began: float, done: float, *, is_sampled: bool = True) -> Any:
    return SimpleNamespace(grant=grant([(0, 0, 1, is_sampled)]), began=At(began), done=At(done))


def tokens(*finishes: int) -> Any:
    return SimpleNamespace(finishes=np.array(finishes, np.int8))


GOES_ON, ENDS = tokens(FinishReason.NONE), tokens(FinishReason.LENGTH)


def gaps_of(*steps: tuple[Any, Any]) -> list[int]:
    """The gaps counted for steps with these tokens."""
    gaps, found, before = IdleGaps(), [0], steps[0][0]
    for step, what in steps:
        gaps.note(step, before, what)
        found.append(gaps.histogram.total)
        before = step
    return [late - early for early, late in zip(found, found[1:], strict=False)]


def test_a_gap_is_the_time_from_done_to_the_beginning_of_the_next_step() -> None:
    steps = [(told(0, 10), GOES_ON), (told(17, 30), GOES_ON), (told(30, 40), GOES_ON)]
    assert gaps_of(*steps) == [0, 7, 0]


def test_there_is_no_gap_after_a_step_that_ended_all_its_rows() -> None:
    assert gaps_of((told(0, 10), ENDS), (told(90, 99), GOES_ON), (told(100, 101), GOES_ON)) == [0, 0, 1]


def test_a_prompt_that_is_half_computed_goes_on() -> None:
    assert gaps_of((told(0, 10, is_sampled=False), tokens()), (told(15, 20), GOES_ON)) == [0, 5]


def test_a_pause_of_a_second_is_no_gap() -> None:
    assert gaps_of((told(0, 10), GOES_ON), (told(2_000_000, 2_000_010), GOES_ON)) == [0, 0]


def test_behind_a_step_that_failed_no_gap_is_known() -> None:
    gaps, first, failed, third = IdleGaps(), told(0, 10), told(11, 12), told(50, 60)
    gaps.note(first, first, GOES_ON)
    gaps.note(third, failed, GOES_ON)
    assert gaps.histogram.num_observed == 0 and ints().size == 0

"""Fairness: one long prompt among many short ones, or the reverse; neither waits for much later requests.

In virtual time and counted in steps, on a scripted engine that is busy throughout: there are always more requests than
slots. Measured at the device: when each sequence gets its first token, and in which steps it gains one.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest

from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages import SamplingParams
from millrace.stages.messages import StepGrant
from millrace.stages.schedule.policy import Policy
from millrace.stages.testing.scripted.engine import Script, ScriptedEngine, scripted_engine
from tests.counts import FULL

CONTEXT, BLOCK_SIZE, SLOTS, BUDGET = 256, 16, 8, 32  # BUDGET: tokens of a step
LONG = CONTEXT * 17 // 20  # tokens of a prompt
MOST_OVERTAKING = 50  # admissions
MOST_SLOWDOWN = 2.0  # of a running request's largest gap

SIZES = {
    "max_model_len": CONTEXT,
    "block_size": BLOCK_SIZE,
    "max_num_seqs": SLOTS,
    "max_num_batched_tokens": BUDGET,
    "num_gpu_blocks": SLOTS * CONTEXT // BLOCK_SIZE,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "room for one": {"num_gpu_blocks": CONTEXT // BLOCK_SIZE + 2},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": CONTEXT},
}


@dataclass(frozen=True)
class Scene:
    """A stream of requests, and one of another kind that comes amid them."""

    num_prompt: int  # tokens, of the stream's
    num_answers: tuple[int, ...]  # tokens, of the stream's, in turn
    num_requests: int
    odd_prompt: int
    odd_answer: int
    num_before: int  # requests that have come before the odd one


SCENES = {
    "a long prompt among short ones": Scene(1, (1, 3, 10, 30), 200, LONG, 4, 60),
    "a short prompt among long ones": Scene(LONG, (1, 3, 10, 30), 80, 1, 40, 20),
}
IN_CI = ("room for one", "whole prompts"), ("usual", "room for one")  # settings, by scene
CASES = [(scene, name) for scene, some in zip(SCENES, IN_CI, strict=True) for name in (SETTINGS if FULL else some)]


class Watch:
    """What the device was given, step by step."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self.admitted: list[int] = []  # sequence ids in the order of their first tokens; ids are given on arrival
        self.num_prompts: dict[int, int] = {}  # sequence id -> tokens of its prompt
        self.gains: dict[int, list[int]] = {}  # sequence id -> steps that gave it a token
        self.largest_step = 0  # tokens
        self.num_steps = 0
        self._sequence_ids = np.full(SLOTS, -1, np.int64)
        self._forward = engine.model.forward
        engine.model.forward = self._watch  # type: ignore[method-assign]

    def _watch(self, grant: StepGrant) -> Any:
        for started in grant.started:
            self._sequence_ids[started.slot] = started.sequence_id
            if started.sequence_id not in self.gains:  # else it is back after a preemption
                self.admitted.append(started.sequence_id)
                self.gains[started.sequence_id] = []
                self.num_prompts[started.sequence_id] = started.num_prompt
        for sequence_id in self._sequence_ids[grant.slots[grant.is_sampled]].tolist():
            self.gains[sequence_id].append(self.num_steps)
        self.num_steps += 1
        self.largest_step = max(self.largest_step, int(grant.num_tokens.sum()))
        return self._forward(grant)

    def num_overtaking(self, sequence_id: int) -> int:
        """Sequences that came later and were admitted earlier."""
        place = self.admitted.index(sequence_id)
        return sum(other > sequence_id for other in self.admitted[:place])

    def largest_gap(self, sequence_id: int) -> int:
        """Steps from one of its tokens to the next, at most."""
        return max(np.diff(self.gains[sequence_id]).tolist(), default=1)

    def ids_of(self, num_prompt: int) -> list[int]:
        """Sequences with so long a prompt."""
        return [sequence_id for sequence_id, length in self.num_prompts.items() if length == num_prompt]


def play(scene: Scene, settings: dict[str, Any], *, has_odd: bool = True) -> Watch:
    """Runs a scene to its end: twice as many clients as slots, each of which sends its next request on an answer."""

    async def main(env: SimEnv) -> Watch:
        async with scripted_engine(script=Script(eos_probability=0.0), env=env, **{**SIZES, **settings}) as engine:
            watch, draw, numbers = Watch(engine), env.random("prompts"), itertools.count()

            async def client() -> None:
                while (number := next(numbers)) < scene.num_requests:
                    is_odd = has_odd and number == scene.num_before
                    num_prompt = scene.odd_prompt if is_odd else scene.num_prompt
                    num_answer = scene.odd_answer if is_odd else scene.num_answers[number % len(scene.num_answers)]
                    prompt = [97 + draw.randrange(26) for _ in range(num_prompt)]
                    params = SamplingParams(max_tokens=num_answer, temperature=0.0, ignore_eos=True)
                    async for _ in engine.generate(prompt, params):
                        pass

            await asyncio.gather(*(client() for _ in range(2 * SLOTS)))
            await engine.check_quiet()
            return watch

    delays = {"device": (0.005, 0.005)}
    return run(
        main, seed=6, policy="fifo", thread_delay_s=(0.0, 0.0), worker_delay_s=delays, max_callbacks=5_000_000
    ).value


@cache
def played(scene: str, settings: str, has_odd: bool = True) -> Watch:
    return play(SCENES[scene], SETTINGS[settings], has_odd=has_odd)


@pytest.mark.slow
@pytest.mark.parametrize(("scene", "settings"), CASES)
def test_no_request_waits_for_more_than_50_later_ones(scene: str, settings: str):
    watch = played(scene, settings)
    (odd,) = watch.ids_of(SCENES[scene].odd_prompt)
    num_later = sum(sequence_id > odd for sequence_id in watch.admitted)
    assert num_later > MOST_OVERTAKING, "too few came later to overtake the odd one"
    assert len(watch.admitted) == SCENES[scene].num_requests
    assert max(map(watch.num_overtaking, watch.admitted)) <= MOST_OVERTAKING


@pytest.mark.slow
@pytest.mark.parametrize(("scene", "settings"), CASES)
def test_who_runs_waits_no_longer_for_a_token_because_of_the_odd_one(scene: str, settings: str):
    watch, baseline = played(scene, settings), played(scene, settings, has_odd=False)
    most = max(map(baseline.largest_gap, baseline.admitted))
    assert max(map(watch.largest_gap, watch.admitted)) <= MOST_SLOWDOWN * most
    budget = {**SIZES, **SETTINGS[settings]}["max_num_batched_tokens"]
    assert watch.largest_step <= budget, "steps are few because they are long"


@pytest.mark.slow
def test_serving_short_prompts_first_would_be_noticed(monkeypatch: pytest.MonkeyPatch):
    """The control: then every request with a short prompt overtakes the long one."""
    monkeypatch.setattr(Policy, "rank", lambda self, sequence: (sequence.num_prompt, sequence.sequence_id))
    scene = SCENES["a long prompt among short ones"]
    watch = play(scene, {})
    (odd,) = watch.ids_of(scene.odd_prompt)
    assert watch.num_overtaking(odd) > MOST_OVERTAKING

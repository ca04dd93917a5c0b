"""Custom stages in an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from millrace.runtime.graph import GraphError
from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.stages import SamplingParams, Stage, stage
from millrace.stages.messages import StepText, TokenRequest
from millrace.stages.testing.scripted.engine import scripted_engine


@dataclass
class Clip(Stage[TokenRequest, TokenRequest]):
    """Keeps the last `limit` tokens of a prompt that is too long."""

    limit: int

    async def handle(self, batch: Sequence[TokenRequest], out: Any) -> None:
        for request in batch:
            out.send(replace(request, token_ids=request.token_ids[-self.limit :]))


@stage
def shout(step: StepText) -> StepText:
    return replace(step, texts=[text.upper() for text in step.texts])


@sim_test(seeds=3)
async def test_an_inserted_stage_changes_what_the_engine_computes(env: SimEnv):
    engine = scripted_engine(env=env)
    engine.insert(Clip(4), after="tokenize")
    async with engine:
        outputs = [
            o async for o in engine.generate(list(range(3, 20)), SamplingParams(max_tokens=2), output_kind="final")
        ]
    assert outputs[-1].num_prompt_tokens == 4


@sim_test(seeds=3)
async def test_a_function_behind_detokenize_changes_the_text(env: SimEnv):
    engine = scripted_engine(answer="hello", env=env)
    engine.insert(shout, after="detokenize")
    async with engine:
        params = SamplingParams(max_tokens=20)
        outputs = [output async for output in engine.generate("hi", params, output_kind="final")]
    assert outputs[-1].outputs[0].text == "HELLO"


@sim_test(seeds=1)
async def test_a_stage_that_does_not_fit_is_refused_at_the_start_with_both_ports(env: SimEnv):
    engine = scripted_engine(env=env)
    engine.insert(shout, after="tokenize")
    with pytest.raises(GraphError, match="tokenize.out makes TokenRequest and shout.in takes StepText"):
        await engine.start()


@sim_test(seeds=1)
async def test_stages_cannot_be_changed_once_the_engine_runs(env: SimEnv):
    async with scripted_engine(env=env) as engine:
        with pytest.raises(RuntimeError, match="before it starts"):
            engine.insert(Clip(4), after="tokenize")

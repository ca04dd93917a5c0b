"""Speculation: answers equal those without drafts, and repetitive ones take fewer steps."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.runtime.simulation.run import SimEnv
from millrace.runtime.simulation.testing import sim_test
from millrace.stages import Engine, SamplingParams
from millrace.stages.config import EngineConfig
from millrace.stages.errors import ConfigError
from millrace.stages.messages import Guess, PlanReport, StepDone, StepGrant, StepPlan, TokenRequest
from millrace.stages.outputs import RequestOutput
from millrace.stages.pooling_params import PoolingParams
from millrace.stages.recordings.reader import Recording
from millrace.stages.recordings.replay import Replay
from millrace.stages.recordings.token_masking import TokenMasking
from millrace.stages.recordings.writer import _Encoder
from millrace.stages.sample.logits_processor import LogitsProcessor
from millrace.stages.sample.stage import Sample
from millrace.stages.schedule.scheduler import Scheduler, StepLimits
from millrace.stages.schedule.sequence import Sequence as Waiting
from millrace.stages.schedule.speculation import may_draft
from millrace.stages.structured_outputs import StructuredOutputs
from millrace.stages.testing.scripted.engine import Script, ScriptedEngine, scripted_engine
from tests.counts import FULL
from tests.stages.recorded_runs import TIGHT, record, requests

ROUND = "row your boat, "
REPEATS = Script(eos_probability=0.0, period=3)
DRAFTS: dict[str, Any] = {"speculation": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
WIDE: dict[str, Any] = {**DRAFTS, "prompt_lookup_max": 1, "num_speculative_tokens": 15}  # four rows may draft


def engine_of(env: SimEnv, script: Script = REPEATS, **config: Any) -> ScriptedEngine:
    """Blocks of 8 tokens. It checks itself what every row reads, and by what each token is chosen."""
    sizes = {"block_size": 8, "num_gpu_blocks": 256, "max_model_len": 256, "max_num_batched_tokens": 64}
    return scripted_engine(script=script, env=env, **{**sizes, **DRAFTS, **config})


async def ask(engine: ScriptedEngine, prompt: str = "abcde", **params: Any) -> RequestOutput:
    outputs = engine.generate(prompt, SamplingParams(**{"max_tokens": 40, **params}), output_kind="final")
    (output,) = [output async for output in outputs]
    return output


def grants_of(engine: ScriptedEngine) -> list[StepGrant]:
    """Those from now on."""
    seen: list[StepGrant] = []
    forward = engine.model.forward

    def look(grant: StepGrant) -> Any:
        seen.append(grant)
        return forward(grant)

    engine.parts.loaded.runner.forward = look  # type: ignore[method-assign]
    return seen


# -- answers


@sim_test(seeds=4)
async def test_an_answer_that_repeats_itself_comes_in_few_steps_and_is_the_same(env: SimEnv):
    async with engine_of(env) as engine:
        for temperature in (0.0, 1.0):
            before = engine.model.num_steps
            answer = await ask(engine, temperature=temperature, seed=5)
            params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
            assert answer.outputs[0].token_ids == REPEATS.expected(list(b"abcde"), params)
            assert answer.num_generated_tokens == 40 and answer.outputs[0].finish_reason == "length"
            assert engine.model.num_steps - before < 20


@sim_test(seeds=2)
async def test_what_was_drafted_and_what_was_right_is_counted(env: SimEnv):
    async with engine_of(env, num_speculative_tokens=4) as engine:
        await ask(engine, temperature=0.0)
        told = engine.scheduler.speculation
        assert told.num_draft_tokens >= told.num_accepted_tokens == sum(told.num_accepted_at) > 20
        assert told.num_accepted_at == sorted(told.num_accepted_at, reverse=True) and len(told.num_accepted_at) == 4
        assert told.num_drafts >= told.num_accepted_at[0]
        await engine.check_quiet()
        assert told.num_drafting == 0


@pytest.mark.parametrize(
    ("params", "told", "finish"),
    [
        ({"max_tokens": 31}, (ROUND * 8)[:31], ("length", None)),
        ({}, ROUND * 8, ("stop", None)),
        ({"stop": (ROUND[-3:] + ROUND * 3,)}, ROUND * 4, ("stop", ROUND[-3:] + ROUND * 3)),
    ],
)
@sim_test(seeds=2)
async def test_an_answer_ends_within_a_run_of_accepted_drafts(
    params: dict[str, Any], told: str, finish: tuple[str, Any], env: SimEnv
):
    async with engine_of(env, Script(answer=lambda prompt, seed: (ROUND * 8).encode())) as engine:
        (choice,) = (await ask(engine, temperature=0.0, **{"max_tokens": 200, **params})).outputs
        assert engine.scheduler.speculation.num_accepted_tokens > 2  # the shortest answer leaves little room
        assert bytes(token for token in choice.token_ids if token < 256).decode() == told
        assert (choice.finish_reason, choice.stop_reason) == finish
        assert choice.text == told.removesuffix("\3" if finish[1] == 3 else str(finish[1]))
        await engine.check_quiet()


@sim_test(seeds=2)
async def test_each_token_of_a_run_has_its_log_probabilities(env: SimEnv):
    async with engine_of(env) as engine:
        (choice,) = (await ask(engine, temperature=0.0, logprobs=2)).outputs
        assert engine.scheduler.speculation.num_accepted_tokens > 20
        assert choice.logprobs is not None
        assert [each.token_id for each in choice.logprobs] == choice.token_ids


@sim_test(seeds=2)
async def test_a_token_that_comes_with_others_is_a_gap_of_nothing(env: SimEnv):
    async with engine_of(env) as engine:
        await ask(engine, temperature=0.0)
        gaps = engine.parts.detokenize.gaps.histogram
        assert gaps.num_observed == 39


@pytest.mark.slow
@pytest.mark.parametrize(
    ("period", "num_cpu_blocks", "steps_in_flight"),
    list(product([None, 1, 5], [0, 16], [1, 4])) if FULL else [(None, 16, 1), (1, 0, 4), (5, 16, 4), (5, 0, 1)],
)
@sim_test(seeds=2)
async def test_drafts_change_no_token_when_memory_runs_out(
    steps_in_flight: int, num_cpu_blocks: int, period: int | None, env: SimEnv
):
    """The device checks each step, and that the blocks hold what they should; answers are compared here."""
    script = Script(eos_probability=0.01, period=period)
    sizes = {"num_gpu_blocks": 25, "max_num_seqs": 4, "num_cpu_blocks": num_cpu_blocks}
    config = replace(TIGHT, steps_in_flight=steps_in_flight, **sizes, **WIDE)

    async with scripted_engine(config, script=script, env=env) as engine:
        asked = requests(16, seed=3)
        outboxes = [await engine.submit(request) for request in asked]
        for request, outbox in zip(asked, outboxes, strict=True):
            answers: dict[int, list[int]] = {}
            async for deltas in outbox:
                for delta in deltas:
                    answers.setdefault(delta.index, []).extend(delta.token_ids)
            for index, answer in answers.items():
                prompt, choice = divmod(index, request.params.n)
                token_ids = request.prompts[prompt].token_ids
                assert token_ids is not None
                room = (config.max_model_len or 0) - len(token_ids)  # type: ignore[operator]
                params = replace(request.params, max_tokens=min(request.params.max_tokens or room, room))
                assert answer == script.expected(token_ids.tolist(), params, choice)
        assert engine.scheduler.num_preemptions > 5
        assert engine.scheduler.speculation.num_draft_tokens > 50
        assert period is None or engine.scheduler.speculation.num_accepted_tokens > 50
        await engine.check_quiet()


@sim_test(seeds=4)
async def test_an_answer_that_was_drafted_is_found_by_who_goes_on_from_it(env: SimEnv):
    async with engine_of(env, num_speculative_tokens=7) as engine:
        first = await ask(engine, temperature=0.0)
        assert engine.scheduler.speculation.num_accepted_tokens > 20
        longer = [*b"abcde", *first.outputs[0].token_ids]
        outputs = engine.generate(longer, SamplingParams(max_tokens=2, temperature=0.0), output_kind="final")
        (second,) = [output async for output in outputs]
        assert second.num_cached_tokens == 44  # all but the last token, which is never computed, of 45


# -- which sequences draft


def test_rows_whose_tokens_hang_on_more_than_logits_and_position_do_not_draft():
    def sequence(pooling: PoolingParams | None = None, **params: Any) -> Waiting:
        prompt = np.zeros(3, np.int32)
        return Waiting(0, "r", prompt, 3, 9, SamplingParams(**params), seed=0, priority=0, pooling=pooling)

    assert may_draft(sequence())
    assert may_draft(sequence(temperature=0.0, top_p=0.5, top_k=3, logprobs=2, stop=("x",), stop_token_ids=(5,), n=2))
    assert not may_draft(sequence(pooling=PoolingParams()))
    for params in (
        {"presence_penalty": 1.0},
        {"frequency_penalty": -1.0},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 2},
        {"allowed_token_ids": (3, 4)},
        {"bad_words_token_ids": ((3,),)},
        {"structured_outputs": StructuredOutputs(json={})},
    ):
        assert not may_draft(sequence(**params)), params


@sim_test(seeds=2)
async def test_no_sequence_drafts_while_too_many_are_served(env: SimEnv):
    async with engine_of(env, num_speculative_tokens=11) as engine:  # 12 tokens of a step: 3 rows with 3 drafts each
        await asyncio.gather(*(ask(engine, "abc", seed=i) for i in range(4)))
        assert engine.scheduler.speculation.num_drafts == 0
        grants = grants_of(engine)
        await asyncio.gather(*(ask(engine, "abc", seed=i) for i in range(3)))
        assert engine.scheduler.speculation.num_drafts > 0
        assert max(grant.num_computed for grant in grants if grant.drafts is not None) <= 12


@sim_test(seeds=2)
async def test_no_sequence_drafts_while_a_prompt_is_computed(env: SimEnv):
    async with engine_of(env, max_num_batched_tokens=16) as engine:
        grants = grants_of(engine)
        drafting = asyncio.create_task(ask(engine, max_tokens=200, temperature=0.0))
        while not engine.scheduler.speculation.num_drafts:
            await env.sleep(0.001)
        await ask(engine, "x" * 100, max_tokens=1)
        await drafting
        chunks = [grant for grant in grants if (grant.num_certain > 1).any()]
        assert len(chunks) >= 7 and all(grant.drafts is None for grant in chunks)
        assert sum(grant.drafts is not None for grant in grants) > 5


@sim_test(seeds=4)
async def test_others_run_ahead_beside_a_row_that_drafts(env: SimEnv):
    def answer(prompt: Sequence[int], seed: int) -> Sequence[int]:
        return list(b"abcd" * 40) if prompt[0] == ord("r") else [(7 * i * i + i // 5) % 251 for i in range(150)]

    async with engine_of(env, Script(answer=answer), steps_in_flight=2) as engine:
        grants = grants_of(engine)
        await asyncio.gather(ask(engine, "repeats", max_tokens=120), ask(engine, "other", max_tokens=120))
        wide = [index for index, grant in enumerate(grants) if grant.drafts is not None and len(grant.slots) == 2]
        assert len(wide) > 5
        drafted = grants[wide[0]].drafts
        assert drafted is not None
        (drafting,) = grants[wide[0]].slots[drafted.counts > 0].tolist()
        (other,) = set(grants[wide[0]].slots.tolist()) - {drafting}
        between = grants[wide[0] : wide[-1]]
        assert all(other in grant.slots for grant in between), "the other one missed a step"
        assert not all(drafting in grant.slots for grant in between), "drafts were planned behind unknown drafts"


@sim_test(seeds=2)
async def test_rows_that_draft_go_on_together(env: SimEnv):
    async with engine_of(env) as engine:
        grants = grants_of(engine)
        first = asyncio.create_task(ask(engine, "abc", max_tokens=200))
        await env.sleep(0.01)
        await asyncio.gather(first, ask(engine, "xyz", max_tokens=200))
        both = [grant for grant in grants if grant.drafts is not None and (grant.drafts.counts > 0).sum() == 2]
        assert len(both) > 10


# -- when


class Plan:
    """A scheduler of one sequence that decodes, whose device does what the test says."""

    def __init__(self, **limits: Any) -> None:
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256, "block_size": 16}
        self.scheduler = Scheduler(StepLimits(**{**sizes, "steps_in_flight": 1, "num_speculative_tokens": 8, **limits}))
        prompt = np.arange(5, dtype=np.int32)
        self.scheduler.add(TokenRequest("r", 0, prompt, SamplingParams(max_tokens=200), 0))
        self.num_known = 5
        self.step(0)

    def guess(self, num_tokens: int, *, is_sure: bool = True) -> None:
        (slot,) = self.scheduler.slots_to_guess()
        self.scheduler.take_guess(Guess(slot, 0, self.num_known, np.zeros(num_tokens, np.intp), is_sure))

    def step(self, num_accepted: int) -> int:
        """Plans and does a step. Returns how many tokens were drafted."""
        plan = self.scheduler.plan()
        assert plan is not None
        self.grant(plan)
        return self.finish(plan, num_accepted)

    def grant(self, plan: StepPlan, preempted: Sequence[int] = ()) -> None:
        """Grants the demand, except to preempted slots."""
        granted = np.where(np.isin(plan.slots, preempted), 0, plan.num_wanted).astype(np.int32)
        report = PlanReport(plan.step, granted, np.zeros_like(granted), preempted, 99, 0, is_void=not granted.any())
        self.scheduler.on_report(report)

    def finish(self, plan: StepPlan, num_accepted: int) -> int:
        """The device is done with a step of the sequence alone."""
        num_drafts = 0 if plan.drafts is None else int(plan.drafts.counts[0])
        count = 1 + num_accepted
        places = np.arange(self.num_known - 5, self.num_known - 5 + count)
        same = np.zeros(count, np.intp)
        self.num_known += count
        done = StepDone(plan.step, same, same.astype(np.int64), places, same, np.zeros(count, np.bool_), 1 + num_drafts)
        self.scheduler.on_done(done)
        self.scheduler.check()
        return num_drafts


def test_a_sequence_begins_with_a_sure_guess_only():
    plan = Plan()
    plan.guess(4, is_sure=False)
    assert plan.step(0) == 0
    while not plan.scheduler.slots_to_guess():
        plan.step(0)
    plan.guess(4)
    assert plan.step(4) == 4


def test_drafts_grow_while_all_are_right_and_shrink_to_what_was():
    plan, drafted = Plan(), []
    for num_accepted in (4, 8, 8, 3, 4, 0, 2):
        plan.guess(8)
        drafted.append(plan.step(num_accepted))
    assert drafted == [4, 8, 8, 8, 4, 8, 2]


def test_a_sequence_stops_when_nothing_comes_of_its_drafts_and_looks_again_later():
    plan = Plan()
    for _ in range(20):
        if not plan.scheduler.slots_to_guess():
            break
        plan.guess(4)
        plan.step(0)
    assert not plan.scheduler.speculation.is_drafting and plan.num_known < 20
    num_steps = 0
    while not plan.scheduler.slots_to_guess():
        assert plan.step(0) == 0
        num_steps += 1
    assert num_steps > 20


def test_finding_nothing_counts_as_being_wrong():
    plan = Plan()
    plan.guess(4)
    plan.step(4)
    for _ in range(20):
        if not plan.scheduler.speculation.is_drafting:
            return
        plan.guess(0)
        assert plan.step(0) == 0
    raise AssertionError("it drafts for ever")


def test_no_draft_goes_past_the_limit_of_an_answer():
    plan = Plan()
    while plan.scheduler.sequences[0].limit - plan.num_known > 3:
        plan.step(0)
    plan.guess(8)
    assert plan.step(0) == 2  # they, and the token after them, are the last three


def test_drafts_of_a_sequence_that_has_lost_its_blocks_are_not_said_to_be_computed():
    """It is preempted by a plan that was made before their outcome was known."""
    plan = Plan(steps_in_flight=2)
    plan.guess(4)
    drafted = plan.scheduler.plan()
    assert drafted is not None and drafted.drafts is not None
    plan.grant(drafted)
    plan.scheduler.add(TokenRequest("other", 0, np.zeros(3, np.int32), SamplingParams(max_tokens=9), 1))
    later = plan.scheduler.plan()
    assert later is not None and later.slots.tolist() != drafted.slots.tolist()
    plan.finish(drafted, num_accepted=3)
    plan.grant(later, preempted=drafted.slots.tolist())
    assert plan.scheduler.sequences[0].num_preempted == 1
    last = plan.scheduler.plan()
    assert last is not None and last.accepted == []


def test_without_drafts_no_slot_needs_a_guess():
    plan = Plan(num_speculative_tokens=0)
    assert plan.scheduler.slots_to_guess() == []
    assert Plan(block_size=1).scheduler.speculation.num_tokens == 0


# -- around it


def test_a_recording_with_drafts_replays_without_its_texts(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    config = replace(TIGHT, max_num_seqs=4, num_gpu_blocks=25, **WIDE)
    parts = record(path, 16, config=config, script=Script(period=3))
    assert parts.schedule.scheduler.speculation.num_accepted_tokens > 20
    replay = Replay(Recording(path)).run()
    assert replay.difference is None and replay.num_calls > 50
    assert replay.core.schedule.scheduler.speculation.num_accepted_tokens == (
        parts.schedule.scheduler.speculation.num_accepted_tokens
    )


def test_a_run_of_tokens_is_hidden_as_they_would_be_one_by_one():
    def hidden(*runs: list[int]) -> list[int]:
        veil, told = TokenMasking(b"secret"), []
        veil.begin([7], np.array([1, 2], np.int32))
        for run in runs:
            for token in run:
                told += veil.go_on([7], np.array([token])).tolist()
        return told

    veil = TokenMasking(b"secret")
    veil.begin([7], np.array([1, 2], np.int32))
    slots = np.zeros(3, np.intp)
    done = StepDone(0, slots, np.full(3, 7), np.arange(3), np.array([5, 6, 5]), np.zeros(3, np.bool_), 3)
    assert _Encoder(0.0, veil, has_cache=True)._answered(done).tolist() == hidden([5, 6, 5])


def test_custom_code_between_logits_and_tokens_turns_it_off_unless_requested():
    assert Engine(logits_processor=LogitsProcessor(), speculation="ngram").config.speculation == "off"
    engine = Engine(speculation="auto")
    engine.replace("tokenize", Sample(None, None))  # type: ignore[arg-type]
    assert engine.config.speculation == "auto"
    engine.replace("sample", Sample(None, None))  # type: ignore[arg-type]
    assert engine.config.speculation == "off"
    engine = Engine(speculation="ngram")
    engine.insert(Sample(None, None), after="execute")  # type: ignore[arg-type]
    assert engine.config.speculation == "ngram"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens = 0: must be a whole number of at least 1"),
        ({"num_speculative_tokens": 65}, "must be at most 64; speculation = off has none"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min = 0: must be a whole number of at least 1"),
        ({"prompt_lookup_max": 2, "prompt_lookup_min": 3}, "must be at least prompt_lookup_min, which is 3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, int], reason: str):
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(**settings)  # type: ignore[arg-type]

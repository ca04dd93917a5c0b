"""Thinking budgets: after the budget the closing marker is forced, whatever else is in the step."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.stages import Engine, EngineConfig, SamplingParams
from millrace.stages.errors import Refused
from millrace.stages.grammar.thinking_budget import ThinkingTable
from millrace.stages.messages import Prompt, Request
from millrace.stages.params import ThinkingBudget
from millrace.stages.request_limits import RequestLimits
from millrace.stages.sample.sampler import Sampler
from millrace.stages.sample.slot_params import THINKING
from millrace.stages.structured_outputs import StructuredOutputs
from tests.counts import count
from tests.stages.grants import decode, started
from tests.stages.pressure import begin_together

NUM_EXAMPLES = count(50, 2000)
START, END = (7, 8), (9, 5, 6)


def budget(num_tokens: int, is_open: bool = True) -> ThinkingBudget:
    return ThinkingBudget(num_tokens=num_tokens, start_ids=START, end_ids=END, is_open=is_open)


def steered(wanted: list[int], given: ThinkingBudget) -> list[int]:
    """A plain reference: the tokens of an answer, given those that the model would choose."""
    tokens: list[int] = []
    begun = 0 if given.is_open else None  # where the thinking section starts
    end = len(given.end_ids)
    for token in wanted:
        is_over = begun is not None and tuple(END) in zip(*(tokens[begun + i :] for i in range(end)), strict=False)
        if begun is not None and not is_over and len(tokens) - begun >= given.num_tokens:
            begun_marks = [n for n in range(end) if tuple(tokens[max(begun, len(tokens) - n) :]) == END[:n]]
            token = END[max(begun_marks)]
        tokens.append(token)
        if begun is None and tuple(tokens[-len(START) :]) == START:
            begun = len(tokens)
    return tokens


ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(5, 10), min_size=1, max_size=24),
        st.integers(0, 8),
        st.booleans(),
        st.integers(0, 24),  # where it is preempted, and comes back
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(ROWS)
def test_rows_are_steered_as_if_each_were_alone_and_goes_on_after_a_preemption(rows):
    table = ThinkingTable(len(rows))
    budgets = [budget(num_tokens, is_open) for _, num_tokens, is_open, _ in rows]
    tokens: list[list[int]] = [[] for _ in rows]
    is_on = np.array([table.start(i, each, np.zeros(0, np.int32)) for i, each in enumerate(budgets)])
    for place in range(max(len(wanted) for wanted, *_ in rows)):
        for i, (*_, preempted_at) in enumerate(rows):
            if preempted_at == place:
                is_on[i] = table.start(i, budgets[i], np.array(tokens[i], np.int32))
        live = np.array([i for i, (wanted, *_) in enumerate(rows) if place < len(wanted)])
        chosen = np.array([rows[i][0][place] for i in live])
        some = np.flatnonzero(is_on[live])
        chosen[some], is_over = table.steer(live[some], chosen[some])
        is_on[live[some[is_over]]] = False
        for i, token in zip(live.tolist(), chosen.tolist(), strict=True):
            tokens[i].append(token)
    assert tokens == [steered(wanted, each) for (wanted, *_), each in zip(rows, budgets, strict=True)]


def test_the_sampler_forces_the_mark_and_then_leaves_the_row_alone():
    sampler = Sampler(torch.zeros(2, dtype=torch.int64), 40, 64, (39,))
    first = [started(0, thinking_budget=budget(2), max_tokens=20), started(1, max_tokens=20)]
    told = []
    for step in range(8):
        logits = torch.zeros(2, 40)
        logits[:, 20 + step] = 5.0
        told.append(sampler.sample(decode(0, 1, step=step, started=first if step == 0 else ()), logits).token_ids)
        assert bool(sampler.table.needs[0] & THINKING) == (step < 4)
        assert sampler.last_tokens.tolist() == told[-1].tolist()
    assert [row[0] for row in told] == [20, 21, *END, 25, 26, 27]
    assert [row[1] for row in told] == list(range(20, 28))


def test_log_probabilities_of_a_forced_token_are_the_models_own():
    sampler = Sampler(torch.zeros(1, dtype=torch.int64), 40, 64, (39,))
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(1))
    expected = torch.log_softmax(logits, -1)[0, END[0]]
    first = started(0, thinking_budget=budget(0), logprobs=0)
    tokens = sampler.sample(decode(0, started=[first]), logits.clone())
    assert tokens.token_ids.tolist() == [END[0]]
    assert tokens.logprobs[0].chosen == pytest.approx(float(expected))


@pytest.mark.parametrize(
    "fields",
    [{"num_tokens": -1}, {"num_tokens": True}, {"end_ids": ()}, {"start_ids": (1,) * 17}, {"end_ids": (-1,)}],
)
def test_a_budget_that_makes_no_sense_is_refused(fields):
    with pytest.raises(Refused, match="thinking_budget: "):
        ThinkingBudget(**{"num_tokens": 1, "start_ids": (1,), "end_ids": (2,)} | fields)


def test_a_budget_and_a_form_of_the_answer_are_refused_together():
    with pytest.raises(Refused, match="thinking_budget: must not be set with structured_outputs"):
        SamplingParams(thinking_budget=budget(1), structured_outputs=StructuredOutputs(json_object=True))


def test_a_mark_outside_the_vocabulary_is_refused_at_intake():
    params = SamplingParams(thinking_budget=replace(budget(1), end_ids=(40,)))
    with pytest.raises(Refused, match="thinking_budget names token 40: the vocabulary has 40"):
        RequestLimits(40, 64).check(Request("a", (Prompt(text="a"),), params))


PROMPTS = ["Once upon a time", "The dog", "One day", "A girl named"]
NUM_THOUGHTS = 9


async def ask_alone_and_together() -> tuple[list[list[int]], list[list[int]], int]:
    """Two choices of each prompt: one prompt after the other, and all at once; and how often one was preempted then."""
    sizes = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks": 14}
    async with Engine(EngineConfig(dtype="float32", num_cpu_blocks=0, steps_in_flight=2, **sizes)) as engine:
        ids = [tuple(engine.tokenizer.encode(mark, add_special_tokens=False)) for mark in ("<think>", "</think>")]
        given = ThinkingBudget(num_tokens=NUM_THOUGHTS, start_ids=ids[0], end_ids=ids[1], is_open=True)
        params = SamplingParams(n=2, max_tokens=40, seed=3, ignore_eos=True, thinking_budget=given)

        async def ask(prompt: str) -> list[list[int]]:
            (output,) = [output async for output in engine.generate(prompt, params, output_kind="final")]
            return [choice.token_ids for choice in output.outputs]

        alone = [tokens for prompt in PROMPTS for tokens in await ask(prompt)]
        assert engine.status().core.scheduler.num_preemptions == 0
        begin_together(engine, len(PROMPTS))
        together = [tokens for found in await asyncio.gather(*map(ask, PROMPTS)) for tokens in found]
        for tokens in alone:
            assert tuple(tokens[NUM_THOUGHTS : NUM_THOUGHTS + len(ids[1])]) == ids[1]
        return alone, together, engine.status().core.scheduler.num_preemptions


@pytest.mark.slow
def test_the_budget_holds_with_two_steps_in_flight_several_choices_and_preemptions():
    alone, together, num_preemptions = asyncio.run(ask_alone_and_together())
    assert together == alone and num_preemptions > 0

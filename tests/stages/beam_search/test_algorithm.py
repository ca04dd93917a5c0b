"""Which beams live and which answers are finished: by hand, and against transformers' beam search token for token."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from millrace.stages import Engine, EngineConfig, SamplingParams
from millrace.stages.beam_search.algorithm import BeamParams, BeamSearch, refuse_sampling
from millrace.stages.errors import Refused
from millrace.stages.outputs import RequestOutput
from tests.model.checkpoints import make_checkpoint

EOS, A, B, C = 0, 1, 2, 3
PROMPT = np.array([9, 9], np.int32)


def search(width: int, max_tokens: int = 9, end_ids: tuple[int, ...] = (EOS,), **options: Any) -> BeamSearch:
    settings = {name: options.pop(name) for name in ("length_penalty", "early_stopping") if name in options}
    return BeamSearch(BeamParams(width=width, **settings), PROMPT, max_tokens, end_ids, **options)


def step(one: BeamSearch, *rows: dict[int, float]) -> None:
    """Token id -> log-probability, for each live beam."""
    falling = [sorted(row.items(), key=lambda item: -item[1]) for row in rows]
    token_ids = np.array([[token_id for token_id, _ in row] for row in falling], np.int32)
    one.step(token_ids, np.array([[logprob for _, logprob in row] for row in falling], np.float32))


def live(one: BeamSearch) -> dict[tuple[int, ...], float]:
    return {tuple(beam.token_ids[2:].tolist()): round(float(beam.logprob), 4) for beam in one.live}


def finished(one: BeamSearch) -> dict[tuple[int, ...], float]:
    return {tuple(h.beam.token_ids[2:].tolist()): round(h.finish.score, 4) for h in one.finished}


# -- by hand


def test_the_likeliest_of_all_continuations_live_on_whatever_beam_they_extend():
    one = search(2)
    step(one, {A: -1.0, B: -2.0, C: -3.0})
    assert live(one) == {(A,): -1.0, (B,): -2.0}
    step(one, {A: -3.0, B: -4.0, C: -5.0}, {A: -0.5, C: -0.6, B: -9.0})
    assert live(one) == {(B, A): -2.5, (B, C): -2.6}
    assert list(live(one)) == [(B, A), (B, C)] and not one.finished


def test_an_end_among_the_first_width_is_finished_and_one_behind_them_is_nothing():
    one = search(2)
    step(one, {A: -1.0, EOS: -2.0, B: -3.0})
    assert live(one) == {(A,): -1.0, (B,): -3.0} and finished(one) == {(EOS,): -2.0}
    step(one, {A: -0.1, B: -0.2, EOS: -0.3}, {A: -9.0, B: -9.1, EOS: -9.2})
    assert finished(one) == {(EOS,): -2.0} and not one.is_over


@pytest.mark.parametrize(("length_penalty", "best"), [(0.0, (EOS,)), (1.0, (A, EOS)), (-1.0, (EOS,))])
def test_the_score_is_the_sum_over_the_length_to_the_power_of_the_penalty(length_penalty, best):
    one = search(2, length_penalty=length_penalty, early_stopping="never")
    step(one, {EOS: -1.0, A: -1.1, B: -5.0})
    step(one, {EOS: -0.5, A: -7.0, B: -8.0}, {A: -9.0, B: -9.1, EOS: -9.2})
    assert finished(one) == {(EOS,): -1.0, (A, EOS): round(-1.6 / 2**length_penalty, 4)}
    assert next(iter(finished(one))) == best


@pytest.mark.parametrize(("early_stopping", "is_over"), [(True, True), (False, True), ("never", False)])
def test_early_stopping_says_how_much_hope_is_left_to_the_live_beams(early_stopping, is_over):
    one = search(2, max_tokens=100, early_stopping=early_stopping)
    step(one, {EOS: -1.0, A: -1.5, B: -3.0})
    step(one, {EOS: -0.5, A: -5.0, B: -6.0}, {A: -9.0, B: -9.1, EOS: -9.2})
    assert len(one.finished) == 2  # scores -1.0 and -1.0; the best live one has -6.5 / 2, and at its longest -6.5 / 100
    assert one.is_over == is_over


def test_while_it_could_still_win_a_beam_is_followed_unless_early_stopping():
    over = {}
    for early_stopping in (True, False):
        one = search(2, early_stopping=early_stopping)
        step(one, {A: -0.1, EOS: -5.0, B: -6.0})
        step(one, {A: -0.1, EOS: -6.0, B: -7.0}, {A: -9.0, B: -9.1, EOS: -9.2})
        assert len(one.finished) == 2
        over[early_stopping] = one.is_over
    assert over == {True: True, False: False}


def test_at_max_tokens_the_first_width_are_finished_and_say_why():
    one = search(2, max_tokens=2)
    step(one, {A: -1.0, B: -2.0, EOS: -9.0})
    step(one, {EOS: -0.1, A: -0.2, B: -9.0}, {A: -9.0, B: -9.1, EOS: -9.2})
    assert one.is_over and finished(one) == {(A, EOS): -0.55, (A, A): -0.6}
    assert [h.finish.reason.name for h in one.finished] == ["STOP", "LENGTH"]


def test_before_min_tokens_nothing_ends():
    one = search(1, min_tokens=1)
    step(one, {EOS: -0.1, A: -3.0})
    assert live(one) == {(A,): -3.0} and not one.finished
    step(one, {EOS: -0.1, A: -3.0})
    assert one.is_over and finished(one) == {(A, EOS): -1.55}


class Letters:
    """Token A is the text a, B is b, C is c; "ab" is a stop string."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def grown(self, token_id: int) -> tuple[Letters, str | None]:
        text = self.text + "?abc"[token_id]
        return Letters(text), "ab" if text.endswith("ab") else None


def test_a_stop_string_ends_an_answer_as_an_end_id_does():
    one = search(2, text=Letters())
    step(one, {A: -1.0, C: -2.0, B: -3.0})
    step(one, {B: -0.2, C: -0.5, A: -9.0}, {A: -9.1, B: -9.2, C: -9.3})
    assert finished(one) == {(A, B): -0.6} and one.finished[0].finish.stop_reason == "ab"
    assert live(one) == {(A, C): -1.5, (A, A): -10.0}


def test_a_search_as_wide_as_the_tree_finds_the_best_of_all_answers():
    draw = random.Random(3)
    table = {path: draw.sample(range(1, 100), 3) for n in range(4) for path in itertools.product((A, B, C), repeat=n)}
    logprobs = {
        path: {t: math.log(w / sum(row)) for t, w in zip((A, B, C), row, strict=True)} for path, row in table.items()
    }
    totals = {
        path: sum(logprobs[path[:n]][path[n]] for n in range(4)) / 4 for path in itertools.product((A, B, C), repeat=4)
    }
    one = search(27, max_tokens=4, end_ids=())
    while not one.is_over:
        step(one, *(logprobs[tuple(beam.token_ids[2:].tolist())] for beam in one.live))
    best = sorted(totals, key=lambda path: -totals[path])[:27]
    assert list(finished(one)) == best


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("width", value) for value in (0, 65, True, 1.0, None)],
        *[("length_penalty", value) for value in (5.1, -5.1, math.nan, math.inf, True, "1")],
        *[("early_stopping", value) for value in ("always", 0, 1, None, "")],
    ],
)
def test_an_invalid_search_names_its_field(field, value):
    with pytest.raises(Refused, match=field) as caught:
        BeamParams(**{"width": 2, field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", 0.5), ("top_p", 0.9), ("top_k", 3), ("min_p", 0.1), ("seed", 0), ("logit_bias", {1: 1.0})],
        *[("presence_penalty", 1.0), ("frequency_penalty", 1.0), ("repetition_penalty", 1.1)],
    ],
)
def test_what_would_choose_other_tokens_than_the_likeliest_is_refused(field, value):
    with pytest.raises(Refused, match=f"^{field}") as caught:
        refuse_sampling(SamplingParams(**{"temperature": 0.0, field: value}))
    assert caught.value.param == field


# -- against transformers

CASES = [  # width, length_penalty, early_stopping; each pair of values is there once
    *[(1, 1.0, "never"), (1, 0.0, False)],
    *[(2, 0.0, True), (2, 1.0, False), (2, 2.0, "never"), (2, -1.0, False)],
    *[(4, 0.0, "never"), (4, 1.0, True), (4, 2.0, False), (4, -1.0, "never")],
    *[(8, 0.0, False), (8, 1.0, "never"), (8, 2.0, True), (8, -1.0, True)],
]
NUM_NEW = 8


def oracle(
    model: PreTrainedModel, prompt: list[int], case: tuple[int, float, Any], end_ids: list[int], num_new: int = NUM_NEW
) -> tuple[list[list[int]], list[float] | None]:
    """transformers' answers, best first, and their scores, which greedy search (width 1) does not return."""
    width, length_penalty, early_stopping = case
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = end_ids or None
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping} if width > 1 else {}
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=num_new,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    answers = [answer[len(prompt) :].tolist() for answer in out.sequences]
    ends = [next((at + 1 for at, token in enumerate(answer) if token in end_ids), num_new) for answer in answers]
    scores = out.sequences_scores.tolist() if width > 1 else None
    return [answer[:end] for answer, end in zip(answers, ends, strict=True)], scores


def config(folder: Path, **settings: Any) -> EngineConfig:
    fields = {"max_model_len": 128, "max_num_seqs": 128, "num_gpu_blocks": 600, "device": "cpu", "threads": 1}
    return EngineConfig(model=str(folder), dtype="float32", **{**fields, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2"])
def test_answers_their_order_and_scores_are_those_of_transformers(family: str, tmp_path: Path):
    """All searches run at once, so this is also each of them among others."""
    model = make_checkpoint(family, tmp_path, num_hidden_layers=2)
    draw = random.Random(5)
    prompt = [draw.randrange(3, 640) for _ in range(21)]
    some, _ = oracle(model, prompt, (4, 1.0, False), [])
    end_ids = [some[0][2], some[1][5]]
    asked = [*((case, end_ids) for case in CASES), *((case, []) for case in CASES[1::4])]
    expected = [oracle(model, prompt, case, ends) for case, ends in asked]

    async def run() -> list[RequestOutput]:
        async with Engine(config(tmp_path)) as engine:
            return await asyncio.gather(*(answer(engine, prompt, case, ends) for case, ends in asked))

    num_ended = 0
    for output, (answers, scores), (case, ends) in zip(asyncio.run(run()), expected, asked, strict=True):
        assert [one.token_ids for one in output.outputs] == answers, (case, ends)
        if scores is not None:
            assert [one.score for one in output.outputs] == pytest.approx(scores, rel=1e-4, abs=1e-5)
        reasons = ["stop" if one.token_ids[-1] in ends else "length" for one in output.outputs]
        assert [one.finish_reason for one in output.outputs] == reasons
        assert (output.num_prompt_tokens, output.num_generated_tokens) == (21, sum(map(len, answers)))
        num_ended += "stop" in reasons
    assert num_ended >= len(CASES) / 2, "the ends are met"


async def answer(engine: Engine, prompt: list[int], case: tuple[int, float, Any], ends: list[int]) -> RequestOutput:
    params = SamplingParams(temperature=0.0, stop_token_ids=tuple(ends), ignore_eos=True)
    width, length_penalty, early_stopping = case
    return await engine.beam_search(prompt, width, NUM_NEW, length_penalty, early_stopping, params=params)


@pytest.mark.slow
def test_the_checkpoints_own_eos_and_min_tokens_are_as_in_transformers(tmp_path: Path):
    model = make_checkpoint("qwen3", tmp_path / "first")
    prompt = [5, 6, 7]
    some, _ = oracle(model, prompt, (2, 1.0, False), [])
    eos = some[0][1]
    model = make_checkpoint("qwen3", tmp_path / "second", eos_token_id=eos)  # the same weights
    ended, _ = oracle(model, prompt, (2, 1.0, False), [eos])
    model.generation_config.min_new_tokens = 4
    later, _ = oracle(model, prompt, (2, 1.0, False), [eos])
    assert some != ended != later != some

    async def run() -> None:
        async with Engine(config(tmp_path / "second")) as engine:
            for expected, options in ((ended, {}), (later, {"min_tokens": 4}), (some, {"ignore_eos": True})):
                params = SamplingParams(temperature=0.0, **options)
                output = await engine.beam_search(prompt, 2, NUM_NEW, params=params)
                assert [one.token_ids for one in output.outputs] == expected, options

    asyncio.run(run())

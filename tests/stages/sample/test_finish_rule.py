"""Implementations of the finish rule against its definition; Triton is in `tests/kernels/interpreted_step.py`."""

from __future__ import annotations

import numpy as np

from millrace.kernels.layout import step_state
from millrace.kernels.layout.finish_rule import ERROR, GOES_ON, LENGTH, STOP, finish_of
from millrace.stages.backends.cuda.step_update import EndRules
from millrace.stages.messages import FinishReason
from millrace.stages.sample.slot_params import SlotParams
from millrace.stages.testing.scripted.byte_tokenizer import EOS, VOCAB_SIZE
from millrace.stages.testing.scripted.device import ScriptedModel
from millrace.stages.testing.scripted.outcomes import Outcomes
from tests.kernels.finish_cases import CASES, MAX_MODEL_LEN, NUM_PROMPT, on_device
from tests.stages.grants import decode

RIGHT = [case.right for case in CASES]
SLOTS = np.arange(len(CASES))
PLACES = np.array([case.place for case in CASES])
TOKENS = np.array([case.token_id for case in CASES])
IS_BROKEN = np.array([case.is_broken for case in CASES])


def test_the_rule_tells_four_ends_apart_in_their_order() -> None:
    ends = {"end_ids": (EOS,), "min_tokens": 2, "max_tokens": 3}
    assert [finish_of(5, place, **ends) for place in range(4)] == [GOES_ON, GOES_ON, LENGTH, LENGTH]  # type: ignore[arg-type]
    assert [finish_of(EOS, place, **ends) for place in range(3)] == [GOES_ON, GOES_ON, STOP]  # type: ignore[arg-type]
    assert finish_of(EOS, 0, is_over=True, **ends) == STOP  # type: ignore[arg-type]
    assert finish_of(EOS, 2, is_over=True, is_broken=True, **ends) == ERROR  # type: ignore[arg-type]
    names = (FinishReason.NONE, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR)
    assert names == (GOES_ON, STOP, LENGTH, ERROR) and {*RIGHT} == {*names}


def table() -> SlotParams:
    made = SlotParams(len(CASES), VOCAB_SIZE, MAX_MODEL_LEN, (EOS,))
    for slot, case in enumerate(CASES):
        made.start(case.start(slot))
    return made


def test_numpy_ends_answers_by_the_rule() -> None:
    assert table().note_tokens(SLOTS, PLACES, TOKENS, IS_BROKEN).tolist() == RIGHT


def test_numpy_ends_answers_whose_grammar_is_over() -> None:
    over = np.flatnonzero(~IS_BROKEN)[::3]
    found = table().note_tokens(SLOTS, PLACES, TOKENS, IS_BROKEN, over)
    assert (found[over] == STOP).all()
    others = np.setdiff1d(SLOTS, over)
    assert found[others].tolist() == [RIGHT[row] for row in others]


def test_the_twin_of_the_device_ends_answers_by_the_rule() -> None:
    assert on_device(step_state) == RIGHT


def test_outcomes_of_a_scripted_device_end_answers_by_the_rule() -> None:
    outcomes = Outcomes(len(CASES), EndRules((EOS,), MAX_MODEL_LEN))
    grant = decode(*SLOTS.tolist(), started=[case.start(slot) for slot, case in enumerate(CASES)])
    result = np.array([TOKENS, on_device(step_state)], np.int32)
    assert outcomes.note_tokens(grant, result).finishes.tolist() == RIGHT


def test_a_scripted_device_ends_answers_by_the_rule() -> None:
    model = ScriptedModel(num_blocks=4, block_size=2, num_slots=len(CASES), max_model_len=MAX_MODEL_LEN)
    whole = np.flatnonzero(~IS_BROKEN & (PLACES + NUM_PROMPT + 1 < MAX_MODEL_LEN))  # tokenize limits max_tokens
    for slot in whole.tolist():
        model._start(CASES[slot].start(slot))
    found = model._finishes(whole, PLACES[whole], TOKENS[whole])
    assert found.tolist() == [RIGHT[row] for row in whole]

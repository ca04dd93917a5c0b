"""Grammar masks of running answers, by slot, on a vocabulary of bytes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from millrace.model.text.grammar import unpack
from millrace.model.text.vocabulary import Vocabulary
from millrace.runtime.env.env import LiveEnv
from millrace.stages.grammar import masks as masks_module
from millrace.stages.grammar.compiled import Grammars
from millrace.stages.grammar.masks import GrammarMasks
from millrace.stages.messages import Started
from millrace.stages.params import SamplingParams
from millrace.stages.structured_outputs import StructuredOutputs

EOS = 256
NO_PROMPT = np.zeros(0, np.int32)
NONE_BROKEN = np.zeros(3, np.bool_)


def make(num_slots: int = 8) -> GrammarMasks:
    tokens = [bytes([i]) for i in range(256)] + [b""]
    vocabulary = Vocabulary(tokens, special_ids=frozenset({EOS}), eos_ids=(EOS,), vocab_size=257)
    return GrammarMasks(Grammars(lambda: vocabulary), num_slots, LiveEnv())


def begin(masks: GrammarMasks, slot: int, *, ignore_eos: bool = False, **form: object) -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(**form), ignore_eos=ignore_eos, max_tokens=100)
    masks.prepare(Started(slot, slot, str(slot), NO_PROMPT, 0, params, seed=0))


def allowed(masks: GrammarMasks, *slots: int) -> list[set[int]]:
    """The tokens that each row of a step may choose next."""
    found = masks.read(np.arange(len(slots)), np.array(slots))
    return [set(np.flatnonzero(row).tolist()) for row in unpack(found.taken, 257)]


def say(masks: GrammarMasks, slots: list[int], text: str) -> None:
    """Each of the slots the same, byte for byte."""
    for byte in text.encode():
        masks.read(np.arange(len(slots)), np.array(slots))
        masks.advance(np.array(slots), np.full(len(slots), byte))


def over(masks: GrammarMasks, slots: list[int], token_ids: list[int], is_broken: np.ndarray = NONE_BROKEN) -> list[int]:
    found = masks.read(np.arange(len(slots)), np.array(slots))
    return masks.over(found, np.array(token_ids), is_broken[: len(slots)]).tolist()


def test_an_answer_may_say_what_its_grammar_allows_next_and_others_do_not_disturb_it() -> None:
    masks = make()
    begin(masks, 5, choice=("ab", "ac"))
    begin(masks, 2, regex="[0-9]+")
    digits = set(b"0123456789")
    assert allowed(masks, 2, 5) == [digits, {ord("a")}]
    masks.advance(np.array([2, 5]), np.array([ord("7"), ord("a")]))
    assert allowed(masks, 5, 2) == [set(b"bc"), digits | {EOS}]
    assert masks.read(np.array([1, 2]), np.array([0, 2, 5])).mask_of_each(3).tolist() == [-1, 2, 5]


def test_an_answer_is_over_where_only_an_end_is_left() -> None:
    masks = make()
    for slot, form in enumerate(({"choice": ("ab",)}, {"choice": ("ab", "abc")}, {"regex": "[0-9]+"})):
        begin(masks, slot, **form)
    say(masks, [0, 1], "ab")
    assert allowed(masks, 0, 1) == [{EOS}, {ord("c"), EOS}]
    assert over(masks, [0, 1, 2], [EOS, EOS, ord("1")]) == [0], "1 may go on, though it has chosen not to"
    assert over(masks, [2, 1, 0], [0, 0, 0], ~NONE_BROKEN) == [2], "nothing was found for any, and 0 has an end only"


def test_masks_are_the_same_while_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    masks = make()
    begin(masks, 0, choice=("ab", "ac"))
    assert allowed(masks, 0) == [{ord("a")}]
    say(masks, [0], "a")
    assert allowed(masks, 0) == [set(b"bc")]


def test_with_ignore_eos_masks_have_no_eos_and_the_answer_ends_when_none_is_left() -> None:
    masks = make()
    begin(masks, 0, regex="[0-9]{1,2}", ignore_eos=True)
    say(masks, [0], "1")
    assert allowed(masks, 0) == [set(b"0123456789")]
    say(masks, [0], "2")
    assert allowed(masks, 0) == [set()] and over(masks, [0], [0], ~NONE_BROKEN) == [0]


def test_one_that_has_failed_may_say_nothing_and_is_not_over() -> None:
    masks = make()
    begin(masks, 0, regex="[0-9]+")
    say(masks, [0], "x")
    assert allowed(masks, 0) == [set()] and over(masks, [0], [0], ~NONE_BROKEN) == []
    begin(masks, 0, choice=("a",))
    assert allowed(masks, 0) == [{ord("a")}], "the slot's next holder begins anew"
    say(masks, [0], "a")
    assert over(masks, [0], [EOS]) == [0]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_many_masks_are_those_of_one_by_one(monkeypatch: pytest.MonkeyPatch, ignore_eos: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}}, "required": ["a"]}
    pair, draw = [], np.random.default_rng(0)
    for many in (1, 1000):
        masks = make()
        pair.append((many, masks))
        for slot in range(8):
            begin(masks, slot, json=schema, ignore_eos=ignore_eos)
    slots = list(range(8))
    for step in range(12):
        found = [allowed(masks, *slots) for _, masks in pair]
        assert found[0] == found[1]
        chosen = {slot: int(draw.choice(sorted(ids))) for slot, ids in zip(slots, found[0], strict=True) if ids}
        chosen = {slot: 0 if step == slot == 7 else token_id for slot, token_id in chosen.items() if token_id != EOS}
        slots = list(chosen)
        for many, masks in pair:
            monkeypatch.setattr(masks_module, "MANY", many)
            masks.advance(np.array(slots), np.array([*chosen.values()]))
            masks.read(np.arange(len(slots)), np.array(slots))  # which waits for the thread
    assert slots and 7 not in slots, "0 is never allowed"

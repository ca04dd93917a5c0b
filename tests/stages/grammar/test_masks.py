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
from millrace.stages.structured_outputs import StructuredOutputs, ThinkingSection

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


TEXT = set(range(0x80)) | set(range(0xC2, 0xF5))  # the bytes that may begin a character
THOUGHTS = ThinkingSection(start="<t>", end="</t>", is_open=True)


def with_words(*words: bytes, special: frozenset[int] = frozenset()) -> GrammarMasks:
    """A vocabulary of bytes, an end and words, of which the special ones are known by their ids alone."""
    tokens = [bytes([i]) for i in range(256)] + [b"", *words]
    vocabulary = Vocabulary(tokens, special | {EOS}, (EOS,), vocab_size=len(tokens))
    return GrammarMasks(Grammars(lambda: vocabulary), 8, LiveEnv())


def allowed_at(masks: GrammarMasks, slot: int) -> set[int]:
    found = masks.read(np.arange(1), np.array([slot]))
    return set(np.flatnonzero(unpack(found.taken, masks.grammars.compiler.vocab_size)[0]).tolist())


def test_thoughts_may_be_any_text_but_an_end_until_their_marker_comes() -> None:
    masks = make()
    begin(masks, 0, choice=("ab",), after=THOUGHTS)
    say(masks, [0], "hm é <")
    assert allowed_at(masks, 0) == TEXT
    masks.advance(np.array([0]), np.array([0xC3]))  # half a character
    assert allowed_at(masks, 0) == set(range(0x80, 0xC0))
    masks.advance(np.array([0]), np.array([0xA9]))
    assert allowed_at(masks, 0) == TEXT
    say(masks, [0], "</t")
    assert EOS not in allowed_at(masks, 0) and ord(">") in allowed_at(masks, 0)
    say(masks, [0], ">")
    assert allowed_at(masks, 0) == {ord("a"), ord("\n")}
    say(masks, [0], "\n\nab")
    assert allowed_at(masks, 0) == {EOS}


def test_an_answer_may_begin_its_thoughts_itself_or_leave_them_out() -> None:
    masks = make()
    section = ThinkingSection(start="<t>", end="</t>", is_open=False)
    for slot in (0, 1):
        begin(masks, slot, choice=("ab",), after=section)
    assert allowed(masks, 0, 1) == [{ord("a"), ord("<")}] * 2
    say(masks, [0], "ab")
    assert allowed_at(masks, 0) == {EOS}
    say(masks, [1], "<t>x</t>ab")
    assert allowed_at(masks, 1) == {EOS}


@pytest.mark.parametrize("is_special", [False, True])
def test_markers_of_one_token_are_known_special_or_not(is_special: bool) -> None:
    words = (b"<t>", b"</t>", b"</t>ab", b"\n\n", b"a</t")
    masks = with_words(*words, special=frozenset({257, 258}) if is_special else frozenset())
    begin(masks, 0, choice=("ab",), after=THOUGHTS)
    say(masks, [0], "hm")
    free = allowed_at(masks, 0)
    assert {258, 260, 261} <= free and 259 not in free and EOS not in free, "the third says more than the marker"
    assert (257 in free) != is_special
    for token in (258, 260):
        masks.read(np.arange(1), np.array([0]))
        masks.advance(np.array([0]), np.array([token]))
    assert allowed_at(masks, 0) == {ord("a")}


def test_thoughts_are_taken_up_again_after_a_preemption() -> None:
    masks = make()
    for slot, said in enumerate(("hm", "hm</t", "hm</t>\na")):
        form = StructuredOutputs(choice=("ab",), after=THOUGHTS)
        tokens = np.array(list(said.encode()), np.int32)
        masks.prepare(Started(slot, slot, str(slot), tokens, 0, SamplingParams(structured_outputs=form), seed=0))
    assert allowed_at(masks, 0) >= TEXT and ord(">") in allowed_at(masks, 1)
    assert allowed_at(masks, 2) == {ord("b")}
    say(masks, [1], ">a")
    assert allowed_at(masks, 1) == {ord("b")}

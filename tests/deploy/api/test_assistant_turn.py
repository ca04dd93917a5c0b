"""Reasoning, text and calls of one answer, and the count of reasoning tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.deploy.api.assistant_turn import Piece, ReasoningCounter, ToolCallArguments, ToolCallBegun, Turn
from millrace.deploy.api.parsers.hermes import HermesParser
from millrace.deploy.api.parsers.interface import Event, Reasoning, Text
from millrace.deploy.api.parsers.reasoning import DeepSeekR1Parser, ThinkParser
from millrace.deploy.api.parsers.registry import reasoning_parser
from tests.counts import count

NUM_EXAMPLES = count(60, 2000)


class OtherMarks(ThinkParser):
    """A new family takes one line."""

    markers = ("[THINK]", "[/THINK]")


GOLDEN = [
    # (parser, whether the prompt opened the reasoning, text, reasoning, content)
    (ThinkParser, False, "<think>\nHm, é.\n\nYes.\n</think>\n\nHello", "Hm, é.\n\nYes.", "Hello"),
    (ThinkParser, True, "\nHm.\n</think>\n\nHello </think> <think>", "Hm.", "Hello </think> <think>"),
    (ThinkParser, True, "<think>Hm.</think>Hello", "Hm.", "Hello"),
    (ThinkParser, True, "</think>\n\nHello", "", "Hello"),
    (ThinkParser, True, "<thin air</th", "<thin air</th", ""),
    (ThinkParser, True, "cut of\n", "cut of", ""),
    (ThinkParser, False, "\n <think>a</think>b", "a", "b"),
    (ThinkParser, False, "Hello <think>a</think>", "", "Hello <think>a</think>"),
    (ThinkParser, False, "<thinner", "", "<thinner"),
    (ThinkParser, False, "\n\n", "", "\n\n"),
    (ThinkParser, False, "<", "", "<"),
    (ThinkParser, True, "<", "<", ""),
    (ThinkParser, False, "<think></think>", "", ""),
    (DeepSeekR1Parser, True, "Hm.\n</think>\n\nHello", "Hm.", "Hello"),
    (OtherMarks, False, "[THINK]a[/THIN [/THINK]b", "a[/THIN ", "b"),
]


def thoughts_and_words(events: Sequence[Event | Piece]) -> tuple[str, str]:
    thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
    words = "".join(event.text for event in events if isinstance(event, Text))
    assert len(events) == sum(isinstance(event, (Reasoning, Text)) for event in events)
    return thoughts, words


@pytest.mark.parametrize(("kind", "is_open", "text", "thoughts", "words"), GOLDEN)
def test_thoughts_are_told_from_words_wherever_the_text_is_cut(kind, is_open, text, thoughts, words):
    for at in range(len(text) + 1):
        parser = kind(is_open)
        events = [event for piece in (text[:at], text[at:]) for event in parser.feed(piece)] + parser.finish()
        assert thoughts_and_words(events) == (thoughts, words)


@pytest.mark.parametrize(("kind", "is_open", "text", "thoughts", "words"), GOLDEN)
@pytest.mark.parametrize("size", [1, 3, 7])
def test_tokens_of_thoughts_are_counted_without_those_of_their_marks(kind, is_open, text, thoughts, words, size):
    raw = text.encode()
    tokens = [raw[at : at + size] for at in range(0, len(raw), size)]
    begin, end = (marker.encode() for marker in kind.markers)
    said = raw.lstrip()
    is_marked = said.startswith(begin)
    start = len(raw) - len(said) + len(begin) if is_marked else 0
    stop = raw.find(end, start) if end in raw[start:] else len(raw)
    edges = [(at, min(at + size, len(raw))) for at in range(0, len(raw), size)]
    expected = sum(first < stop and last > start for first, last in edges) if is_marked or is_open else 0
    if is_open and text == "<":
        expected = 0  # ambiguous so far
    for cut in range(len(tokens) + 1):
        counter = ReasoningCounter(kind.markers, is_open, tokens.__getitem__)
        counter.add(range(cut))
        counter.add(range(cut, len(tokens)))
        assert counter.num_tokens == expected


def read(turn: Turn, *pieces: str) -> list[Piece]:
    told: list[Piece] = []
    for i, piece in enumerate(pieces):
        told += turn.read(piece, (), i == len(pieces) - 1)
    return told


CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
BOTH = f"<think>\nShould I?\n</think>\n\nI will.\n{CALL}\n{CALL}\n"


def merged(pieces: Sequence[Piece]) -> list[tuple[object, ...]]:
    """The pieces, with neighbours of the same kind joined and without the random ids."""
    found: list[tuple[object, ...]] = []
    for piece in pieces:
        if isinstance(piece, ToolCallBegun):
            found.append(("call", piece.index, piece.name))
            continue
        key = ("arguments", piece.index) if isinstance(piece, ToolCallArguments) else (type(piece).__name__,)
        if found and found[-1][:-1] == key:
            found[-1] = (*key, str(found[-1][-1]) + piece.text)
        else:
            found.append((*key, piece.text))
    return found


def test_thoughts_words_and_calls_come_in_their_order_wherever_the_text_is_cut():
    expected = [
        ("Reasoning", "Should I?"),
        ("Text", "I will."),
        ("call", 0, "f"),
        ("arguments", 0, '{"a": 1}'),
        ("call", 1, "f"),
        ("arguments", 1, '{"a": 1}'),
    ]
    for at in range(len(BOTH) + 1):
        assert merged(read(Turn(ThinkParser(), HermesParser()), BOTH[:at], BOTH[at:])) == expected
    assert merged(read(Turn(ThinkParser(), HermesParser()), *BOTH)) == expected


def test_white_space_is_content_where_no_call_is_next_to_it():
    for text in ("  a \n\n b \n", " ", "\n\n"):
        assert merged(read(Turn(None, HermesParser()), *text)) == [("Text", text)]
        assert merged(read(Turn(), *text)) == [("Text", text)]
    assert merged(read(Turn(None, HermesParser()), f"\n\n{CALL}\n b \n")) == [
        ("call", 0, "f"),
        ("arguments", 0, '{"a": 1}'),
        ("Text", "\n b"),
    ]


def test_without_parallel_calls_only_the_first_is_told():
    turn = Turn(None, HermesParser(), allows_parallel=False)
    assert merged(read(turn, CALL + CALL + "end")) == [("call", 0, "f"), ("arguments", 0, '{"a": 1}'), ("Text", "end")]
    assert turn.num_calls == 1


def test_thoughts_may_be_kept_from_the_client_and_are_counted_all_the_same():
    tokens = [b"<think>", b"a", b"b", b"</think>", b"c"]
    counter = ReasoningCounter(ThinkParser.markers, False, tokens.__getitem__)
    turn = Turn(ThinkParser(), shows_reasoning=False, counter=counter)
    assert turn.read("<think>ab</think>c", range(5), True) == [Text("c")]
    assert turn.num_reasoning_tokens == 2 and Turn().num_reasoning_tokens is None


FRAGMENTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f"',
    ', "arguments": {',
    "}",
    "\n",
    " ",
    "é",
    "<",
]


@pytest.mark.slow
@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=2)), max_size=16),
    st.lists(st.integers(0, 120), max_size=6),
    st.booleans(),
)
def test_deltas_add_up_to_the_whole_for_any_text_in_any_pieces(fragments, places, is_open):
    text = "".join(fragments)
    cuts = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
    whole = merged(read(Turn(ThinkParser(is_open), HermesParser()), text))
    assert merged(read(Turn(ThinkParser(is_open), HermesParser()), *pieces)) == whole


@pytest.mark.slow
def test_endless_white_space_costs_no_more_the_longer_it_is():
    def seconds(text: str, num_tokens: int) -> float:
        counter = ReasoningCounter(ThinkParser.markers, True, lambda _: text.encode())
        turn = Turn(ThinkParser(is_open=True), HermesParser(), counter=counter)
        began = time.process_time()
        for _ in range(num_tokens):
            turn.read(text, (0,), False)
        assert turn.num_reasoning_tokens in (0, num_tokens)
        return time.process_time() - began

    for text in ("\n", " ", "a\n"):
        assert any(seconds(text, 12_000) < 8 * seconds(text, 3_000) for _ in range(3)), "4 times the text"


@pytest.mark.parametrize(
    ("template", "expected"),
    [("no thoughts", None), ("... </think> ...", ThinkParser), ("<｜Assistant｜> ... '</think>'", DeepSeekR1Parser)],
)
def test_auto_takes_the_reasoning_parser_of_the_templates_family(template, expected):
    assert reasoning_parser("auto", template) is expected
    assert reasoning_parser("deepseek_r1", template) is DeepSeekR1Parser

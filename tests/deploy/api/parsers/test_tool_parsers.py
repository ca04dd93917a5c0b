"""Tool calls of four model families, cut at every place, and texts that resemble calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.deploy.api.parsers.hermes import HermesParser
from millrace.deploy.api.parsers.interface import CallArguments, CallBegun, Event, Text, ToolParser
from millrace.deploy.api.parsers.json_calls import JsonArguments, JsonList
from millrace.deploy.api.parsers.llama3_json import Llama3JsonParser
from millrace.deploy.api.parsers.mistral import MistralParser
from millrace.deploy.api.parsers.pythonic import PythonicParser
from millrace.deploy.api.parsers.registry import reasoning_parser, tool_parser
from millrace.stages.errors import ConfigError
from tests.counts import count

NUM_EXAMPLES = count(60, 2000)
NAMES = ("get_weather", "f", "a.b")

Found = list[str | tuple[str, str]]  # texts, and calls as (name, arguments)


def joined(events: Sequence[Event]) -> Found:
    found: Found = []
    for event in events:
        if isinstance(event, CallBegun):
            found.append((event.name, ""))
        elif isinstance(event, CallArguments):
            name, arguments = found[-1]
            found[-1] = (name, arguments + event.text)
        elif found and isinstance(found[-1], str):
            found[-1] += event.text
        else:
            found.append(event.text)
    return found


def parse(make: Callable[[], ToolParser], *pieces: str) -> Found:
    parser = make()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + parser.finish())


def maker(kind: type[ToolParser]) -> Callable[[], ToolParser]:
    return lambda: kind(NAMES[:1] if kind is JsonArguments else NAMES)


WEATHER = '{"city": "Zürich 🌧", "days": [1, 2.5e0, -3], "now": true, "place": null, "quote": "\\"\\u00e9\\\\"}'
PYTHON = "__import__('os').system('touch /tmp/marker')"

GOLDEN: list[tuple[type[ToolParser], str, Found]] = [
    # hermes
    (HermesParser, "No call at all, 1 < 2.", ["No call at all, 1 < 2."]),
    (
        HermesParser,
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>',
        ["Let me see.\n", ("get_weather", WEATHER)],
    ),
    (
        HermesParser,
        '<tool_call>{"arguments": {"a": {}}, "name": "f"}</tool_call>\n<tool_call>\n{"name":"g"}\n</tool_call> done',
        [("f", '{"a": {}}'), "\n", ("g", "{}"), " done"],
    ),
    (HermesParser, '<tool_call>{"name":"f","arguments":{}}<tool_call>{"name":"g"}', [("f", "{}"), ("g", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', [("f", '{"a": 1}')]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": null, "id": "x"}</tool_call>', [("f", "{}")]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "1\n2\\d\\u12x"}}', [("f", r'{"a": "1\n2\\d\\u12x"}')]),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": [1, ', [("f", '{"a": [1, ')]),  # cut by its length
    (HermesParser, '<tool_call>{"name": "f", "argu', ['<tool_call>{"name": "f", "argu']),
    (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": 01}}x', [("f", '{"a": 0'), "1}}x"]),
    (HermesParser, "<tool_call>f(1)</tool_call>", ["<tool_call>f(1)</tool_call>"]),
    (HermesParser, "<tool_call> {'name': 'f'}</tool_call>", ["<tool_call> {'name': 'f'}</tool_call>"]),
    (HermesParser, '<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
    (HermesParser, '<tool_call>{"name": "f", "arguments": 5}', ['<tool_call>{"name": "f", "arguments": 5}']),
    (HermesParser, '<tool_call>{"name": "\\ud800"}', ['<tool_call>{"name": "\\ud800"}']),
    (
        HermesParser,
        '<tool_call>{"name": "f", "arguments": {\'a\': 1}}',
        ['<tool_call>{"name": "f", "arguments": {\'a\': 1}}'],
    ),
    (HermesParser, "<<tool_call<tool_call>{}</tool_call>", ["<<tool_call<tool_call>{}</tool_call>"]),
    (HermesParser, '<tool_call>{"name":"f"}</tool_ca', [("f", "{}"), "</tool_ca"]),
    (HermesParser, '<tool_call>{"name":"f","code":"x"}', ['<tool_call>{"name":"f","code":"x"}']),
    # llama 3
    (Llama3JsonParser, f'{{"name": "get_weather", "parameters": {WEATHER}}}', [("get_weather", WEATHER)]),
    (Llama3JsonParser, ' \n{"name": "f", "arguments": {}}; {"name": "a.b"} ', [("f", "{}"), ("a.b", "{}")]),
    (Llama3JsonParser, '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}', [("f", '{"x": 1}')]),
    (Llama3JsonParser, 'Ok.<|python_tag|> {"name": "f"}', ["Ok.", ("f", "{}")]),
    (Llama3JsonParser, '{"name": "Bob", "parameters": {}}', ['{"name": "Bob", "parameters": {}}']),
    (Llama3JsonParser, ' {"people": [{"name": "f"}]}', [' {"people": [{"name": "f"}]}']),
    (Llama3JsonParser, 'I say {"name": "f"}', ['I say {"name": "f"}']),
    (Llama3JsonParser, "<|python_tag|>print(1)", ["<|python_tag|>print(1)"]),
    (Llama3JsonParser, "  ", ["  "]),
    # mistral
    (
        MistralParser,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {WEATHER}}}, {{"name": "g", "arguments": {{}}}}]',
        [("get_weather", WEATHER), ("g", "{}")],
    ),
    (MistralParser, 'Hm[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]a.b[ARGS]{}', ["Hm", ("f", '{"a": 1}'), ("a.b", "{}")]),
    (MistralParser, '[TOOL_CALLS]f[CALL_ID]123abcDEF[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
    (MistralParser, "[TOOL_CALLS]f[XS]{}", ["[TOOL_CALLS]f[XS]{}"]),
    (MistralParser, "see [1] and [TOOL", ["see [1] and [TOOL"]),
    (MistralParser, '[TOOL_CALLS][{"name": "f"}, {"name": 1}]', [("f", "{}"), '{"name": 1}]']),
    (MistralParser, '[TOOL_CALLS] {"name": "f"}', ['[TOOL_CALLS] {"name": "f"}']),
    # pythonic
    (
        PythonicParser,
        '[get_weather(city="Zürich", days=[1, (2,), {"k": None, 3: True}], x=-1.5), f( ) , a.b(q=\'it"s\')]',
        [
            ("get_weather", '{"city": "Zürich", "days": [1, [2], {"k": null, "3": true}], "x": -1.5}'),
            ("f", "{}"),
            ("a.b", '{"q": "it\\"s"}'),
        ],
    ),
    (
        PythonicParser,
        '<|python_start|>[f(a="\\ud83d\\ude00\\n" "\\\\n", b=(1))]<|python_end|>',
        [("f", '{"a": "😀\\n\\\\n", "b": 1}')],
    ),
    (
        PythonicParser,
        'Fine: <|python_start|> [f(a="""x"y""", b=\'\', c=0x1F, d=1_000)]',
        ["Fine: ", ("f", '{"a": "x\\"y", "b": "", "c": 31, "d": 1000}')],
    ),
    (PythonicParser, f'[f(code="{PYTHON}")]', [("f", json.dumps({"code": PYTHON}))]),
    (PythonicParser, f"[f(code={PYTHON})]", [f"[f(code={PYTHON})]"]),
    *[
        (PythonicParser, text, [text])
        for text in (
            "[1, 2, 3]",
            "[unknown(a=1)]",
            "[f(1)]",
            "[f(a=b)]",
            "[f(a=1+1)]",
            "[f(a=1e999)]",
            "[f(a=nan)]",
            "[f(a=1, a=2)]",
            '[f(a=f"{x}")]',
            "[f(a={1, 2})]",
            "[f(a='\n')]",
            '[f(a="\\x4")]',
            '[f(a="\\U00110000")]',
            "[f(a=" + "[" * 65 + "]" * 65 + ")]",
            "[f(a=" + "9" * 100 + ")]",
            "[f(a=1",
            "f(a=1)",
        )
    ],
    (PythonicParser, "[f(a=1), f(a=x)]", [("f", '{"a": 1}'), "f(a=x)]"]),
    # answers with a forced output format
    (
        JsonList,
        f'[{{"name": "f", "arguments": {WEATHER}}},\n{{"name": "g", "arguments": {{}}}}]',
        [("f", WEATHER), ("g", "{}")],
    ),
    (JsonList, "Sorry, no.", ["Sorry, no."]),
    (JsonArguments, f" {WEATHER}", [("get_weather", WEATHER)]),
    (JsonArguments, "{}", [("get_weather", "{}")]),
    (JsonArguments, '{"a": "cut of', [("get_weather", '{"a": "cut of')]),
    (JsonArguments, "{no", ["{no"]),
]
IDS = [f"{kind.__name__}-{text[:30]}" for kind, text, _ in GOLDEN]


@pytest.mark.parametrize(("kind", "text", "expected"), GOLDEN, ids=IDS)
def test_a_text_says_the_same_wherever_it_is_cut(kind, text, expected):
    make = maker(kind)
    assert parse(make, text) == expected
    assert parse(make, *text) == expected
    for at in range(len(text) + 1):
        assert parse(make, text[:at], text[at:]) == expected


def test_the_arguments_of_a_call_that_closed_are_a_json_object():
    parts = [part for kind, text, _ in GOLDEN for part in parse(maker(kind), text)]
    closed = [part[1] for part in parts if isinstance(part, tuple) and part[1].endswith("}")]
    assert len(closed) > 20 and all(isinstance(json.loads(arguments), dict) for arguments in closed)


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", '{"name": "f", ', '"arguments": {', '"parameters": {"a": "', '"}}', "}}"),
    *("[f(a=", "f(", "b='", '"""', ")]", "[", "]", "{", "}", ",", ";", ":", "\\", '"', "\n", " ", "é", "🌧", "1", "x"),
]


@pytest.mark.slow
@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    st.sampled_from([HermesParser, Llama3JsonParser, MistralParser, PythonicParser, JsonList, JsonArguments]),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=20),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_any_text_is_read_alike_in_any_pieces_and_none_raises(kind, fragments, places):
    text = "".join(fragments)
    cuts = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
    whole = parse(maker(kind), text)
    assert parse(maker(kind), *pieces) == whole
    json.dumps(whole).encode()
    if not any(isinstance(part, tuple) for part in whole) and kind not in (JsonList, JsonArguments):
        assert "".join(whole) == text, "what is no call goes to the reader as it is"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda k: not k.startswith("__")), VALUES, max_size=4
    )
)
def test_what_a_family_writes_comes_back_as_it_was(arguments: dict[str, Any]):
    written = json.dumps(arguments, ensure_ascii=False)
    call = f'{{"name": "f", "arguments": {written}}}'
    for kind, text in (
        (HermesParser, f"<tool_call>\n{call}\n</tool_call>"),
        (Llama3JsonParser, call),
        (MistralParser, f"[TOOL_CALLS][{call}]"),
        (MistralParser, f"[TOOL_CALLS]f{written}"),
        (JsonList, f"[{call}]"),
    ):
        ((name, found),) = parse(maker(kind), text)
        assert (name, json.loads(found)) == ("f", arguments)
    pythonic = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    ((name, found),) = parse(maker(PythonicParser), f"[f({pythonic})]")
    assert json.loads(found) == arguments


def test_a_call_that_grows_is_told_while_it_grows():
    parser = HermesParser()
    assert parser.feed('Hm <tool_call>{"name": "f", "arguments"') == [Text("Hm ")]
    assert parser.feed(': {"a": "on') == [CallBegun("f"), CallArguments('{"a": "on')]
    assert parser.feed("e") == [CallArguments("e")]
    assert parser.feed('"}}</tool_call>') == [CallArguments('"}')] and parser.finish() == []


def test_ids_of_calls_are_of_the_form_their_family_takes():
    ids = {MistralParser.new_call_id() for _ in range(100)}
    assert len(ids) == 100 and all(len(i) == 9 and i.isascii() and i.isalnum() for i in ids)
    assert HermesParser.new_call_id().startswith("call_")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("... <tool_call> ...", HermesParser),
        ("... [TOOL_CALLS] ...", MistralParser),
        ("<|start_header_id|> ... <|python_tag|>", Llama3JsonParser),
        ("<|python_start|> [func_name1(params)]", PythonicParser),
        ("plain", HermesParser),
    ],
)
def test_auto_takes_the_parser_of_the_templates_family(template, expected):
    assert tool_parser("auto", template) is expected


def test_a_users_parser_is_named_by_import_path_and_a_wrong_name_says_what_is_right():
    assert tool_parser("millrace.deploy.api.parsers.hermes:HermesParser", "") is HermesParser
    assert tool_parser("none", "<tool_call>") is None and reasoning_parser("none", "</think>") is None
    for name, message in (
        ("hermse", "must be auto, none, hermes, llama3_json, mistral, pythonic or package.module:Class"),
        ("nowhere.at_all:X", "No module named 'nowhere'"),
        ("json:Nothing", "has no attribute 'Nothing'"),
        ("json:JSONDecoder", "must be a subclass of millrace.deploy.api.parsers.ToolParser"),
    ):
        with pytest.raises(ConfigError, match=message):
            tool_parser(name, "")

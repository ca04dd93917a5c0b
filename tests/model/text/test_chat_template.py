"""Chat templates against transformers' apply_chat_template, special tokens spelled by users, and hostile templates."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from millrace.model.errors import TemplateError
from millrace.model.text.chat_template import PROMPT_CHARS, ChatTemplate, missing_template
from millrace.model.text.tokenizer import Tokenizer
from tests.model.tiny_tokenizers import VOCAB_SIZE, make_tokenizer

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello there, how are you?"}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "  padded text \n"}],
    [
        {"role": "user", "content": "What is your name?"},
        {"role": "assistant", "content": " My name is Mill. \n"},
        {"role": "user", "content": "Ünïcödé 🙂 日本語 < and > and [ and ]"},
    ],
    [{"role": "user", "content": ""}],
    [{"role": "user", "content": "> quoted, and it ends in <"}],
    [{"role": "user", "content": "\n\nlines\n\n"}],
]


@pytest.fixture(scope="module")
def template(root: Path, tokenizer: Tokenizer) -> ChatTemplate:
    template = ChatTemplate.read(root, tokenizer)
    assert template is not None
    return template


def encode(template: ChatTemplate, tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    prompt = template.render(messages, **options)
    return tokenizer.encode_chat(prompt.marked, prompt.mark)


def expected(theirs: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    options = {"add_generation_prompt": True, **options}
    return theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)


@pytest.mark.parametrize("messages", CHATS)
def test_chats_get_the_ids_that_transformers_gives(
    template: ChatTemplate, tokenizer: Tokenizer, theirs: PreTrainedTokenizerBase, messages: list[dict[str, Any]]
) -> None:
    assert encode(template, tokenizer, messages) == expected(theirs, messages)


@pytest.mark.parametrize("text", ["Once upon a", "Once upon a ", "  a"])
def test_the_final_message_is_continued_where_transformers_continues_it(
    template: ChatTemplate, tokenizer: Tokenizer, theirs: PreTrainedTokenizerBase, text: str
) -> None:
    messages = [{"role": "user", "content": "A story"}, {"role": "assistant", "content": text}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert encode(template, tokenizer, messages, **options) == expected(theirs, messages, **options)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_spelled_special_tokens_are_plain_text(
    template: ChatTemplate, tokenizer: Tokenizer, data: st.DataObject
) -> None:
    spelled = sorted(tokenizer.special_tokens)
    pieces = [
        *spelled,
        *(token[: len(token) // 2] for token in spelled),
        *(token[2:] for token in spelled),
        "hi",
        " ",
        "\n",
    ]
    texts = st.lists(st.sampled_from(pieces), min_size=1, max_size=5).map("".join)
    first, second = data.draw(texts), data.draw(texts)
    honest = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    hostile = [{**honest[0], "content": first}, honest[1], {**honest[2], "content": second}]
    prompt = template.render(hostile)
    ids = tokenizer.encode_chat(prompt.marked, prompt.mark)
    specials = [token_id for token_id in ids if token_id in tokenizer.special_ids]
    assert specials == [i for i in encode(template, tokenizer, honest) if i in tokenizer.special_ids]
    assert tokenizer.decode(ids, skip_special_tokens=False).replace(" ", "") == prompt.text.replace(" ", "")


def test_marked_text_is_tokenised_in_its_context(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    messages = [{"role": "user", "content": "Hello there\n"}]
    plain = template.render(messages)
    assert plain.mark is None
    mark = "\ufdd5"  # as if something in the text had to be marked: the ids of all the rest stay the same
    assert tokenizer.encode_chat(plain.text.replace("there", f"th{mark}ere"), mark) == tokenizer.encode_chat(plain.text)


def test_tokens_split_over_two_texts_do_not_join(tmp_path: Path) -> None:
    make_tokenizer("chatml", tmp_path, VOCAB_SIZE)
    tokenizer = Tokenizer.read(tmp_path)
    template = ChatTemplate("{% for m in messages %}{{ m.content | trim }}{% endfor %}", tokenizer)
    messages = [{"role": "user", "content": " <|im_ "}, {"role": "user", "content": "\nend|> "}]
    assert not tokenizer.special_ids & set(encode(template, tokenizer, messages))


def test_marks_are_characters_that_occur_in_no_message(tmp_path: Path) -> None:
    make_tokenizer("chatml", tmp_path, VOCAB_SIZE)
    tokenizer = Tokenizer.read(tmp_path)
    template = ChatTemplate.read(tmp_path, tokenizer)
    assert template is not None
    odd = "\ufdd0 x <|im_end|>"
    ids = encode(template, tokenizer, [{"role": "user", "content": odd}])
    assert "\ufdd0 x <|im_end|>" in tokenizer.decode(ids, skip_special_tokens=False)
    with pytest.raises(TemplateError, match="noncharacters"):
        template.render([{"role": "user", "content": "<|im_end|>" + "".join(map(chr, range(0xFDD0, 0xFDF0)))}])


# ---- what a template sees --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("chatml")
    make_tokenizer("chatml", path, VOCAB_SIZE)
    return Tokenizer.read(path)


def render(source: str, tokenizer: Tokenizer, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    template = ChatTemplate(source, tokenizer, now=lambda: datetime(2026, 11, 20))
    return template.render(messages or [{"role": "user", "content": "x"}], **options).text


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content }}", "one\ntwo"),
        ("{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}", "[one][two]"),
        ("{% for part in messages[0]['content'] %}[{{ part['text'] }}]{% endfor %}", "[one][two]"),
    ],
)
def test_text_parts_are_joined_unless_the_template_takes_parts(source: str, text: str, chatml: Tokenizer) -> None:
    assert render(source, chatml, [{"role": "user", "content": PARTS}]) == text


def test_a_part_that_is_no_text_is_refused_by_its_message(chatml: Tokenizer) -> None:
    with pytest.raises(TemplateError, match=r"messages\[0\].content: this model takes text parts only"):
        render("", chatml, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<|im_start|>|<|im_end|>"),
        ("{{ strftime_now('%d %b %Y') }}", "20 Nov 2026"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ messages | tojson(indent=1) }}", json.dumps([{"role": "user", "content": "x"}], indent=1)),
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{% generation %}g{% endgeneration %}", "g"),
        ("{{ enable_thinking }} {{ missing is defined }}", "False False"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro f(a) %}<{{ a }}>{% endmacro %}{{ f('x') ~ 'y' * 2 }}", "<x>yy"),
        ("{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{% endfor %}", "1True1"),
        ("{{ messages | map(attribute='role') | join(', ') }}{{ 'a-b'.split('-') | last | upper }}", "userB"),
        ("{{ documents[0].title }}", "Doc"),
        ("{{ 'x: %s' % 5 }} {{ '%s-%s' | format(1, 2) }} {{ '{}'.format('q') }}", "x: 5 1-2 q"),
        ("{{ 'aa'.replace('a', 'bc') }} {{ 'ab' | replace('a', 'c') }}", "bcbc cb"),
    ],
)  # fmt: skip
def test_templates_have_what_transformers_gives_them(source: str, text: str, chatml: Tokenizer) -> None:
    assert render(source, chatml, documents=[{"title": "Doc"}], kwargs={"enable_thinking": False}) == text


def test_documents_and_kwargs_cannot_spell_special_tokens_either(chatml: Tokenizer) -> None:
    template = ChatTemplate("{{ documents[0].text }}{{ note }}", chatml)
    prompt = template.render(
        [{"role": "user", "content": "x"}], documents=[{"text": "<|im_end|>"}], kwargs={"note": "<|im_start|>"}
    )
    assert not chatml.special_ids & set(chatml.encode_chat(prompt.marked, prompt.mark))


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "x"},
        {"tokenize": False},
        {"tools": 1},
        {"messages": "x"},
        {"bos_token": "x"},
        {"nested": {"a": 1}},
        {"listed": [1]},
        {"not a name": 1},
        {f"k{i}": 1 for i in range(100_000)},
    ],
)
def test_only_plain_kwargs_under_free_names_pass(kwargs: dict[str, Any], chatml: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="chat_template_kwargs"):
        render("", chatml, kwargs=kwargs)


def test_what_the_template_refuses_reaches_the_caller_in_its_words(chatml: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="Only user and assistant"):
        render("{{ raise_exception('Only user and assistant roles are supported!') }}", chatml)


def test_continuing_needs_a_text_that_the_template_shows(chatml: Tokenizer) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(TemplateError, match="leaves out"):
        render("nothing", chatml, **options)
    with pytest.raises(TemplateError, match="add_generation_prompt = false"):
        render("{{ messages[0].content }}", chatml, continue_final_message=True)
    with pytest.raises(TemplateError, match="no text to continue"):
        render("", chatml, [{"role": "assistant", "content": None}], **options)


def test_templates_are_found_in_each_place_they_are_kept(tmp_path: Path) -> None:
    make_tokenizer("chatml", tmp_path, VOCAB_SIZE)
    file = tmp_path / "chat_template.jinja"
    source = file.read_text()
    file.unlink()
    assert ChatTemplate.read(tmp_path, Tokenizer.read(tmp_path)) is None
    assert "--chat-template" in str(missing_template("m"))
    config = tmp_path / "tokenizer_config.json"
    values = json.loads(config.read_text())
    for stored in (source, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": source}]):
        config.write_text(json.dumps({**values, "chat_template": stored}))
        found = ChatTemplate.read(tmp_path, Tokenizer.read(tmp_path))
        assert found is not None and found.source == source


# ---- hostile templates -----------------------------------------------------------------------------------------------

BAD_AT_LOAD = [
    "{% for x in messages %}",
    "{{ x | attr('__class__') }}",
    "{% for x in messages recursive %}{{ loop(x) }}{% endfor %}",
    "{{ 'x' | wordwrap(1) }}",
    "{% " * 50_000,
]

BAD_AT_RENDER = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': 'x'}) }}",
    "{{ messages[0].update({'role': 'x'}) }}{{ messages.append(1) }}",
    "{% include 'config.json' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{% for a in range(10 ** 10) %}{% endfor %}",
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% set xs = ('a' * 100000) | list %}{% for a in xs %}{% for b in xs %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10 ** 9 }}",
    "{{ 10 ** (10 ** 10) }}",
    "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set a = 'ab' %}" + "{% set a %}{{ a }}{{ a }}{% endset %}" * 60,
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}x{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'.zfill(1000000000) }}",
    "{{ 'a'.encode().ljust(1000000000) }}",
    "{{ 'a' | indent(1000000000, true) }}",
    "{{ 1.5 | round(1000000000) }}",
    "{{ (5).to_bytes(1000000000, 'big') }}",
    "{% set x = 'a' * 1000000 %}{{ x.replace('a', x) }}",
    "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
    "{% set x = 'a' * 1000000 %}{{ x.join(x) }}",
    "{% set x = 'a' * 1000000 %}{{ x | join(x) }}",
    "{% set x = 'a' * 1000000 %}{{ [x] | map('replace', 'a', x) | list | length }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{% for i in range(1000000) %}a{% endfor %}{% for i in range(1000000) %}a{% endfor %}",
    "{{ undefined_thing.attribute }}",
    "{{ 1 / 0 }}",
    "{{ messages['content'] + 5 }}",
]  # fmt: skip


@pytest.mark.parametrize("source", BAD_AT_LOAD)
def test_a_template_that_cannot_run_is_refused_when_it_is_read(source: str, chatml: Tokenizer) -> None:
    with pytest.raises(TemplateError, match="chat template"):
        ChatTemplate(source, chatml)


@pytest.mark.slow  # two of them use up the whole budget
@pytest.mark.parametrize("source", BAD_AT_RENDER)
def test_a_hostile_template_ends_in_an_error_and_soon(source: str, chatml: Tokenizer) -> None:
    start = time.process_time()
    with pytest.raises(TemplateError):
        render(source, chatml)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("source", ["{{ messages.__class__ }}", "{{ '{0.__class__}'.format('x') }}", "{{ self._x }}"])
def test_private_attributes_are_not_there(source: str, chatml: Tokenizer) -> None:
    assert render(source, chatml) == ""


def test_a_prompt_is_bounded_and_one_just_within_the_bound_is_rendered(chatml: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    half = "a" * (PROMPT_CHARS // 2)
    assert len(render(source, chatml, [{"role": "user", "content": half}] * 2)) == PROMPT_CHARS
    with pytest.raises(TemplateError, match="longer than"):
        render(source, chatml, [{"role": "user", "content": half + "a"}] * 2)


def test_the_bound_of_a_prompt_grows_with_the_context(chatml: Tokenizer) -> None:
    template = ChatTemplate("{% for m in messages %}{{ 'a' + m.content | trim }}{% endfor %}", chatml)
    messages = [{"role": "user", "content": "a" * 1_060_000}]
    with pytest.raises(TemplateError, match="longer than|at most"):
        template.render(messages)
    template.allow(16 * 1_000_000)
    assert len(template.render(messages).text) == 1_060_001


@dataclass(frozen=True)
class ManyTokens:
    """What a template sees of a tokenizer like Gemma's, of which thousands of tokens are special."""

    special_tokens: dict[str, int]
    named_tokens: dict[str, str] = field(default_factory=dict)


def test_six_thousand_special_tokens_take_about_as_long_as_ten() -> None:
    text = "It's <b>bold</b>, <unused> and [x] <u> here. " * 1000
    took_s = []
    for num_tokens in (10, 6000):
        tokens = {f"<unused{index}>": index for index in range(num_tokens)} | {"<eos>": 6001}
        template = ChatTemplate("{{ messages[0].content }}", ManyTokens(tokens))
        runs = []
        for _ in range(3):
            begun = time.process_time()
            rendered = template.render([{"role": "user", "content": text + "<unused3><eos>"}])
            runs.append(time.process_time() - begun)
        assert rendered.mark and rendered.marked.endswith(f"<{rendered.mark}unused3><{rendered.mark}eos>")
        took_s.append(min(runs))
    assert took_s[1] < 8 * took_s[0] + 0.005, "one search for each token took 50 times as long"

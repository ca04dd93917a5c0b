"""Templates get each message in the form that they show, and see it as it was sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from millrace.model.errors import TemplateError
from millrace.model.text.chat_template import ChatTemplate
from millrace.model.text.tokenizer import Tokenizer
from tests.model.text.templates.families import ASKS_FOR_NONE, PARTS_ONLY, THINKING, TOOLS_IN_SYSTEM
from tests.model.tiny_tokenizers import make_tokenizer

SPELLED = "a <|im_end|> b <think>c</think>d <"
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome"}'}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"enum": ["<", ">", "="]}}}},
}
PRINTED = [
    "{{ tools | string }}",
    "{{ tools }}{{ messages }}",
    "{{ messages | tojson(ensure_ascii=true) }}{{ tools | tojson }}",
    "{{ messages[0].content.split('<|im_end|>') }}",
    "{{ messages[0].content.split('</think>')[-1] ~ messages[0].content | length }}",
    "{{ '<|im_end|>' in messages[0].content }}{{ messages[0].content | replace('<|im_end|>', '!') }}",
    "{{ messages[0].content.endswith('<') }}{{ messages[0].content == '" + SPELLED + "' }}",
    "{{ '%s' % messages[0].content }}{{ '{}'.format(messages[0].content) }}{{ messages[0].content | upper }}",
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].content) | indent(2) }}{{ tools | map('string') | join }}",
    "{{ 'safe <' | safe + messages[0].content }}{{ messages[0].content | list | last }}",
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    root: Path = tmp_path_factory.mktemp("chatml")
    make_tokenizer("chatml", root, 700)
    return Tokenizer.read(root)


def render(source: str, tokenizer: Tokenizer, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate(source, tokenizer).render(messages, **options).text


@pytest.mark.parametrize("source", PRINTED)
def test_a_template_prints_and_searches_texts_as_they_were_sent(source: str, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": SPELLED}]
    (theirs,), _ = render_jinja_template([messages], tools=[TOOL], chat_template=source, add_generation_prompt=True)
    ours = ChatTemplate("<|im_start|>" + source, tokenizer).render(messages, tools=[TOOL])
    assert ours.text == "<|im_start|>" + theirs
    ids = tokenizer.encode_chat(ours.marked, ours.mark)
    assert tokenizer.decode(ids, skip_special_tokens=False) == ours.text
    assert [i for i in ids if i in tokenizer.special_ids] == [tokenizer.special_tokens["<|im_start|>"]]


def test_text_taken_apart_and_joined_by_a_template_spells_no_special_token(tokenizer: Tokenizer) -> None:
    source = "{{ messages[0].content.split('</think>') | join }}{{ messages[0].content.replace('</think>', '') }}"
    rendered = ChatTemplate(source, tokenizer).render([{"role": "user", "content": "<|im_</think>end|>"}])
    assert rendered.text == "<|im_end|>" * 2
    assert not tokenizer.special_ids & set(tokenizer.encode_chat(rendered.marked, rendered.mark))


def test_a_template_that_reads_parts_only_gets_a_string_as_a_part(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "Hello"}]
    assert render(PARTS_ONLY, tokenizer, *messages).startswith("<|begin|>System: Be kind<|im_end|>\nUser: Hello")
    one_part = "{{ messages[0].content[0].text }}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render(one_part, tokenizer, {"role": "user", "content": "x"}) == "x"
    assert render(one_part, tokenizer, {"role": "user", "content": parts}) == "one\ntwo"


def test_each_role_gets_the_form_of_content_that_the_template_reads_for_it(tokenizer: Tokenizer) -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for part in m.content %}[{{ part.text }}]{% endfor %}"
        "{% else %}{{ m.content | trim }};{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": parts}, {"role": "user", "content": parts}]
    assert render(source, tokenizer, *messages, {"role": "user", "content": "x"}) == "one\ntwo;[one][two][x]"


@pytest.mark.parametrize("content", [None, ""])
def test_calls_without_text_are_shown_by_a_template_that_asks_for_none(content: Any, tokenizer: Tokenizer) -> None:
    turn = {"role": "assistant", "content": content, "tool_calls": [CALL]}
    assert "<calls>function<sep>f\n```json\n" in render(ASKS_FOR_NONE, tokenizer, turn)
    del turn["content"]
    assert "<calls>" in render(ASKS_FOR_NONE, tokenizer, turn)
    assert render("{{ messages[0].content is none }}{{ messages[0].tool_calls }}", tokenizer, turn).startswith("True")


def test_a_turn_without_text_is_never_shown_as_none(tokenizer: Tokenizer) -> None:
    turn = {"role": "assistant", "content": None}
    for shown in ("m.content", "m.content | string", "m.content ~ ''", "m.content if m.content is string else 'null'"):
        assert render("{% for m in messages %}{{ " + shown + " }}{% endfor %}", tokenizer, turn) == ""
    source = "{% for m in messages %}{{ m.content if m.content is string else m.content | tojson }}{% endfor %}"
    assert render(source, tokenizer, turn | {"tool_calls": [CALL]}) == ""


@pytest.mark.parametrize("source", [THINKING, "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}"])
def test_a_developer_speaks_as_system_where_the_template_knows_no_developer(source: str, tokenizer: Tokenizer) -> None:
    user = {"role": "user", "content": "Hi"}
    system, developer = ({"role": role, "content": "Be brief"} for role in ("system", "developer"))
    assert render(source, tokenizer, developer, user) == render(source, tokenizer, system, user)
    assert "Be brief" in render(source, tokenizer, developer, user)
    knows = source + "{% if messages[0].role == 'developer' %}{{ messages[0].content }} as developer{% endif %}"
    assert "Be brief as developer" in render(knows, tokenizer, developer, user)


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_a_message_that_the_template_would_leave_out_is_refused(role: str, tokenizer: Tokenizer) -> None:
    source = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}{% endfor %}"
    user = {"role": "user", "content": "Hi"}
    with pytest.raises(TemplateError, match=r"messages\[1\].role = '(system|tool)': this model's chat template leaves"):
        render(source, tokenizer, user, {"role": role, "content": "Be brief"})
    assert render(source, tokenizer, user, {"role": role, "content": ""}) == "Hi"


def test_arguments_are_text_where_a_mapping_would_be_shown_as_python_data(tokenizer: Tokenizer) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
        "{% endfor %}"
    )
    assert render(source, tokenizer, turn) == '{"city": "Rome"}'
    assert '"arguments": {"city": "Rome"}' in render(TOOLS_IN_SYSTEM, tokenizer, turn)
    calls = [{**CALL, "function": {"name": "f", "arguments": json.loads(CALL["function"]["arguments"])}}]
    assert render(source, tokenizer, turn | {"tool_calls": calls}) == '{"city": "Rome"}'


def test_reasoning_reaches_a_template_under_each_of_its_names(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.thinking }}|{{ m.reasoning_content }};{% endfor %}"
    turns = [
        {"role": "assistant", "content": "", name: "Hm"} for name in ("reasoning_content", "thinking", "reasoning")
    ]
    assert render(source, tokenizer, *turns) == "Hm|Hm;" * 3


def test_the_end_of_a_continued_message_leaves_no_trace(tokenizer: Tokenizer) -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    turn = {"role": "assistant", "content": "Once upon <|im_end|> a "}
    source = "{{ messages[0].content }}|{{ messages | tojson(ensure_ascii=true) }}"
    text = render(source, tokenizer, turn, **options)
    assert text == turn["content"] + '|[{"role": "assistant", "content": "' + turn["content"]


def test_a_variable_that_the_template_reads_can_be_set_and_no_other(tokenizer: Tokenizer) -> None:
    source = (
        "{% if not tools_in_user_message is defined %}{% set tools_in_user_message = true %}{% endif %}"
        "{% set own = 1 %}{% for m in messages %}{% set content = m.content %}{{ content }}{% endfor %}"
        "{{ tools_in_user_message }} {{ keep_past_thinking | default(false) }} {{ own }}"
        "{{ raise_exception is defined }}"
    )
    user = {"role": "user", "content": "x"}
    kwargs = {"tools_in_user_message": False, "keep_past_thinking": "yes", "enable_thinking": True}
    assert render(source, tokenizer, user, kwargs=kwargs) == "xFalse yes 1True"
    for name in ("own", "content", "raise_exception", "messages", "bos_token", "tols_in_user_message"):
        with pytest.raises(TemplateError, match=f"{name}' is not read by .* reads .*keep_past_thinking") as caught:
            render(source, tokenizer, user, kwargs={name: 1})
        assert caught.value.param == "chat_template_kwargs"

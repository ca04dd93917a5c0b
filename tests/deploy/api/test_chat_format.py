"""The chat format of the served model: parsers, sampling parameters, start of the reasoning."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.deploy.api.assistant_turn import ToolCallArguments, ToolCallBegun
from millrace.deploy.api.chat.body import ChatBody
from millrace.deploy.api.chat_format import ChatFormat
from millrace.deploy.api.parsers.interface import Reasoning, Text
from millrace.deploy.api.schema.validation import read_body
from millrace.deploy.api.service import Service
from millrace.deploy.api.tokenize.routes import TokenizeRoutes
from millrace.deploy.config import ServerConfig
from millrace.deploy.errors import ApiError
from millrace.model.checkpoint.hub import bundled_model_path
from millrace.model.text.chat_template import ChatTemplate
from millrace.model.text.tokenizer import Tokenizer
from millrace.stages.errors import ConfigError
from millrace.stages.params import SamplingParams

TOOLS = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]
NAMED = {"type": "function", "function": {"name": "g"}}

QWEN3 = """\
{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"""
ALWAYS = """\
{{ 'Think in <think></think>. ' + messages[0].content }}
{%- if add_generation_prompt %}{{ '\n<think>\n' }}{% endif %}"""
R1 = "{{ messages[0].content + '<｜Assistant｜>' }}{# '</think>' #}"
FAILS = "{{ raise_exception('</think>') }}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.read(bundled_model_path())


def chat_format(tokenizer: Tokenizer, template: str | None, **settings: Any) -> ChatFormat:
    made = None if template is None else ChatTemplate(template, tokenizer)
    return ChatFormat(
        ServerConfig(**settings), SimpleNamespace(encoder=SimpleNamespace(template=made), tokenizer=tokenizer)
    )


def settle(chat_format: ChatFormat, **fields: Any) -> Any:
    body, _ = read_body(ChatBody, {"messages": [{"role": "user", "content": "hi"}]} | fields, False)
    return chat_format.apply(body, body.sampling_params(SamplingParams()))


def told(chat_format: ChatFormat, text: str, **fields: Any) -> list[Any]:
    _, make_turn = settle(chat_format, **fields)
    return [Text(text)] if make_turn is None else make_turn().read(text, (), True)


@pytest.mark.parametrize(
    ("template", "fields", "thoughts"),
    [
        (QWEN3, {}, False),
        (QWEN3, {"chat_template_kwargs": {"enable_thinking": False}}, None),
        (QWEN3, {"reasoning_effort": "none"}, None),
        (QWEN3, {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, False),
        (ALWAYS, {}, True),
        (ALWAYS, {"add_generation_prompt": False}, False),
        (R1, {}, True),
        (FAILS, {}, False),
        ("no thoughts", {}, None),
        (None, {}, None),
    ],
)
def test_thoughts_begin_where_the_prompt_leaves_them(tokenizer, template, fields, thoughts):
    """Reasoning begins at once (True), at its marker (False) or never (None)."""
    some = chat_format(tokenizer, template)
    found = [type(piece) for piece in told(some, "a</think>b", **fields)]
    assert found == ([Reasoning, Text] if thoughts else [Text])
    marked = [type(piece) for piece in told(some, "<think>a</think>b", **fields)]
    assert marked == ([Text] if thoughts is None else [Reasoning, Text])


@pytest.mark.parametrize(("begun", "kind"), [("<think>I", Reasoning), ("<think>I</think>Yes", Text), ("Yes", Text)])
def test_a_turn_that_is_continued_goes_on_where_it_was(tokenizer, begun, kind):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": begun}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    for template in (QWEN3, R1):
        assert told(chat_format(tokenizer, template), " am", **fields) == [kind(" am")]


def test_a_budget_is_told_in_the_ids_of_the_marks(tokenizer):
    ids = [tuple(tokenizer.encode(mark, add_special_tokens=False)) for mark in ("<think>", "</think>")]
    for name, template, is_open in (("thinking_budget", QWEN3, False), ("thinking_token_budget", ALWAYS, True)):
        params, _ = settle(chat_format(tokenizer, template), **{name: 7})
        given = params.thinking_budget
        assert (given.num_tokens, given.start_ids, given.end_ids, given.is_open) == (7, *ids, is_open)
    closed, _ = settle(chat_format(tokenizer, QWEN3), thinking_budget=7, reasoning_effort="none")
    assert closed.thinking_budget is None, "thoughts that are over need no budget"
    for name in ("thinking_budget", "thinking_token_budget"):
        with pytest.raises(ApiError, match="does not mark its reasoning") as caught:
            settle(chat_format(tokenizer, "no thoughts"), **{name: 7})
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


@pytest.mark.parametrize(
    ("template", "fields", "section"),
    [
        (ALWAYS, {}, True),
        (ALWAYS, {"reasoning_effort": "none"}, True),  # as the template does not obey
        (R1, {}, True),
        (R1, {"reasoning_effort": "none"}, None),
        (QWEN3, {}, False),
        (QWEN3, {"reasoning_effort": "none"}, None),
        (QWEN3, {"chat_template_kwargs": {"enable_thinking": False}}, None),
        ("no thoughts", {}, None),
    ],
)
@pytest.mark.parametrize("form", [{"response_format": {"type": "json_object"}}, {"tools": TOOLS, "tool_choice": NAMED}])
def test_a_given_form_follows_the_thoughts_where_there_are_any(tokenizer, template, fields, section, form):
    """The section must come (True), may come (False), or there is none (None)."""
    params, _ = settle(chat_format(tokenizer, template), thinking_budget=7, **form, **fields)
    after = params.structured_outputs.after
    assert (None if after is None else after.is_open) == section
    assert (params.thinking_budget is None) == (section is None)


def test_an_answer_in_a_given_form_is_read_as_that_form(tokenizer):
    some = chat_format(tokenizer, QWEN3, tool_call_parser="mistral")
    params, _ = settle(some, tools=TOOLS, tool_choice="required")
    assert params.structured_outputs is not None and params.skip_special_tokens
    calls = [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]
    pieces = told(some, str(calls).replace("'", '"'), tools=TOOLS, tool_choice="required")
    assert [(piece.index, getattr(piece, "name", "{}")) for piece in pieces] == [
        (0, "f"),
        (0, "{}"),
        (1, "g"),
        (1, "{}"),
    ]
    begun, arguments = told(some, ' {"a": 1}', tools=TOOLS, tool_choice=NAMED)
    assert begun == ToolCallBegun(0, begun.id, "g") and arguments == ToolCallArguments(0, '{"a": 1}')
    assert len(begun.id) == 9, "an id as the model's own template wants it back"


def unread(tokenizer: Tokenizer, template: str | None, **fields: Any) -> list[str]:
    body, _ = read_body(ChatBody, {"messages": [{"role": "user", "content": "hi"}]} | fields, False)
    return chat_format(tokenizer, template).unread(body)


SHOWS_TOOLS = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools and not hidden %}{{ tools | tojson }}{% endif %}"
)


def test_tokenize_names_tools_that_the_template_does_not_show(tokenizer):
    def ignored(template: str | None, **fields: Any) -> list[str]:
        made = chat_format(tokenizer, template)
        service: Any = SimpleNamespace(
            read_body=partial(read_body, strict_fields=False),
            adapter_of=lambda name: None,
            require_chat_format=lambda: made,
        )
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS} | fields
        parts: Any = SimpleNamespace(service=service, threads=None, generation=None)
        return TokenizeRoutes(parts)._tokenize_body(body)[1]

    assert ignored(QWEN3) == ["tools"]
    assert ignored(SHOWS_TOOLS) == ignored(None) == ignored(QWEN3, tools=None) == []
    assert ignored(SHOWS_TOOLS, chat_template_kwargs={"hidden": True}) == ["tools"]


def test_tools_that_the_template_does_not_show_are_named_or_refused(tokenizer):
    shows = SHOWS_TOOLS
    assert unread(tokenizer, QWEN3, tools=TOOLS) == ["tools"]
    assert unread(tokenizer, QWEN3, tools=TOOLS, tool_choice="none") == []
    assert unread(tokenizer, QWEN3, documents=[{"text": "x"}]) == ["documents"]
    assert unread(tokenizer, shows, tools=TOOLS, tool_choice="required") == []
    assert unread(tokenizer, shows, tools=TOOLS, chat_template_kwargs={"hidden": True}) == ["tools"]
    assert unread(tokenizer, None, tools=TOOLS, tool_choice="required") == []
    for choice in ("required", NAMED):
        with pytest.raises(ApiError, match="chat template shows no tools") as caught:
            unread(tokenizer, QWEN3, tools=TOOLS, tool_choice=choice)
        assert (caught.value.status, caught.value.param) == (400, "tool_choice")


def test_a_server_with_a_parser_that_there_is_not_does_not_start():
    for settings in ({"tool_call_parser": "hermse"}, {"tool_call_parser": ""}, {"reasoning_parser": "no:X"}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            Service(ServerConfig(**settings))


def test_special_tokens_are_shown_to_a_parser_whose_marks_they_are_and_to_no_other(tokenizer):
    mistral = chat_format(tokenizer, "[TOOL_CALLS]")
    assert settle(mistral, tools=TOOLS)[0].skip_special_tokens is False
    assert settle(mistral)[0].skip_special_tokens and settle(mistral)[1] is None
    assert settle(mistral, tools=TOOLS, tool_choice="none")[1] is None
    assert settle(chat_format(tokenizer, "<tool_call>"), tools=TOOLS)[0].skip_special_tokens


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"tool_call_parser": "none"}, "--tool-call-parser"), ({"enable_auto_tool_choice": False}, "--enable-auto-tool")],
)
def test_a_choice_of_the_models_own_may_be_switched_off_and_no_other(tokenizer, settings, flag):
    some = chat_format(tokenizer, None, **settings)
    with pytest.raises(ApiError, match=flag) as caught:
        settle(some, tools=TOOLS)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tool_choice")
    assert settle(some, tools=TOOLS, tool_choice="none")[1] is None
    assert settle(some, tools=TOOLS, tool_choice="required")[1] is not None

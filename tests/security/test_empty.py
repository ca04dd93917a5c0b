"""Empty input."""

from __future__ import annotations

import pytest

from tests.security.oracle import CHAT, TEXT, refused


@pytest.mark.parametrize("prompt", ["", [], [""], ["a", ""], [[]]])
def test_an_empty_prompt_is_refused_as_such(server, prompt):
    for stream in (False, True):
        body = {"prompt": prompt, "stream": stream}
        refused(server, lambda body=body: server.post(TEXT, body), code="empty_prompt", param="prompt")


@pytest.mark.parametrize("messages", [[], None, {}, "", 5, [[]], [None], [{}]])
def test_messages_that_are_none_are_refused(server, messages):
    refused(server, lambda: server.post(CHAT, {"messages": messages}), param="messages")


@pytest.mark.parametrize("content", [None, {}, 5, True, [None], [5]])
def test_content_that_is_no_text_is_refused(server, content):
    body = {"messages": [{"role": "user", "content": content}]}
    refused(server, lambda: server.post(CHAT, body), param="messages")


@pytest.mark.parametrize("text", [" ", "\n\t ", "\x00", "\u200b", "\ufeff"])
def test_white_space_is_a_prompt(server, text):
    assert server.post(TEXT, {"prompt": text, "max_tokens": 1}).status == 200
    assert server.post(CHAT, {"messages": [{"role": "user", "content": text}], "max_tokens": 1}).status == 200


@pytest.mark.parametrize("content", ["", []])
def test_a_turn_may_be_empty(server, content):
    assert server.post(CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 1}).status == 200


def test_a_body_without_its_main_field_says_which(server):
    refused(server, lambda: server.post(TEXT, {}), code="missing_required_parameter", param="prompt")
    refused(server, lambda: server.post(CHAT, {}), code="missing_required_parameter", param="messages")

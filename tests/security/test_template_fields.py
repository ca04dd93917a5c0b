"""Nothing a client sends becomes a template, or a setting of one."""

from __future__ import annotations

import pytest

from tests.security.oracle import CHAT, LONG_BODY_S, refused

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ ''.__class__.__mro__ }}", ["x"], 5])
def test_a_template_of_the_client_is_refused(server, template):
    body = {"messages": MESSAGES, "chat_template": template}
    refused(server, lambda: server.post(CHAT, body), param="chat_template")


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "{{ 1 }}"},
        {"tokenize": False},
        {"tools": [{"type": "function"}]},
        {"messages": []},
        {"add_generation_prompt": False},
        {"enable_thinking": {"nested": {"deep": [1]}}},
        {"enable_thinking": [1]},
        {"date_string": "x" * 5000},
        {f"k{i}": 1 for i in range(9_000)},
        "x",
        [1],
    ],
    ids=lambda kwargs: str(kwargs)[:24],
)
def test_only_scalars_under_free_names_are_taken_as_template_kwargs(server, kwargs):
    body = {"messages": MESSAGES, "chat_template_kwargs": kwargs}
    for path in (CHAT, "/tokenize"):
        refused(server, lambda path=path: server.post(path, body), param="chat_template_kwargs", budget_s=LONG_BODY_S)


def test_a_hundred_thousand_kwargs_are_refused_by_their_number(server):
    body = {"messages": MESSAGES, "chat_template_kwargs": {f"k{i}": 1 for i in range(100_000)}}
    answer = refused(server, lambda: server.post(CHAT, body), code="invalid_json", budget_s=LONG_BODY_S)
    assert "at most" in answer.error["message"]

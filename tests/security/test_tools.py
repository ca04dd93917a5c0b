"""Tools with types, patterns and names that are none, and far too many of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.security.oracle import CHAT, LONG_BODY_S, refused

MESSAGES = [{"role": "user", "content": "hi"}]


def tool(name: Any = "f", **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"} | schema}}


WRONG = [
    tool('f"; DROP'),
    tool("f\ng"),
    tool("f'"),
    tool(""),
    tool("x" * 10_000),
    tool(["f"]),
    tool(type="strin"),
    tool(type={"$ref": "#"}),
    tool(properties={"a": {"type": "\x00"}}),
    tool(properties={"a": {"pattern": "("}}),
    tool(properties={"a": {"pattern": "(a+" * 200}}),
    tool(properties={"a": {"pattern": "[" * 1000}}),
    tool(properties={"a": {"pattern": "a" * 100_000}}),
    tool(properties={"a": {"pattern": None, "type": 5}}),
    tool(patternProperties={"**": {}}),
    {"type": "function"},
    {"type": "code_interpreter"},
    {},
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong)[:60])
@pytest.mark.parametrize("choice", [None, "required"])
def test_a_wrong_tool_is_named_by_its_place(server, wrong, choice):
    body = {"messages": MESSAGES, "tools": [tool("good"), wrong], "tool_choice": choice}
    answer = refused(server, lambda: server.post(CHAT, body))
    assert answer.error["param"].startswith("tools[1]")


@pytest.mark.parametrize("tools", [{}, "f", 5, [5], [None], [[]]])
def test_what_is_no_list_of_tools_is_refused(server, tools):
    answer = refused(server, lambda: server.post(CHAT, {"messages": MESSAGES, "tools": tools}))
    assert answer.error["param"].startswith("tools")


def test_ten_thousand_tools_are_refused_by_the_first_too_many_or_before_they_are_looked_at(server):
    few = {"messages": MESSAGES, "tools": [{"function": {}}] * 5_000}
    answer = refused(server, lambda: server.post(CHAT, few), budget_s=LONG_BODY_S)
    assert "tools[1024]" in answer.error["message"]
    many = {"messages": MESSAGES, "tools": [tool(f"f{i}") for i in range(10_000)]}
    refused(server, lambda: server.post(CHAT, many), code="invalid_json", budget_s=LONG_BODY_S)


@pytest.mark.parametrize("choice", ["always", 5, [], {"type": "function", "function": {"name": "g\n"}}, {"type": "x"}])
def test_a_choice_that_is_none_is_refused(server, choice):
    body = {"messages": MESSAGES, "tools": [tool()], "tool_choice": choice}
    refused(server, lambda: server.post(CHAT, body), param="tool_choice")

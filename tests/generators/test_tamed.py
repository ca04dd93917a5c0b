"""What bodies are made of before they are sent, where a route does not know a field and its value is anything."""

from __future__ import annotations

from typing import Any

import pytest

from tests.generators.relations import flat
from tests.generators.tamed import tamed


@pytest.mark.parametrize("value", [None, 5, "a", [], [5], ["a"], [None], {}, {"type": "function", "function": None}])
@pytest.mark.parametrize("name", ["tools", "tool_choice", "text", "output_config", "bad_words"])
def test_a_field_of_any_value_is_taken_as_it_is(name: str, value: Any):
    assert set(tamed({name: value})) <= {name}


def test_a_tool_is_named_wherever_its_route_has_names():
    tool = {"type": "function", "function": {"name": "x", "parameters": {"type": "nothing"}}}
    body = tamed({"tools": [tool, {"name": "y", "function": None}], "tool_choice": {"type": "tool", "name": "z"}})
    assert [body["tools"][0]["function"]["name"], body["tools"][1]["name"]] == ["tool0", "tool1"]
    assert body["tools"][0]["function"]["parameters"] == {"type": "object"}
    assert body["tool_choice"]["name"] == "tool0"


def test_token_ids_that_are_none_stay_where_an_operation_knows_no_such_field() -> None:
    body = {"query": "a", "documents": ["b"], "token_ids": "c"}
    assert flat(body) == body
    assert flat({"token_ids": [5], "sampling_params": {"n": 2}}) == {"prompt": [5], "n": 2}

"""Bodies that are valid by the document, with what no schema and no number can judge put right: whether a schema, an
expression or a grammar compiles, whether a tool that is chosen is among those that are offered, and whether the model
can do what is asked. The document says so in words; what is refused there is shown by tests of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.generators.relations import with_whole_numbers

OBJECT = {"type": "object"}
FORMS: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": OBJECT}},
    "structured_outputs": {"choice": ["a", "b"]},
    "guided_json": OBJECT,
    "guided_regex": "[a-z]+",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'root ::= "a"',
}
PATIENCE_S = 60.0
Body = dict[str, Any]


def tamed(value: Any) -> Any:
    """A copy that the server must take, as far as the relations hold."""
    if not isinstance(value, Mapping):
        return value
    body: Body = with_whole_numbers(value)
    if isinstance(body.get("sampling_params"), dict):
        body["sampling_params"] = tamed(body["sampling_params"])
    _one_form(body)
    _tools(body)
    if _object(body, "parameters").get("grammar") is not None:  # TGI's
        body["parameters"]["grammar"] = {"type": "json", "value": OBJECT}
    _nested_form(body, "text", "format")
    _nested_form(body, "output_config", "format")
    if body.get("timeout_s") is not None:
        body["timeout_s"] = PATIENCE_S
    if isinstance(body.get("bad_words"), list):
        body["bad_words"] = [word for word in body["bad_words"] if not isinstance(word, str) or word.strip()]
    body.pop("dimensions", None)  # the scripted model's embeddings cannot be cut
    body.pop("prompt_name", None)  # and it has no prompts
    body.pop("instruction", None)  # and it reads none
    body.pop("logits_processors", None)  # and its server has none
    return body


def _one_form(body: Body) -> None:
    """Of several, the first; none in a beam search, and no budget of thoughts beside one."""
    given = [name for name in FORMS if body.get(name) is not None]
    kept = None if body.get("use_beam_search") else next(iter(given), None)
    for name in given:
        del body[name]
    if kept is not None:
        body[kept] = FORMS[kept]
    if kept is not None or body.get("use_beam_search"):
        for name in ("thinking_budget", "thinking_token_budget"):
            body.pop(name, None)


def _tools(body: Body) -> None:
    """Each with a name of its own and a schema that is one; the choice among them."""
    names: list[str] = []
    tools = body.get("tools")
    for i, tool in enumerate(tools if isinstance(tools, list) else ()):
        if not isinstance(tool, dict):
            return
        names.append(f"tool{i}")
        for function in (tool, _object(tool, "function")):  # where names are depends on the route
            if "name" in function:
                function["name"] = names[i]
            for key in ("parameters", "input_schema"):
                if function.get(key) is not None:
                    function[key] = OBJECT
    choice = body.get("tool_choice")
    kind = choice if isinstance(choice, str) else _object(body, "tool_choice").get("type")
    if kind not in (None, "auto", "none") and (not names or body.get("use_beam_search")):
        del body["tool_choice"]
    elif kind in ("function", "tool") and isinstance(choice, dict):
        for function in (choice, _object(choice, "function")):
            if "name" in function:
                function["name"] = names[0]


def _nested_form(body: Body, outer: str, inner: str) -> None:
    form = _object(_object(body, outer), inner)
    if "schema" in form:
        form["schema"] = OBJECT
    if form.get("type") == "json_schema" and "name" in form:
        form["name"] = "a"


def _object(body: Body, name: str) -> Body:
    """That field, or nothing if it is no object: a route may not know the name, and then its value is anything."""
    value = body.get(name)
    return value if isinstance(value, dict) else {}

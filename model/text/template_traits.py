"""What a chat template reads: which roles, which form of content and arguments, which variables.

Templates do not say, so each question is answered by rendering a short chat and looking for its words in the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal

from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

Message = dict[str, Any]
Content = str | list[dict[str, str]] | None
Render = Callable[[Mapping[str, Any]], str | None]  # the prompt for some variables; None if the template fails

FIRST, SECOND = "Marigold meadow", "walnut harbour"  # words that no template has
NAME = "probe_lantern"
KEY = "cedar_key"
CALL_ID = "a1b2c3d4e"  # nine letters and digits, as some templates require
ARGUMENTS = {KEY: "cedar"}
ARGUMENTS_TEXT = json.dumps(ARGUMENTS)
TOOL = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "A probe",
        "parameters": {
            "type": "object",
            "properties": {KEY: {"type": "string", "description": "A tree"}},
            "required": [KEY],
        },
    },
}
DUMPED = (
    "None",
    "null",
    f"'{KEY}'",
    "'text'",
    '"text"',
)  # in a prompt that shows Python or JSON data instead of a text
EMPTY: tuple[Content, ...] = (None, "", [{"type": "text", "text": ""}])  # contents without text
USER = {"role": "user", "content": "Hello"}
NUM_ANSWERS = 256  # kept for different variables of requests

_ASKS_FOR_NONE = re.compile(r"content['\"\]]*\s+is\s+none", re.IGNORECASE)


class TemplateTraits:
    """The answers for one template, each found when first needed. Several threads may ask at once."""

    def __init__(self, source: str, tree: nodes.Template, render: Render) -> None:
        self.variables = _variables(tree)
        self._source = source
        self._tree = tree
        self._render = render
        self.shows_text = lru_cache(None)(self._shows_text)
        self.num_parts = lru_cache(None)(self._num_parts)
        self.shows_tools = lru_cache(NUM_ANSWERS)(self._shows_tools)

    def shows(self, role: str) -> bool:
        """Whether messages of this role are in the prompt. True if unknown."""
        return self.shows_text(role) is not False or self.num_parts(role) > 0

    @cached_property
    def developer(self) -> Literal["developer", "system"]:
        """The role under which the template shows a developer's messages."""
        return "developer" if "developer" in self._source and self.shows("developer") else "system"

    @cached_property
    def takes_mapping(self) -> bool:
        """Whether a call's arguments must be a mapping; otherwise they must be JSON text."""
        return self._call_form[1] is ARGUMENTS

    def empty_content(self, content: Content, has_calls: bool) -> Content:
        """The content of an assistant's turn without text: as it is, unless the template shows another form better."""
        shown = self._call_form[0] if has_calls else self._empty_contents
        return content if content in shown else shown[0]

    @cached_property
    def _call_form(self) -> tuple[list[Content], Any]:
        """The empty contents and the arguments of a turn of calls that the template shows best."""
        forms = [(content, arguments) for arguments in (ARGUMENTS, ARGUMENTS_TEXT) for content in EMPTY]
        best = _best([self._prompt([USER, _calling(*form), _result(FIRST)]) for form in forms])
        if best:
            arguments = forms[best[0]][1]
            return [forms[i][0] for i in best if forms[i][1] is arguments], arguments
        arguments = ARGUMENTS_TEXT if _adds_arguments(self._tree) else ARGUMENTS
        return [None if _ASKS_FOR_NONE.search(self._source) else ""], arguments

    @cached_property
    def _empty_contents(self) -> list[Content]:
        turns: list[Message] = [{"role": "assistant", "content": content} for content in EMPTY]
        return [EMPTY[i] for i in _best([self._prompt([USER, turn, USER]) for turn in turns])] or [""]

    def _shows_text(self, role: str) -> bool | None:
        """Whether the template shows content of this role that is a string; None if unknown."""
        prompt = self._prompt_with(role, FIRST)
        return None if prompt is None else FIRST in prompt

    def _num_parts(self, role: str) -> int:
        """How many parts of content the template shows: 0 if it takes strings only, 2 for any number."""
        plain = self._prompt_with(role, FIRST)
        for num_parts in (2, 1):
            words = (FIRST, SECOND)[:num_parts]
            prompt = self._prompt_with(role, [{"type": "text", "text": text} for text in words])
            if prompt is None and plain is None:
                return 2 if _loops_over_content(self._tree) else 0
            if prompt is not None and all(text in prompt for text in words) and not _is_dumped(prompt, plain or ""):
                return num_parts
        return 0

    def _shows_tools(self, kwargs: tuple[tuple[str, Any], ...]) -> bool:
        """Whether the prompt names the tools of a request with these variables. True if unknown."""
        system = {"role": "system", "content": "Be kind"}
        prompts = [self._prompt(chat, tools=[TOOL], **dict(kwargs)) for chat in ([USER], [system, USER])]
        rendered = [prompt for prompt in prompts if prompt is not None]
        return not rendered or any(NAME in prompt for prompt in rendered)

    def _prompt_with(self, role: str, content: Content) -> str | None:
        """A prompt with a message of this role."""
        message = {"role": role, "content": content}
        match role:
            case "system" | "developer":
                return self._prompt([message, USER])
            case "assistant":
                return self._prompt([USER, message, USER])
            case "tool":
                return self._prompt([USER, _calling(self._call_form[0][0], self._call_form[1]), _result(content)])
            case _:
                return self._prompt([message])

    def _prompt(self, messages: Sequence[Message], **variables: Any) -> str | None:
        """The prompt with the variables, or without any; else with tools, as some templates need them."""
        variables = {"messages": messages, "tools": None, **variables}
        prompt = self._render(variables)
        return prompt if prompt is not None or variables["tools"] else self._render({**variables, "tools": [TOOL]})


def _variables(tree: nodes.Template) -> frozenset[str]:
    """The variables that the template takes from outside.

    One that it also sets counts only if it asks whether that one is defined: the others are its own.
    """
    own = {node.name for node in tree.find_all(nodes.Name) if node.ctx in ("store", "param")}
    tests = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
    defaults = [used.node for used in tree.find_all(nodes.Filter) if used.name in ("default", "d")]
    asked = {node.name for node in (*tests, *defaults) if isinstance(node, nodes.Name)}
    return frozenset(name for name in find_undeclared_variables(tree) if name not in own or name in asked)


def _calling(content: Content, arguments: Any) -> Message:
    call = {"id": CALL_ID, "type": "function", "function": {"name": NAME, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _result(content: Content) -> Message:
    return {"role": "tool", "name": NAME, "tool_call_id": CALL_ID, "content": content}


def _best(prompts: Sequence[str | None]) -> list[int]:
    """Which of the prompts show a call's arguments and no empty content as data; none if all renders failed."""
    counts = [None if prompt is None else sum(map(prompt.count, DUMPED)) for prompt in prompts]
    least = min((count for count in counts if count is not None), default=None)
    scores = [
        -1 if prompt is None else 2 * (KEY in prompt) + (count == least)
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    return [i for i, score in enumerate(scores) if score == max(scores) >= 0]


def _is_dumped(prompt: str, plain: str) -> bool:
    """Whether parts are in the prompt as Python or JSON data."""
    return any(prompt.count(key) > plain.count(key) for key in DUMPED)


def _adds_arguments(template: nodes.Template) -> bool:
    """Whether the template adds a call's `arguments` to a string, so that they must be a string."""
    return any(
        _is_named(part, "arguments") for node in template.find_all(nodes.Add) for part in (node.left, node.right)
    )


def _loops_over_content(template: nodes.Template) -> bool:
    """Whether the template loops over a message's `content`."""
    return any(
        _is_named(node, "content")
        for loop in template.find_all(nodes.For)
        for node in (loop.iter, *loop.iter.find_all(nodes.Expr))
    )


def _is_named(node: nodes.Node, name: str) -> bool:
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == name
    return (isinstance(node, nodes.Getattr) and node.attr == name) or (
        isinstance(node, nodes.Name) and node.name == name
    )

"""The interface of a parser: text in pieces of any size in, events out.

    class MyParser(ToolParser):  # millrace serve --tool-call-parser my_package.my_module:MyParser
        def feed(self, text: str) -> list[Event]: ...
        def finish(self) -> list[Event]: ...

The server makes one parser per choice. The joined events of an answer must not depend on where its text was cut, so
that a stream equals the whole answer. A parser never raises for a model's text: what it cannot read as a call is
`Text`. Parsers do no I/O.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's content."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the content."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool begins. All `CallArguments` up to the next `CallBegun` belong to it."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments. Joined, they are the text of a JSON object."""

    text: str


Event: TypeAlias = Text | Reasoning | CallBegun | CallArguments


class ToolParser:
    """Finds the tool calls in one answer."""

    needs_special_tokens: ClassVar[bool] = False  # True: a call's markers are special tokens, so keep them in the text

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        self.tool_names = frozenset(tool_names)  # tools that the request offers

    def feed(self, text: str) -> list[Event]:
        """Takes the next text.

        Returns the events that are certain by now: `Text`, `CallBegun`, `CallArguments`.
        """
        raise NotImplementedError

    def finish(self) -> list[Event]:
        """Returns the remaining events. The answer ends here, perhaps inside a call. Called once."""
        raise NotImplementedError

    @classmethod
    def new_call_id(cls) -> str:
        """A random id for a call, unique in a conversation.

        The client sends it back with the call's result.
        """
        return "call_" + secrets.token_hex(12)


class ReasoningParser:
    """Separates the reasoning from the content in one answer.

    `markers` are the texts before and after the reasoning, or None if the family has none. They are needed to count
    reasoning tokens and to enforce a thinking budget. `is_open`: the prompt ends inside reasoning.
    """

    markers: ClassVar[tuple[str, str] | None] = None
    thinks_unasked: ClassVar[bool] = False  # True: an answer begins with reasoning even if the prompt did not open it
    needs_special_tokens: ClassVar[bool] = False

    def __init__(self, is_open: bool = False) -> None:
        self.is_open = is_open

    def feed(self, text: str) -> list[Event]:
        """Takes the next text; returns the events that are certain by now: `Reasoning` and `Text`."""
        raise NotImplementedError

    def finish(self) -> list[Event]:
        """Returns the remaining events. Called once."""
        raise NotImplementedError

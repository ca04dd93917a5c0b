"""What a parser is: it gets an answer's text in pieces of any size and tells what is in it.

    class MyParser(ToolParser):  # millrace serve --tool-call-parser my_package.my_module:MyParser
        def feed(self, text: str) -> list[Event]: ...
        def finish(self) -> list[Event]: ...

One is made per choice. The events of an answer, joined, must not depend on where its text was cut: then a stream tells
what the whole tells. A parser never raises for what a model writes: what it can not read as a call is `Text`.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar, TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """Words for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thoughts on the way to them."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool is called. What follows of `CallArguments` belongs to it, up to the next call."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments, which are the text of a JSON object."""

    text: str


Event: TypeAlias = Text | Reasoning | CallBegun | CallArguments


class ToolParser:
    """Finds the calls of tools in one answer."""

    needs_special_tokens: ClassVar[bool] = False  # the marks of a call are special tokens, which are else left out

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        self.tool_names = frozenset(tool_names)  # those that the request offers

    def feed(self, text: str) -> list[Event]:
        """What is certain now that `text` is there as well; `Text`, `CallBegun` and `CallArguments`."""
        raise NotImplementedError

    def finish(self) -> list[Event]:
        """The rest: the answer ends here, perhaps in the middle of a call. Called once."""
        raise NotImplementedError

    @classmethod
    def new_call_id(cls) -> str:
        """The id of a call, which comes back with its result. Random: it has to be unique in a conversation."""
        return "call_" + secrets.token_hex(12)


class ReasoningParser:
    """Tells thoughts from words in one answer.

    `markers`, if the family has them, are the texts that thoughts stand between: by them tokens are counted, and a
    budget of thinking ends. `is_open`: the prompt has ended among thoughts already.
    """

    markers: ClassVar[tuple[str, str] | None] = None
    thinks_unasked: ClassVar[bool] = False  # an answer begins with thoughts, although nothing in the prompt opened them
    needs_special_tokens: ClassVar[bool] = False

    def __init__(self, is_open: bool = False) -> None:
        self.is_open = is_open

    def feed(self, text: str) -> list[Event]:
        """What is certain now that `text` is there as well; `Reasoning` and `Text`."""
        raise NotImplementedError

    def finish(self) -> list[Event]:
        """The rest. Called once."""
        raise NotImplementedError

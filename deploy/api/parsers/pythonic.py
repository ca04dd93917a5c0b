"""Llama 4 and Llama 3.2: calls written as a list of Python calls, `[f(a=1, b="x"), g()]`.

`<|python_start|>` and `<|python_end|>` may stand around the list. Arguments are literals; nothing is evaluated. A call
is emitted when it is complete, as its arguments are converted to JSON, and only if it names a tool that the request
offers.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any

from .interface import Text
from .literals import literal, name
from .reader import CallReader, Malformed, Reading, blanks, past

START, END = "<|python_start|>", "<|python_end|>"


class PythonicParser(CallReader):
    """One list of calls at the start of the answer, or after the tag."""

    offers_only = True
    needs_special_tokens = True

    def _read(self) -> Generator[None, str, None]:
        yield from self._read_calls(START, self._list)

    def _list(self, character: str, held: str) -> Reading:
        if character != "[":
            self._emit(Text, held[: len(held) - len(character)])
            return character
        is_list, character = yield from self._try(self._calls(character), held)
        if not is_list:
            return character
        character = yield from blanks(character)
        matched = 0
        while matched < len(END) and character == END[matched]:
            matched += 1
            character = yield
        if matched < len(END):
            self._emit(Text, END[:matched])
        return character

    def _calls(self, character: str) -> Reading:
        character = yield from past("[", character)
        while True:
            character = yield from blanks(character)
            called, character = yield from name(character)
            self._check_name(called, character)
            character = yield from blanks(character)
            arguments, character = yield from _arguments(character)
            self._give(called, json.dumps(arguments, ensure_ascii=False))
            character = yield from blanks(character)
            if character == "]":
                return (yield)
            if character != ",":
                raise Malformed(character)
            character = yield from blanks((yield))
            self._held = [character]


def _arguments(character: str) -> Generator[None, str, tuple[dict[str, Any], str]]:
    """`(a=1, b="x")`, from the opening bracket."""
    arguments: dict[str, Any] = {}
    character = yield from past("(", character)
    character = yield from blanks(character)
    while character != ")":
        key, character = yield from name(character)
        character = yield from blanks(character)
        if character != "=" or not key.isidentifier() or key in arguments:
            raise Malformed(character)
        character = yield from blanks((yield))
        arguments[key], character = yield from literal(character)
        character = yield from blanks(character)
        if character == ",":
            character = yield from blanks((yield))
        elif character != ")":
            raise Malformed(character)
    return arguments, (yield)

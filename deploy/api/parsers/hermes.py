"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Generator

from .interface import Text
from .json_calls import JsonReader
from .reader import blanks

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(JsonReader):
    """Calls between markers, anywhere in the text. The closing marker may be missing."""

    def _read(self) -> Generator[None, str, None]:
        character, matched = (yield), 0
        while character:
            is_found, character = yield from self._until(BEGIN, character, Text, matched)
            if is_found:
                matched, character = yield from self._marked(character)
        self._emit(Text, BEGIN[:matched])

    def _marked(self, character: str) -> Generator[None, str, tuple[int, str]]:
        """A call, and its closing marker if there is one.

        Returns (matched characters of `BEGIN`, next character).

        NOTE: a `<` after the call may begin the closing marker or the next opening one. Then `matched` is 1.
        """
        held = BEGIN + character
        while character.isspace():
            character = yield
            held += character
        is_call, character = yield from self._try(self._call(character), held)
        if not is_call:
            return 0, character
        character = yield from blanks(character)
        matched = 0
        while matched < len(END) and character == END[matched]:
            matched += 1
            character = yield
        if matched == 1:
            return 1, character
        if matched < len(END):
            self._emit(Text, END[:matched])
        return 0, character

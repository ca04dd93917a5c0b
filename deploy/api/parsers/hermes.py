"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, among words or alone."""

from __future__ import annotations

from collections.abc import Generator

from .interface import Text
from .json_calls import JsonReader
from .reader import blanks

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(JsonReader):
    """Each call between its marks. The closing one may be missing."""

    def _read(self) -> Generator[None, str, None]:
        character, matched = (yield), 0
        while character:
            is_found, character = yield from self._until(BEGIN, character, Text, matched)
            if is_found:
                matched, character = yield from self._marked(character)
        self._tell(Text, BEGIN[:matched])

    def _marked(self, character: str) -> Generator[None, str, tuple[int, str]]:
        """A call, and its closing mark if there is one. What looks like the start of that may be the next opening one:
        (characters of it that were read, what follows)."""
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
            self._tell(Text, END[:matched])
        return 0, character

"""Llama 3.1 to 3.3: the answer is `{"name": "f", "parameters": {...}}`.

Several calls are separated by `;`. `<|python_tag|>` may stand before the calls, and text before the tag. Nothing else
marks a call, so an object counts as a call only if it names a tool that the request offers.
"""

from __future__ import annotations

from collections.abc import Generator

from .interface import Text
from .json_calls import JsonReader
from .reader import blanks

TAG = "<|python_tag|>"


class Llama3JsonParser(JsonReader):
    """Calls at the start of the answer, or after the tag."""

    offers_only = True
    needs_special_tokens = True

    def _read(self) -> Generator[None, str, None]:
        yield from self._read_calls(TAG, self._objects)

    def _objects(self, character: str, held: str) -> Generator[None, str, str]:
        """Reads consecutive calls; returns the first character after them."""
        if character != "{":
            self._emit(Text, held[: len(held) - len(character)])
            return character
        is_call, character = yield from self._try(self._call(character), held)
        while is_call:
            character = yield from blanks(character)
            if character == ";":
                character = yield from blanks((yield))
            if character != "{":
                break
            is_call, character = yield from self._try(self._call(character), character)
        return character

"""Llama 3.1 to 3.3: the answer is `{"name": "f", "parameters": {...}}`, or several with `;` between them.

`<|python_tag|>` may stand before it, and where it does, words may stand before that. Nothing else marks a call, so an
object is one only if it names a tool that the request offers.
"""

from __future__ import annotations

from collections.abc import Generator

from .interface import Text
from .json_calls import JsonReader
from .reader import blanks

TAG = "<|python_tag|>"


class Llama3JsonParser(JsonReader):
    """Calls at the start of the answer, or behind the tag."""

    offers_only = True
    needs_special_tokens = True

    def _read(self) -> Generator[None, str, None]:
        yield from self._read_calls(TAG, self._objects)

    def _objects(self, character: str, held: str) -> Generator[None, str, str]:
        """Calls, one after the other; what is none of them follows."""
        if character != "{":
            self._tell(Text, held[: len(held) - len(character)])
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

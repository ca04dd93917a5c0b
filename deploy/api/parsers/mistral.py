"""Mistral: `[TOOL_CALLS]` and a list of calls as JSON.

Newer models write `name{...}` or `name[ARGS]{...}`.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Generator

from .interface import Text
from .json_calls import JsonReader
from .reader import MAX_NAME_CHARS, Malformed, Reading, past

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NAME_CHARACTERS = frozenset(string.ascii_letters + string.digits + "_-.:/")
ID_CHARACTERS = string.ascii_letters + string.digits


class MistralParser(JsonReader):
    """Calls after `[TOOL_CALLS]`, which is a special token."""

    needs_special_tokens = True

    @classmethod
    def new_call_id(cls) -> str:
        """Nine letters and digits: the chat templates of these models reject any other id."""
        return "".join(secrets.choice(ID_CHARACTERS) for _ in range(9))

    def _read(self) -> Generator[None, str, None]:
        character = yield
        while character:
            is_found, character = yield from self._until(BEGIN, character, Text)
            if is_found:
                held = BEGIN + character
                while character.isspace():
                    character = yield
                    held += character
                reading = self._calls(character) if character == "[" else self._named(character)
                _, character = yield from self._try(reading, held)

    def _named(self, character: str) -> Reading:
        """`name{...}`, with an optional `[CALL_ID]id[ARGS]` or `[ARGS]` between name and arguments."""
        name = ""
        while character in NAME_CHARACTERS and len(name) <= MAX_NAME_CHARS:
            name += character
            character = yield
        self._check_name(name, character)
        if character == "[":
            character = yield
            if character == CALL_ID[1]:
                character = yield from past(CALL_ID[1:], character)
                while character.isalnum():
                    character = yield
                character = yield from past("[", character)
            character = yield from past(ARGS[1:], character)
        while character.isspace():
            character = yield
        if character != "{":
            raise Malformed(character)
        return (yield from self._stream_arguments(name, character))

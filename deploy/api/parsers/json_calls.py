"""Calls written as JSON: an object with a name and its arguments, or a list of objects.

Arguments go to the client as the model writes them, character by character, and are checked on the way. The arguments
of a completed call are therefore valid JSON. If a call breaks off, its valid beginning has been sent and the rest is
text.
"""

from __future__ import annotations

from collections.abc import Generator

from .interface import CallArguments, Text
from .json_text import decoded, json_members, json_value, read_text
from .reader import CallReader, Malformed, Reading, blanks, past

ARGUMENTS = ("arguments", "parameters")
OTHERS = ("type", "id")  # keys of a call that are ignored


class JsonReader(CallReader):
    """Base of the readers of text that contains calls as JSON."""

    def _call(self, character: str) -> Reading:
        """`{"name": "f", "arguments": {...}}`, from its opening brace; keys in any order."""
        character = yield from past("{", character)
        name, arguments, is_emitted = "", "", False
        while True:
            character = yield from blanks(character)
            key, character = yield from read_text(character)
            character = yield from blanks(character)
            character = yield from past(":", character)
            character = yield from blanks(character)
            if key == "name" and not name:
                name, character = yield from read_text(character)
                self._check_name(name, character)
            elif key in ARGUMENTS and name and character == "{" and not arguments and not is_emitted:
                is_emitted = True
                character = yield from self._stream_arguments(name, character)
            elif key in ARGUMENTS and not arguments and not is_emitted:
                arguments, character = yield from _whole_arguments(character)
            elif key in OTHERS or is_emitted:
                character = yield from json_value(character, _forget)
            else:
                raise Malformed(character)
            character = yield from blanks(character)
            if character != ",":
                break
            character = yield
        if character != "}" or not name:
            raise Malformed(character)
        if not is_emitted:
            self._give(name, arguments or "{}")
        return (yield)

    def _stream_arguments(self, name: str, character: str) -> Reading:
        """Reads an object and emits it by character, once its first characters are valid JSON."""
        opening = character
        character = yield
        while character.isspace():
            opening += character
            character = yield
        if character not in ('"', "}"):
            raise Malformed(character)
        self._give(name, opening)
        return (yield from json_members(character, self._emit_argument))

    def _emit_argument(self, text: str) -> None:
        self._emit(CallArguments, text)

    def _calls(self, character: str) -> Reading:
        """`[{...}, {...}]`, from its opening bracket.

        A call that was emitted stays a call, whatever follows.
        """
        character = yield from past("[", character)
        while True:
            character = yield from blanks(character)
            character = yield from self._call(character)
            character = yield from blanks(character)
            if character != ",":
                return (yield from past("]", character))
            character = yield from blanks((yield))
            self._held = [character]


def _whole_arguments(character: str) -> Generator[None, str, tuple[str, str]]:
    """Arguments as JSON text, from an object, a string with an object, or null (no arguments)."""
    written: list[str] = []
    character = yield from json_value(character, written.append)
    text = "".join(written)
    arguments = decoded(text, character)
    if isinstance(arguments, str):
        text, arguments = arguments, decoded(arguments, character)
    if arguments is None:
        return "{}", character
    if not isinstance(arguments, dict):
        raise Malformed(character)
    return text, character


def _forget(text: str) -> None:
    """Discards the text."""


class JsonList(JsonReader):
    """The whole answer is a list of calls, as under `tool_choice = "required"`."""

    def _read(self) -> Generator[None, str, None]:
        character = yield from blanks((yield))
        _, character = yield from self._try(self._calls(character), character)
        yield from self._rest(character, Text)


class JsonArguments(JsonReader):
    """The whole answer is the arguments of the one tool, as under a named `tool_choice`."""

    def _read(self) -> Generator[None, str, None]:
        (name,) = self.tool_names
        character = yield from blanks((yield))
        _, character = yield from self._try(self._only(name, character), character)
        yield from self._rest(character, Text)

    def _only(self, name: str, character: str) -> Reading:
        if character != "{":
            raise Malformed(character)
        return (yield from self._stream_arguments(name, character))

"""Calls written as JSON: one object with a name and its arguments, or a list of such objects.

Arguments go on to the client as the model writes them, character by character, checked on the way. So a call that
closes has valid JSON for arguments; of one that breaks off the client has what was right of it, and the rest is text.
"""

from __future__ import annotations

from collections.abc import Generator

from .interface import CallArguments, Text
from .json_text import decoded, json_members, json_value, read_text
from .reader import CallReader, Malformed, Reading, blanks, past

ARGUMENTS = ("arguments", "parameters")
OTHERS = ("type", "id")  # keys of a call that tell nothing new


class JsonReader(CallReader):
    """A reader of text in which calls stand as JSON."""

    def _call(self, character: str) -> Reading:
        """One object, from its brace on: `{"name": "f", "arguments": {...}}`, with its keys in any order."""
        character = yield from past("{", character)
        name, arguments, is_told = "", "", False
        while True:
            character = yield from blanks(character)
            key, character = yield from read_text(character)
            character = yield from blanks(character)
            character = yield from past(":", character)
            character = yield from blanks(character)
            if key == "name" and not name:
                name, character = yield from read_text(character)
                self._check_name(name, character)
            elif key in ARGUMENTS and name and character == "{" and not arguments and not is_told:
                is_told = True
                character = yield from self._stream_arguments(name, character)
            elif key in ARGUMENTS and not arguments and not is_told:
                arguments, character = yield from _whole_arguments(character)
            elif key in OTHERS or is_told:
                character = yield from json_value(character, _forget)
            else:
                raise Malformed(character)
            character = yield from blanks(character)
            if character != ",":
                break
            character = yield
        if character != "}" or not name:
            raise Malformed(character)
        if not is_told:
            self._give(name, arguments or "{}")
        return (yield)

    def _stream_arguments(self, name: str, character: str) -> Reading:
        """An object that is told while it is read, once it has begun as JSON does."""
        opening = character
        character = yield
        while character.isspace():
            opening += character
            character = yield
        if character not in ('"', "}"):
            raise Malformed(character)
        self._give(name, opening)
        return (yield from json_members(character, self._tell_argument))

    def _tell_argument(self, text: str) -> None:
        self._tell(CallArguments, text)

    def _calls(self, character: str) -> Reading:
        """`[{...}, {...}]`, from its bracket on. Each call is told as it comes, and is one whatever follows it."""
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
    """Arguments as text: an object, or a text that holds one, or null for none."""
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
    """Keeps nothing."""


class JsonList(JsonReader):
    """The whole answer is a list of calls: what `tool_choice = "required"` makes of it."""

    def _read(self) -> Generator[None, str, None]:
        character = yield from blanks((yield))
        _, character = yield from self._try(self._calls(character), character)
        yield from self._rest(character, Text)


class JsonArguments(JsonReader):
    """The whole answer is the arguments of the one tool there is: what a named `tool_choice` makes of it."""

    def _read(self) -> Generator[None, str, None]:
        (name,) = self.tool_names
        character = yield from blanks((yield))
        _, character = yield from self._try(self._only(name, character), character)
        yield from self._rest(character, Text)

    def _only(self, name: str, character: str) -> Reading:
        if character != "{":
            raise Malformed(character)
        return (yield from self._stream_arguments(name, character))

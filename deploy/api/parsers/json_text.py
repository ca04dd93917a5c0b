"""JSON, one character at a time, with two common mistakes of models repaired.

The mistakes are control characters in strings and invalid escapes. Each function reads one item that begins with
`character`, passes the repaired JSON to `keep`, and returns the next character. `Malformed` carries the first character
that does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

import orjson

from .reader import Malformed, Reading

MAX_DEPTH = 64  # nested objects and arrays

Keep = Callable[[str], None]


def json_value(character: str, keep: Keep, depth: int = 0) -> Reading:
    """Any value."""
    if character == '"':
        return (yield from json_string(character, keep))
    if character in ("{", "["):
        if depth >= MAX_DEPTH:
            raise Malformed(character)
        keep(character)
        read = json_members if character == "{" else _json_elements
        return (yield from read((yield), keep, depth + 1))
    if character in _WORDS:
        return (yield from _json_word(_WORDS[character], character, keep))
    return (yield from _json_number(character, keep))


def json_members(character: str, keep: Keep, depth: int = 1) -> Reading:
    """The rest of an object after its opening brace: its members and the closing brace."""
    character = yield from json_blanks(character, keep)
    if character == "}":
        keep(character)
        return (yield)
    while True:
        if character != '"':
            raise Malformed(character)
        character = yield from json_string(character, keep)
        character = yield from json_blanks(character, keep)
        if character != ":":
            raise Malformed(character)
        keep(character)
        character = yield from json_blanks((yield), keep)
        character = yield from json_value(character, keep, depth)
        character = yield from json_blanks(character, keep)
        if character not in (",", "}"):
            raise Malformed(character)
        keep(character)
        if character == "}":
            return (yield)
        character = yield from json_blanks((yield), keep)


def _json_elements(character: str, keep: Keep, depth: int) -> Reading:
    """The rest of an array after its opening bracket."""
    character = yield from json_blanks(character, keep)
    if character == "]":
        keep(character)
        return (yield)
    while True:
        character = yield from json_value(character, keep, depth)
        character = yield from json_blanks(character, keep)
        if character not in (",", "]"):
            raise Malformed(character)
        keep(character)
        if character == "]":
            return (yield)
        character = yield from json_blanks((yield), keep)


def json_string(character: str, keep: Keep) -> Reading:
    """A string, from its opening quote."""
    keep(character)
    character = yield
    while character != '"':
        if not character:
            raise Malformed(character)
        if character == "\\":
            character = yield from _json_escape(keep)
        else:
            keep(character if character >= " " else json.dumps(character)[1:-1])
            character = yield
    keep(character)
    return (yield)


def _json_escape(keep: Keep) -> Reading:
    """The rest of an escape after its backslash.

    If it is invalid, the backslash is kept as a literal.
    """
    character = yield
    if character and character in '"\\/bfnrt':
        keep("\\" + character)
        return (yield)
    if character != "u":
        keep("\\\\" if character else "")
        return character
    digits = ""
    while len(digits) < 4:
        character = yield
        if not character or character not in "0123456789abcdefABCDEF":
            keep("\\\\u" + digits if character else "")
            return character
        digits += character
    keep("\\u" + digits)
    return (yield)


_WORDS = {"t": "true", "f": "false", "n": "null"}


def _json_word(word: str, character: str, keep: Keep) -> Reading:
    for expected in word:
        if character != expected:
            raise Malformed(character)
        keep(character)
        character = yield
    return character


def _json_number(character: str, keep: Keep) -> Reading:
    """A number, such as `-12.5e+3`."""
    if character == "-":
        keep(character)
        character = yield
    if character == "0":
        keep(character)
        character = yield
    else:
        character = yield from _digits(character, keep)
    if character == ".":
        keep(character)
        character = yield from _digits((yield), keep)
    if character in ("e", "E"):
        keep(character)
        character = yield
        if character in ("+", "-"):
            keep(character)
            character = yield
        character = yield from _digits(character, keep)
    return character


def _digits(character: str, keep: Keep) -> Reading:
    if character not in _DIGITS:
        raise Malformed(character)
    while character in _DIGITS:
        keep(character)
        character = yield
    return character


_DIGITS = frozenset("0123456789")
_BLANKS = frozenset(" \t\n\r")


def json_blanks(character: str, keep: Keep) -> Reading:
    """Reads JSON white space and keeps it."""
    while character in _BLANKS:
        keep(character)
        character = yield
    return character


def read_text(character: str) -> Generator[None, str, tuple[str, str]]:
    """A decoded string, and the next character."""
    if character != '"':
        raise Malformed(character)
    written: list[str] = []
    character = yield from json_string(character, written.append)
    return str(decoded("".join(written), character)), character


def decoded(text: str, character: str) -> Any:
    """The value of JSON text. `Malformed` if it is invalid after all: a lone surrogate escape."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise Malformed(character) from None

"""Python literals, one character at a time: strings, numbers, words, lists, tuples, dicts.

Nothing is evaluated. Each function reads one literal that begins with `character` and returns its value and the next
character. Everything else raises `Malformed`: names, operators, f-strings, calls.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, TypeAlias

from .reader import Malformed, blanks

MAX_DEPTH = 64  # nested lists, tuples and dicts
MAX_NUMBER_CHARS = 64

Value: TypeAlias = Generator[None, str, tuple[Any, str]]

WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": "", "0": "\0", "b": "\b", "f": "\f"}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
PAIRS = {"[": "]", "(": ")", "{": "}"}


def literal(character: str, depth: int = 0) -> Value:
    """Any literal."""
    if character in PAIRS:
        if depth >= MAX_DEPTH:
            raise Malformed(character)
        if character == "{":
            return (yield from _mapping((yield), depth + 1))
        return (yield from _items((yield), PAIRS[character], depth + 1))
    if character in ("'", '"'):
        return (yield from _texts(character))
    if character.isalpha():
        return (yield from _word(character))
    return (yield from _number(character))


def name(character: str) -> Generator[None, str, tuple[str, str]]:
    """A name, which may contain dots; "" if there is none."""
    letters = []
    while character.isalnum() or character in ("_", "."):
        letters.append(character)
        character = yield
    return "".join(letters), character


def _items(character: str, closing: str, depth: int) -> Value:
    """The rest of a list or tuple after its opening bracket. `(x)` is `x`, as in Python."""
    items: list[Any] = []
    has_comma = False
    character = yield from blanks(character)
    while character != closing:
        item, character = yield from literal(character, depth)
        items.append(item)
        character = yield from blanks(character)
        if character == ",":
            has_comma = True
            character = yield from blanks((yield))
        elif character != closing:
            raise Malformed(character)
    is_alone = closing == ")" and len(items) == 1 and not has_comma
    return (items[0] if is_alone else items), (yield)


def _mapping(character: str, depth: int) -> Value:
    """The rest of a dict after its opening brace. Keys become strings, as JSON requires."""
    members: dict[str, Any] = {}
    character = yield from blanks(character)
    while character != "}":
        key, character = yield from literal(character, depth)
        if not isinstance(key, (str, int)) or isinstance(key, bool):
            raise Malformed(character)
        character = yield from blanks(character)
        if character != ":":
            raise Malformed(character)
        character = yield from blanks((yield))
        members[str(key)], character = yield from literal(character, depth)
        character = yield from blanks(character)
        if character == ",":
            character = yield from blanks((yield))
        elif character != "}":
            raise Malformed(character)
    return members, (yield)


def _word(character: str) -> Value:
    """True, False, None, or a string with a prefix such as r"..."."""
    word, character = yield from name(character)
    if character in ("'", '"') and word in ("r", "R", "u", "U"):
        return (yield from _texts(character, is_raw=word in ("r", "R")))
    if word not in WORDS:
        raise Malformed(character)
    return WORDS[word], character


def _number(character: str) -> Value:
    written: list[str] = []
    while len(written) <= MAX_NUMBER_CHARS and (character.isalnum() or character in ("+", "-", ".", "_")):
        written.append(character)
        character = yield
    text = "".join(written)
    try:
        return int(text, 0), character
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        raise Malformed(character) from None
    if not math.isfinite(number):
        raise Malformed(character)  # JSON has no such number
    return number, character


def _texts(character: str, is_raw: bool = False) -> Value:
    """A string; adjacent strings are joined."""
    pieces: list[str] = []
    while character in ("'", '"'):
        character = yield from _text(character, is_raw, pieces)
        character = yield from blanks(character)
    # joins surrogate pairs that were escaped one by one; a lone surrogate becomes U+FFFD
    text = "".join(pieces).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text, character


def _text(quote: str, is_raw: bool, pieces: list[str]) -> Generator[None, str, str]:
    """One string, in single or triple quotes, from its first quote."""
    num_quotes, character = 1, (yield)
    if character == quote:
        character = yield
        if character != quote:
            return character  # an empty string
        num_quotes, character = 3, (yield)
    num_closing = 0
    while num_closing < num_quotes:
        if not character or (character == "\n" and num_quotes == 1):
            raise Malformed(character)
        if character == quote:
            num_closing += 1
            character = yield
            continue
        pieces.append(quote * num_closing)
        num_closing = 0
        if character == "\\":
            character = yield from _escape(is_raw, pieces)
        else:
            pieces.append(character)
            character = yield
    return character


def _escape(is_raw: bool, pieces: list[str]) -> Generator[None, str, str]:
    """The rest of an escape after its backslash.

    An unknown escape is kept as it is, as in Python.
    """
    character = yield
    if not character:
        raise Malformed(character)
    if is_raw or (character not in ESCAPES and character not in HEX_DIGITS):
        pieces.append("\\" + character)
        return (yield)
    if character in ESCAPES:
        pieces.append(ESCAPES[character])
        return (yield)
    digits = ""
    for _ in range(HEX_DIGITS[character]):
        digit = yield
        if not digit or digit not in "0123456789abcdefABCDEF":
            raise Malformed(digit)
        digits += digit
    code = int(digits, 16)
    if code > 0x10FFFF:
        raise Malformed(digit)
    pieces.append(chr(code))
    return (yield)

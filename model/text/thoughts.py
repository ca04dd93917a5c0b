"""Grammars that begin after the thoughts of an answer, and the tokens that thoughts may hold."""

from __future__ import annotations

import json
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .vocabulary import Vocabulary

ANYTHING = "/(?s:.*)/"  # any characters: special tokens are none
BREAKS = r'("\n\n" | "\n")?'  # between the thoughts and the answer


class Section(Protocol):
    """The markers of the thoughts before an answer."""

    @property
    def start(self) -> str:
        """The text that opens them."""

    @property
    def end(self) -> str:
        """The text that closes them."""

    @property
    def is_open(self) -> bool:
        """Whether the prompt has opened them, so that they must be closed."""


def after_thoughts(grammar: str, section: Section, vocabulary: Vocabulary) -> str:
    """The grammar behind a section of any text. It is Lark, or JSON with one grammar, as llguidance has them."""
    form = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
    start, end = (_special_id(marker, vocabulary) for marker in (section.start, section.end))
    opening = json.dumps(section.start) if start is None else f"<[{start}]>"
    again = "" if start is None else f"{opening}? "  # as text, a second opening is a part of the thoughts
    begin = f"{again}thoughts" if section.is_open else f"({opening} thoughts)?"
    body = "text" if end is None else f"ANYTHING <[{end}]>"
    lines = [f"start: {begin} @form", f"thoughts: {body} {BREAKS}", f"ANYTHING: {ANYTHING}"]
    if end is None:
        lines.append(f"text[lazy]: ANYTHING {json.dumps(section.end)}")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, form | {"name": "form"}]})


def thought_mask(section: Section, vocabulary: Vocabulary, num_words: int) -> NDArray[np.int32]:
    """A mask [W] of the tokens that may come where the scan of an answer's thoughts `is_free`.

    A token may end inside of a character. One that holds the end marker and more may be wrong, as the answer's form
    begins behind the marker.
    """
    marker, special = section.end.encode(), vocabulary.special_ids | set(vocabulary.eos_ids)
    is_allowed = np.zeros(32 * num_words, np.bool_)
    tokens = vocabulary.tokens[: vocabulary.vocab_size]
    is_allowed[: len(tokens)] = [_is_text(token) and (marker not in token or token == marker) for token in tokens]
    is_allowed[[token_id for token_id in special if token_id < len(is_allowed)]] = False
    if (end := _special_id(section.end, vocabulary)) is not None:
        is_allowed[end] = True
    words: NDArray[np.int32] = np.packbits(is_allowed.reshape(-1, 32), axis=1, bitorder="little").view("<i4")[:, 0]
    return words


def _special_id(marker: str, vocabulary: Vocabulary) -> int | None:
    """The special token that is a marker, which grammars know by its id."""
    wanted, tokens = marker.encode(), vocabulary.tokens
    return next((i for i in sorted(vocabulary.special_ids) if i < len(tokens) and tokens[i] == wanted), None)


def _is_text(token: bytes) -> bool:
    """Whether a token is characters, of which the last may be cut off."""
    try:
        return bool(token.decode())
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"


class ThoughtScan:
    """Where an answer is in its thoughts, by the bytes of its tokens."""

    def __init__(self, section: Section) -> None:
        self._start, self._end = section.start.encode(), section.end.encode()
        self._is_inside = section.is_open
        self._is_over = False
        self._seen = b""  # since the beginning, or what may belong to the end marker

    def add(self, token: bytes) -> None:
        """Takes the next token's bytes."""
        if self._is_over:
            return
        self._seen += token
        if not self._is_inside:
            self._is_inside = self._seen.startswith(self._start)
            self._is_over = not self._is_inside and not self._start.startswith(self._seen)
            self._seen = self._seen[len(self._start) :] if self._is_inside else self._seen
        if self._is_inside:
            self._is_over = self._end in self._seen
            self._seen = self._seen[-max(len(self._end) - 1, 3) :]

    @property
    def is_free(self) -> bool:
        """Whether any text may follow: in the thoughts, and neither an end marker nor a character has begun."""
        if not self._is_inside or self._is_over or not _is_whole(self._seen):
            return False
        return not any(self._seen.endswith(self._end[:length]) for length in range(1, len(self._end)))


def _is_whole(text: bytes) -> bool:
    """Whether a text ends with a whole character."""
    for length, byte in enumerate(reversed(text[-3:]), 1):
        if byte & 0xC0 != 0x80:
            return byte < 0xC0 or length == 1 + (byte >= 0xC0) + (byte >= 0xE0) + (byte >= 0xF0)
    return True

"""Reasoning between `<think>` and `</think>`, before the content.

The markers are left out, and so are the line breaks next to them: chat templates put them back.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import ClassVar

from .interface import Event, Reasoning, ReasoningParser, Text
from .reader import CharacterReader


class ThinkParser(CharacterReader, ReasoningParser):
    """Qwen3 and others: reasoning follows a `<think>` that begins the answer or ends the prompt.

    Everything after `</think>` is content. Without `</think>` the whole answer is reasoning. A family with other
    markers needs a subclass with its `markers`; the first character of a marker must occur in it once.
    """

    markers: ClassVar[tuple[str, str]] = ("<think>", "</think>")

    def __init__(self, is_open: bool = False) -> None:
        ReasoningParser.__init__(self, is_open)
        self._breaks: list[str] = []  # held line breaks: reasoning only if more reasoning follows
        self._has_thought = False
        CharacterReader.__init__(self)

    def _read(self) -> Generator[None, str, None]:
        begin, end = self.markers
        lead, matched, character = "", 0, (yield)
        while character.isspace():
            lead += character
            character = yield
        while matched < len(begin) and character == begin[matched]:
            matched += 1
            character = yield
        if matched == len(begin):
            character = yield from self._thoughts(0, character)
        elif self.is_open and end.startswith(begin[:matched]):
            self._emit(Reasoning, lead)
            character = yield from self._thoughts(matched, character)
        elif self.is_open:
            self._emit(Reasoning, lead + begin[:matched])
            character = yield from self._thoughts(0, character)
        else:
            self._emit(Text, lead + begin[:matched])
        yield from self._rest(character, Text)

    def _thoughts(self, matched: int, character: str) -> Generator[None, str, str]:
        """Reads past the closing marker, `matched` characters of it read, and line breaks after it."""
        _, character = yield from self._until(self.markers[1], character, Reasoning, matched)
        while character == "\n":
            character = yield
        return character

    def _emit(self, kind: type[Event], text: str) -> None:
        if kind is Reasoning:
            text = self._without_outer_breaks(text)
        super()._emit(kind, text)

    def _without_outer_breaks(self, text: str) -> str:
        if not self._has_thought:
            text = text.lstrip("\n")
        thought = text.rstrip("\n")
        if not thought:
            self._breaks.append(text)
            return ""
        emitted = "".join(self._breaks) + thought
        self._breaks = [text[len(thought) :]]
        self._has_thought = True
        return emitted


class DeepSeekR1Parser(ThinkParser):
    """DeepSeek R1 and similar: answers begin with reasoning even if the prompt did not open it."""

    thinks_unasked = True

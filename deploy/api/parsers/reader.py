"""Base of the parsers: generators that read one character at a time.

A reader is written as if the whole text were there. It cannot see where the text was cut, so its events cannot depend
on that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import ClassVar, TypeAlias

from .interface import CallArguments, CallBegun, Event, Text, ToolParser

# Gets the next character at each `yield`, "" at the end; returns the first character that is not its own.
Reading: TypeAlias = Generator[None, str, str]


class Malformed(Exception):
    """The text is not the item that it began as.

    `character` is the first that does not fit; "" if the text ended too early.
    """

    def __init__(self, character: str) -> None:
        super().__init__(character)
        self.character = character


class CharacterReader:
    """Feeds `_read` one character at a time and joins the events that it emits."""

    def __init__(self) -> None:
        self._held: list[str] | None = None  # characters read since a possible call began; None outside one
        self._plain: tuple[str, type[Event]] | None = None  # (stop, kind): text up to `stop` is `kind`; "": the end
        self._events: list[tuple[type[Event], list[str]]] = []
        self._reading = self._read()
        next(self._reading)

    def feed(self, text: str) -> list[Event]:
        """Takes the next text; see `ToolParser.feed` and `ReasoningParser.feed`."""
        at = 0
        while at < len(text):
            if self._plain is not None:
                at = self._skip(text, at, *self._plain)
                if at == len(text):
                    break
            if self._held is not None:
                self._held.append(text[at])
            self._reading.send(text[at])
            at += 1
        return self._take()

    def _skip(self, text: str, at: int, stop: str, kind: type[Event]) -> int:
        """Emits the text up to `stop` in one piece and returns its end.

        Most text takes this fast path.
        """
        end = text.find(stop, at) if stop else -1
        end = len(text) if end < 0 else end
        self._emit(kind, text[at:end])
        return end

    def finish(self) -> list[Event]:
        """Ends the text; see `ToolParser.finish` and `ReasoningParser.finish`."""
        try:
            self._reading.send("")
        except StopIteration:
            return self._take()
        raise AssertionError("the reader continues after the end of the text")

    def _read(self) -> Generator[None, str, None]:
        """Reads the whole text. The first `yield` gets the first character; "" means the end."""
        raise NotImplementedError

    def _emit(self, kind: type[Event], text: str) -> None:
        """Emits an event, or extends the last one if it is of the same kind."""
        if not text:
            return
        if self._events and self._events[-1][0] is kind and kind is not CallBegun:
            self._events[-1][1].append(text)
        else:
            self._events.append((kind, [text]))

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return [kind("".join(pieces)) for kind, pieces in events]

    def _until(
        self, marker: str, character: str, kind: type[Event], matched: int = 0
    ) -> Generator[None, str, tuple[bool, str]]:
        """Emits all text up to `marker` as `kind`.

        Returns (True, next character), or (False, "") at the end. `matched` characters of the marker have been read
        already.

        NOTE: after a mismatch it looks for the marker's first character only, so that must occur once in the marker.
        """
        while character:
            if character == marker[matched]:
                matched += 1
                if matched == len(marker):
                    return True, (yield)
            else:
                matched = self._mismatch(marker, matched, character, kind)
            self._plain = None if matched else (marker[0], kind)
            character = yield
        self._plain = None
        self._emit(kind, marker[:matched])
        return False, ""

    def _mismatch(self, marker: str, matched: int, character: str, kind: type[Event]) -> int:
        """Emits a false beginning of the marker.

        Returns how many characters of a new one have begun.
        """
        self._emit(kind, marker[:matched])
        if character == marker[0]:
            return 1
        self._emit(kind, character)
        return 0

    def _rest(self, character: str, kind: type[Event]) -> Generator[None, str, None]:
        """Emits all remaining text as `kind`."""
        while character:
            self._emit(kind, character)
            self._plain = ("", kind)
            character = yield


class CallReader(CharacterReader, ToolParser):
    """Base of the readers of calls.

    A possible call is held back; if it is none, all of it becomes text.
    """

    offers_only: ClassVar[bool] = False  # True: a call of a tool that the request does not offer is text

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        ToolParser.__init__(self, tool_names)
        CharacterReader.__init__(self)

    def _read_calls(self, tag: str, calls: Callable[[str, str], Reading]) -> Generator[None, str, None]:
        """Reads an answer whose calls stand at its start or after a `tag`; the rest is text.

        White space before calls is allowed. `calls(character, held)` reads the calls, if there are any. `held` is the
        text read so far; `character` is its last character.
        """
        held, character = "", (yield)
        while True:
            held += character
            while character.isspace():
                character = yield
                held += character
            character = yield from calls(character, held)
            is_found, character = yield from self._until(tag, character, Text)
            if not is_found:
                return
            held = tag

    def _try(self, reading: Reading, held: str) -> Generator[None, str, tuple[bool, str]]:
        """Runs a reading that may be calls; returns (whether it was complete, next character).

        `held` is the text read so far, the current character included. If the reading breaks off, the text that was
        not emitted as a call is emitted as text.
        """
        self._held = list(held)
        try:
            character = yield from reading
        except Malformed as error:
            if self._held is not None:
                self._emit(Text, "".join(self._held[:-1] if error.character else self._held))
            return False, error.character
        finally:
            self._held = None
        return True, character

    def _begin(self, name: str) -> None:
        """Emits the beginning of a call. It stays a call, whatever follows."""
        self._held = None
        self._emit(CallBegun, name)

    def _give(self, name: str, arguments: str) -> None:
        """Emits a complete call."""
        self._begin(name)
        self._emit(CallArguments, arguments)

    def _check_name(self, name: str, character: str) -> None:
        if not 0 < len(name) <= MAX_NAME_CHARS or (self.offers_only and name not in self.tool_names):
            raise Malformed(character)


MAX_NAME_CHARS = 256


def blanks(character: str) -> Reading:
    """Skips white space."""
    while character.isspace():
        character = yield
    return character


def past(wanted: str, character: str) -> Reading:
    """Reads exactly the characters `wanted`; raises `Malformed` at the first other one."""
    for expected in wanted:
        if character != expected:
            raise Malformed(character)
        character = yield
    return character

"""Reading text that comes in pieces, as plainly as if all of it were there: parsers as generators of one character.

A reader can not see where its text was cut, so its events can not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import ClassVar, TypeAlias

from .interface import CallArguments, CallBegun, Event, Text, ToolParser

# Gets the next character at each `yield`, "" at the end; returns the first character that is not its own.
Reading: TypeAlias = Generator[None, str, str]


class Malformed(Exception):
    """Not what it began as. `character` is the first that does not fit; "" if the text ended too early."""

    def __init__(self, character: str) -> None:
        super().__init__(character)
        self.character = character


class Reader:
    """Feeds `_read` a character at a time, and joins what it tells."""

    def __init__(self) -> None:
        self._held: list[str] | None = None  # characters read since it may be a call that begins
        self._plain: tuple[str, type[Event]] | None = None  # what is all of one kind up to this character, "": the end
        self._told: list[tuple[type[Event], list[str]]] = []
        self._reading = self._read()
        next(self._reading)

    def feed(self, text: str) -> list[Event]:
        """See `ToolParser` and `ReasoningParser`."""
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
        """Tells what needs no look at each character: most of what a model says. Returns where that ends."""
        end = text.find(stop, at) if stop else -1
        end = len(text) if end < 0 else end
        self._tell(kind, text[at:end])
        return end

    def finish(self) -> list[Event]:
        """Likewise."""
        try:
            self._reading.send("")
        except StopIteration:
            return self._take()
        raise AssertionError("the reading goes on behind the end")

    def _read(self) -> Generator[None, str, None]:
        """The whole text; its first `yield` gets the first character, and it ends when it gets ""."""
        raise NotImplementedError

    def _tell(self, kind: type[Event], text: str) -> None:
        """An event, or more text of the one before."""
        if not text:
            return
        if self._told and self._told[-1][0] is kind and kind is not CallBegun:
            self._told[-1][1].append(text)
        else:
            self._told.append((kind, [text]))

    def _take(self) -> list[Event]:
        told, self._told = self._told, []
        return [kind("".join(pieces)) for kind, pieces in told]

    def _until(
        self, marker: str, character: str, kind: type[Event], matched: int = 0
    ) -> Generator[None, str, tuple[bool, str]]:
        """Tells all up to `marker` as `kind`: (True, what follows it), or (False, "") at the end of the text. So many
        characters of it have been `matched` before.

        NOTE: after a mismatch it looks for the marker's first character only, so that must occur in it once.
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
        self._tell(kind, marker[:matched])
        return False, ""

    def _mismatch(self, marker: str, matched: int, character: str, kind: type[Event]) -> int:
        """Tells what was no marker after all, and returns how much of another one has begun."""
        self._tell(kind, marker[:matched])
        if character == marker[0]:
            return 1
        self._tell(kind, character)
        return 0

    def _rest(self, character: str, kind: type[Event]) -> Generator[None, str, None]:
        """All that follows."""
        while character:
            self._tell(kind, character)
            self._plain = ("", kind)
            character = yield


class CallReader(Reader, ToolParser):
    """A reader of calls. What may become one is held back; if it does not, all of it is text."""

    offers_only: ClassVar[bool] = False  # a call of a tool that the request does not offer is text

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        ToolParser.__init__(self, tool_names)
        Reader.__init__(self)

    def _read_calls(self, tag: str, calls: Callable[[str, str], Reading]) -> Generator[None, str, None]:
        """A whole answer whose calls stand at its start or behind a `tag`, white space aside; all else is text.

        `calls(character, held)` reads some, if there are any: `held` is what was read before, and `character`, the last
        of it, is the one in hand.
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
        """Reads what may be calls: (whether it was all that, what follows). `held` is what has been read of it, the
        character in hand included. Where it breaks off, what has not been told as a call is text."""
        self._held = list(held)
        try:
            character = yield from reading
        except Malformed as error:
            if self._held is not None:
                self._tell(Text, "".join(self._held[:-1] if error.character else self._held))
            return False, error.character
        finally:
            self._held = None
        return True, character

    def _begin(self, name: str) -> None:
        """From here on it is a call, whatever comes."""
        self._held = None
        self._tell(CallBegun, name)

    def _give(self, name: str, arguments: str) -> None:
        """A call that is known whole."""
        self._begin(name)
        self._tell(CallArguments, arguments)

    def _check_name(self, name: str, character: str) -> None:
        if not 0 < len(name) <= MAX_NAME_CHARS or (self.offers_only and name not in self.tool_names):
            raise Malformed(character)


MAX_NAME_CHARS = 256


def blanks(character: str) -> Reading:
    """Past white space."""
    while character.isspace():
        character = yield
    return character


def past(wanted: str, character: str) -> Reading:
    """Past these characters, which have to be there."""
    for expected in wanted:
        if character != expected:
            raise Malformed(character)
        character = yield
    return character

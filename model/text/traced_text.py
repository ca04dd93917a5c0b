"""A string that knows which of its characters come from a request, through all that a chat template does to it.

Special tokens that a message spells must stay ordinary text, and templates must see messages as they were sent. So
nothing is put into the strings: each keeps the origin of its characters beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

from jinja2 import Undefined
from markupsafe import escape

TEMPLATE, REQUEST = "t", "r"  # the origins of a character


class TracedText(str):
    """A text with the origin of each character; equal to the plain text in everything else.

    Its own methods keep the origins exactly. A method that cannot gives a text of the request as a whole, so that
    nothing from a request is ever taken for the template's.
    """

    __slots__ = ("_origins",)  # one letter per character; no template can read it, as its name begins with "_"

    _origins: str

    def __new__(cls, text: str, origins: str | None = None) -> TracedText:
        """All of the text is from the request unless `origins` says otherwise."""
        made = super().__new__(cls, text)
        made._origins = REQUEST * len(made) if origins is None else origins
        return made

    @classmethod
    def of(cls, text: str) -> TracedText:
        """A plain string is the template's; any other subclass of `str` counts as the request's."""
        return text if isinstance(text, TracedText) else cls(text, origins_of(text))

    # -- parts

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        return TracedText(super().__getitem__(key), self._origins[key])

    def __iter__(self) -> Iterator[str]:
        return (self[i] for i in range(len(self)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        whole = self._located(super().splitlines(keepends=True), "")
        return whole if keepends else [line[: len(str.splitlines(line)[0])] for line in whole]

    def partition(self, sep: str) -> tuple[str, str, str]:
        head, middle, _ = super().partition(sep)
        begin, end = len(head), len(head) + len(middle)
        return self[:begin], self[begin:end], self[end:]

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        head, middle, _ = super().rpartition(sep)
        begin, end = len(head), len(head) + len(middle)
        return self[:begin], self[begin:end], self[end:]

    def strip(self, chars: str | None = None) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None) -> str:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> str:
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str) -> str:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str) -> str:
        return self[: len(super().removesuffix(suffix))]

    def _located(self, pieces: Sequence[str], sep: str | None) -> list[str]:
        """The pieces that the text was split into at `sep`, or at white space, with their origins."""
        found = []
        end = 0
        for i, piece in enumerate(pieces):
            begin = self.find(piece, end) if sep is None else end + (len(sep) if i else 0)
            end = begin + len(piece)
            found.append(self[begin:end])
        return found

    # -- sums

    def __add__(self, other: str) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return TracedText(super().__mul__(times), self._origins * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return TracedText(super().__mod__(values))

    def join(self, items: Iterable[str]) -> str:
        pieces: list[str] = []
        for item in items:
            pieces += [self, item] if pieces else [item]
        return joined(pieces)

    def replace(self, old: str, new: str, count: SupportsIndex = -1) -> str:
        if not old:
            return TracedText(super().replace(old, new, count))
        return TracedText.of(new).join(self.split(old, count))

    # -- changed letters

    def lower(self) -> str:
        return self._changed(super().lower())

    def upper(self) -> str:
        return self._changed(super().upper())

    def capitalize(self) -> str:
        return self._changed(super().capitalize())

    def title(self) -> str:
        return self._changed(super().title())

    def swapcase(self) -> str:
        return self._changed(super().swapcase())

    def casefold(self) -> str:
        return self._changed(super().casefold())

    def _changed(self, text: str) -> str:
        return TracedText(text, self._origins if len(text) == len(self) else None)


class TracedMarkup(TracedText):
    """A text that a template calls safe. As with Jinja's Markup, what is added to it is escaped as HTML."""

    __slots__ = ()

    def __add__(self, other: str) -> str:
        return TracedMarkup.of(joined((self, _escaped(other)))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return TracedMarkup.of(joined((_escaped(other), self))) if isinstance(other, str) else NotImplemented

    @classmethod
    def of(cls, text: str) -> TracedMarkup:
        return cls(text, origins_of(text))


def _escaped(text: str) -> str:
    if isinstance(text, TracedMarkup):
        return text
    return joined(_replaced(character, str(escape(str.__str__(character)))) for character in TracedText.of(text))


def _replaced(character: str, text: str) -> str:
    return TracedText(text, origins_of(character) * len(text))


def joined(pieces: Iterable[str]) -> str:
    """The pieces as one text; a plain string if none of them is traced."""
    pieces = list(pieces)
    text = "".join(pieces)
    if all(type(piece) is str for piece in pieces):
        return text
    return TracedText(text, "".join(map(origins_of, pieces)))


def origins_of(text: str) -> str:
    """The origin of each character of any string."""
    if isinstance(text, TracedText):
        return text._origins
    return (TEMPLATE if type(text) is str else REQUEST) * len(text)


def is_traced(value: Any) -> bool:
    """Whether a value may be or hold, at any depth, text of a request."""
    if isinstance(value, str):
        return type(value) is not str
    if isinstance(value, Mapping):
        return any(is_traced(key) or is_traced(child) for key, child in value.items())
    if isinstance(value, list | tuple):
        return any(map(is_traced, value))
    return not isinstance(value, int | float | Undefined | None)


def traced(value: Any) -> Any:
    """A copy of nested lists and mappings in which every string is the request's: keys too, as templates show them."""
    if isinstance(value, str):
        return TracedText(value)
    if isinstance(value, Mapping):
        return {traced(key): traced(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [traced(child) for child in value]
    return value


def strings(value: Any) -> Iterator[str]:
    """Every string in nested lists and mappings, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for child in value.values():
            yield from strings(child)
    elif isinstance(value, list | tuple):
        for child in value:
            yield from strings(child)


def request_runs(text: str) -> Iterator[tuple[int, int]]:
    """[begin, end) of each run of characters from the request."""
    origins = origins_of(text)
    begin = origins.find(REQUEST)
    while begin >= 0:
        end = origins.find(TEMPLATE, begin)
        end = len(origins) if end < 0 else end
        yield begin, end
        begin = origins.find(REQUEST, end)

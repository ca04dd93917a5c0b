"""What the text of a token holds, as bits: so that a step finds the rows that may need more than a look-up."""

from __future__ import annotations

import string
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

NOT_PLAIN = 1 << 63  # trait: the text depends on the tokens before
ANY = 1 << 62  # trait of every token; the lower bits are the character classes in its text
TEXTS_AT_ONCE = 8192  # whose characters are classified: more take tens of MB that the heap keeps


def token_traits(texts: Sequence[str]) -> NDArray[np.uint64]:
    """[len(texts)] the character classes in each text, one bit each, and the bit ANY."""
    parts = [_traits_of(texts[begin : begin + TEXTS_AT_ONCE]) for begin in range(0, len(texts), TEXTS_AT_ONCE)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def _traits_of(texts: Sequence[str]) -> NDArray[np.uint64]:
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32)
    classes = _CHARACTER_CLASS[np.minimum(codes, 128)]
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    traits = np.full(len(texts), ANY, np.uint64)
    is_spelled = np.diff(ends, prepend=0) > 0
    if len(codes):
        starts = np.concatenate([[0], ends[:-1]])[is_spelled]
        traits[is_spelled] |= np.bitwise_or.reduceat(np.left_shift(np.uint64(1), classes), starts)
    return traits


def classes_of(characters: Iterable[str]) -> int:
    """The classes of some characters, one bit each."""
    bits = 0
    for character in characters:
        bits |= 1 << int(_CHARACTER_CLASS[min(ord(character), 128)])
    return bits


def _character_classes() -> NDArray[np.uint64]:
    """[129] the class of each ASCII character, and of all others.

    A letter shares its class with its other case. Each whitespace and punctuation character, with which stop strings
    often begin, has its own class. All remaining characters share one.
    """
    classes = np.full(129, 61, np.uint64)
    for index, character in enumerate(string.punctuation + " \n\t"):
        classes[ord(character)] = index
    for index, (lower, upper) in enumerate(zip(string.ascii_lowercase, string.ascii_uppercase, strict=True), 35):
        classes[[ord(lower), ord(upper)]] = index
    return classes


_CHARACTER_CLASS = _character_classes()

"""The merges of a SentencePiece vocabulary, which its file does not hold: they follow from the tokens' scores."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError

LONGEST = 1024  # characters of a token
MERGED = 1 << 27  # characters of all merges; Gemma 3 has 4 million


def merges_of(
    texts: Sequence[str],
    scores: Sequence[float],
    is_made: Sequence[bool],
    vocabulary: Mapping[str, int],
    source: str,
) -> NDArray[np.int32]:
    """Any two tokens whose joined text is a token, that with the highest score first: their ids [M, 2].

    `is_made`: whether a token is made of others. `vocabulary`: ids by text. Raises CheckpointError, naming `source`,
    for tokens so long or merges so many that no text needs them; the time is within `LONGEST` steps a character.
    """
    order = sorted(
        (index for index, text in enumerate(texts) if is_made[index] and len(text) > 1),
        key=lambda index: (-scores[index], index),
    )
    longest = max((len(texts[index]) for index in order), default=0)
    if longest > LONGEST:
        _fail(source, f"a token has {longest} characters, and at most {LONGEST} are read")
    merges = array("i")
    num_characters = 0
    for index in order:
        known = sorted(_cuts(texts[index], vocabulary))
        num_characters += len(texts[index]) * len(known)
        if num_characters > MERGED:
            _fail(source, f"its tokens are made of each other in merges of more than {MERGED} characters")
        for pair in known:
            merges.extend(pair)
    return np.array(merges, np.int32).reshape(-1, 2)


def _cuts(text: str, vocabulary: Mapping[str, int]) -> Iterator[tuple[int, int]]:
    """The pairs of tokens that make a text."""
    for cut in range(1, len(text)):
        left = vocabulary.get(text[:cut])
        if left is not None and (right := vocabulary.get(text[cut:])) is not None:
            yield left, right


def _fail(source: str, problem: str) -> NoReturn:
    raise CheckpointError(
        f"{source}: tokenizer.ggml.tokens: {problem}; serve another GGUF file of the model, or its checkpoint"
    )

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
MOST_STEPS = 64  # characters of a token whose steps are followed


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


def used_merges(
    texts: Sequence[str], merges: NDArray[np.int32], is_made: Sequence[bool], vocabulary: Mapping[str, int]
) -> NDArray[np.int32]:
    """Those of the merges that any text can need, in their order: about half. The others change no text's tokens.

    A token is made of its characters alone, by the same steps whatever stands around them. So of all merges that would
    make it only the last of these steps is needed. Tokens of over `MOST_STEPS` characters keep all merges, and so does
    what is made of tokens that are not made themselves, as those of single bytes.
    """
    if not len(merges):
        return merges
    lefts, rights = merges.astype(np.int64).T
    results = np.array([vocabulary[texts[left] + texts[right]] for left, right in merges.tolist()], np.int64)
    made, lengths = np.unique(results), np.array([len(text) for text in texts])
    foreign = ~np.array(is_made) & (lengths > 1)
    is_kept = (lengths > MOST_STEPS)[results]
    while (found := (foreign[lefts] | foreign[rights]) & ~is_kept).any():
        is_kept |= found
        foreign[results[found]] = True
    steps = _Steps(lefts * len(texts) + rights, results, len(texts))
    for length in range(2, MOST_STEPS + 1):
        some = made[lengths[made] == length]
        characters = [[vocabulary.get(character, -1) for character in texts[index]] for index in some.tolist()]
        is_kept[steps.last_of(np.array(characters, np.int64).reshape(-1, length), some)] = True
    return merges[is_kept]


class _Steps:
    """Merges by the pairs that they join, `left * num_tokens + right`: that of the lowest number comes first."""

    def __init__(self, pairs: NDArray[np.int64], results: NDArray[np.int64], num_tokens: int) -> None:
        self._order, self._results, self._num_tokens = np.argsort(pairs), results, num_tokens
        self._sorted = pairs[self._order]

    def last_of(self, symbols: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The last merges by which rows of characters [N, L] become the tokens [N]; none of those that do not."""
        last = np.zeros(len(tokens), np.int64)
        ranks = self._ranks(symbols[:, :-1], symbols[:, 1:])
        while symbols.shape[1] > 1 and len(tokens):
            place = ranks.argmin(axis=1)  # the first of equal ones
            last = ranks[np.arange(len(tokens)), place]
            goes_on = last < len(self._results)
            symbols, tokens, ranks, place, last = (part[goes_on] for part in (symbols, tokens, ranks, place, last))
            rows, width = np.arange(len(tokens)), symbols.shape[1]
            symbols[rows, place] = self._results[last]
            symbols = symbols[np.arange(width) != place[:, None] + 1].reshape(len(tokens), width - 1)
            ranks = ranks[np.arange(width - 1) != place[:, None]].reshape(len(tokens), width - 2)
            for begin in (place - 1, place):  # the pairs on both sides of the new token
                at = rows[(begin >= 0) & (begin < width - 2)]
                ranks[at, begin[at]] = self._ranks(symbols[at, begin[at]], symbols[at, begin[at] + 1])
        of_tokens: NDArray[np.int64] = last[symbols[:, 0] == tokens]
        return of_tokens

    def _ranks(self, lefts: NDArray[np.int64], rights: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of each pair's merge; as many as there are merges for a pair without one."""
        pairs = np.where((lefts < 0) | (rights < 0), -1, lefts * self._num_tokens + rights)
        places = np.minimum(np.searchsorted(self._sorted, pairs), len(self._sorted) - 1)
        return np.where(self._sorted[places] == pairs, self._order[places], len(self._sorted))

"""`Script`: the answers of a scripted device, by a hash of earlier tokens or a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...messages import Bools, Indices, Ints
from ...params import SamplingParams, choice_seed
from ...pooling_params import Floats, PoolingParams
from .byte_tokenizer import EOS

Hashes = NDArray[np.uint64]

ALPHABET = b"etaoin shrdlucmfwypvbgkjqxz.,\xc3\xa9e"  # the 32 bytes of hashed answers
EMBEDDING_SIZE = 8
WORD = 2**64 - 1

_FACTOR = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_LETTERS = np.frombuffer(ALPHABET, np.uint8).astype(np.int32)


@dataclass(frozen=True)
class Script:
    """The answers of a scripted device.

    By default the next token is a keyed hash of all earlier tokens, and of the seed unless greedy: a letter or, with
    `eos_probability`, EOS. `answer` is a function from the prompt's token ids and the choice's seed to the answer's
    token ids; EOS follows them. With a `period`, answers repeat: a letter depends on the seed and its place in the
    period, and only EOS on earlier tokens.

    With a `short_length`, sequences of more tokens have other keys (LongRoPE): reading one key of the other kind
    changes the answer.

    The sampling parameters max_tokens, min_tokens, ignore_eos, stop_token_ids, seed and temperature = 0 have an
    effect; all others are ignored.
    """

    key: int = 0
    eos_probability: float = 0.02
    answer: Callable[[Sequence[int], int], Sequence[int]] | None = None
    period: int | None = None
    short_length: int = 0  # 0: all sequences have the same keys

    def next_token(self, context: int, seed: int, place: int, may_end: bool) -> int:
        """The token after a context with hash `context`, at index `place` of the answer."""
        key = seed * _FACTOR + self.key & WORD
        mixed = _mix(context ^ key)
        if may_end and (mixed >> 11) * 2.0**-53 < self.eos_probability:
            return EOS
        return ALPHABET[(mixed if self.period is None else _mix(place % self.period ^ key)) & 31]

    def embedding(self, prompt: Sequence[int]) -> Floats:
        """The embedding of a whole prompt, of length 1, from its hash. [EMBEDDING_SIZE]"""
        context, factor = 0, 1
        for token in prompt:
            context, factor = (context + (token + 3) * factor) & WORD, factor * _FACTOR & WORD
        vector = PoolingParams().finish(self.vector(context))
        assert vector is not None
        return vector

    def vector(self, context: int) -> Floats:
        """The vector of a context with hash `context`. [EMBEDDING_SIZE]"""
        mixed = _mix(context ^ self.key & WORD)
        return np.frombuffer(mixed.to_bytes(EMBEDDING_SIZE, "little"), np.uint8).astype(np.float32) + 1

    def next_tokens(self, contexts: Hashes, seeds: Hashes, places: Indices, may_end: Bools) -> Ints:
        """As `next_token` for many rows, [L] each."""
        with np.errstate(over="ignore"):
            keys = seeds * np.uint64(_FACTOR) + np.uint64(self.key & WORD)
        z = _mix_all(contexts ^ keys)
        is_end = may_end & ((z >> np.uint64(11)).astype(np.float64) * 2.0**-53 < self.eos_probability)
        if self.period is not None:
            z = _mix_all((places % self.period).astype(np.uint64) ^ keys)
        return np.where(is_end, np.int32(EOS), _LETTERS[(z & np.uint64(31)).astype(np.intp)]).astype(np.int32)

    def expected(self, prompt: Sequence[int], params: SamplingParams, choice: int = 0) -> list[int]:
        """The whole answer to a prompt, EOS or stop token id included.

        `params.max_tokens` must be a number.
        """
        assert params.max_tokens is not None
        seed = seed_of(params, choice_seed(params.seed or 0, choice))
        written = None if self.answer is None else [*self.answer(list(prompt), seed), EOS]
        context, factor = 0, 1
        tokens: list[int] = []
        for token in prompt:
            context, factor = (context + (token + 3) * factor) & WORD, factor * _FACTOR & WORD
        while len(tokens) < params.max_tokens:
            place = len(tokens)
            may_end = not params.ignore_eos and place >= params.min_tokens
            if written is None:
                token = self.next_token(context, seed, place, may_end)
            else:
                token = written[min(place, len(written) - 1)]
            tokens.append(token)
            is_stop = token == EOS or token in params.stop_token_ids
            if is_stop and place >= params.min_tokens and not (token == EOS and params.ignore_eos):
                break
            context, factor = (context + (token + 3) * factor) & WORD, factor * _FACTOR & WORD
        return tokens


def seed_of(params: SamplingParams, seed: int) -> int:
    """The effective seed: 0 when greedy."""
    return 0 if params.is_greedy else seed


def _mix(z: int) -> int:
    z = (z ^ (z >> 30)) * _MIX_1 & WORD
    z = (z ^ (z >> 27)) * _MIX_2 & WORD
    return z ^ (z >> 31)


def _mix_all(z: Hashes) -> Hashes:
    """As `_mix`, of each number."""
    with np.errstate(over="ignore"):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_2)
        return z ^ (z >> np.uint64(31))


# -- hashes of texts


def powers(count: int) -> Hashes:
    """[count] the factors of tokens in a hash, by position."""
    with np.errstate(over="ignore"):
        factors = np.full(count, _FACTOR, np.uint64)
        factors[0] = 1
        return np.cumprod(factors, dtype=np.uint64)


def hash_rows(tokens: Ints, lengths: NDArray[np.integer[Any]], factors: Hashes) -> Hashes:
    """[L] hashes of the first `lengths[i]` of `tokens[i]`, position by position."""
    width = tokens.shape[1]
    with np.errstate(over="ignore"):
        terms = (tokens + 3).astype(np.uint64) * factors[:width]
        hashes: Hashes = np.where(np.arange(width) < lengths[:, None], terms, np.uint64(0)).sum(1, dtype=np.uint64)
        return hashes

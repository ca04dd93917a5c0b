"""The windows in which a text is scored: each token once, with at least a window less a stride before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...model.text.tokenizer import Tokenizer
from ..errors import ConfigError
from ..messages import Ints


@dataclass(frozen=True, slots=True, eq=False)
class TextWindow:
    """Consecutive tokens of a text, which a model computes as one prompt."""

    token_ids: Ints  # [P] with the tokens that the tokenizer puts before a text
    num_scored: int  # the last ones, at most P - 1: a prompt's first token is given


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedText:
    """A text as token ids."""

    before: Ints  # [B] what the tokenizer puts before every text, such as a BOS token
    token_ids: Ints  # [N] the text's own
    num_bytes: int  # of the scored tokens' text: without a token before it, the first one is given

    @classmethod
    def read(cls, tokenizer: Tokenizer, text: str, num_tokens: int | None = None) -> TokenizedText:
        """The first `num_tokens` tokens of a text, or all. Special tokens may be spelled in it.

        Raises `ConfigError` for a text without a token to score.
        """
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        if num_tokens is not None and num_tokens < len(token_ids):
            token_ids = token_ids[:num_tokens]
            text = tokenizer.decode(token_ids, skip_special_tokens=False)
        before = tokens_before(tokenizer)
        if len(before) + len(token_ids) < 2:
            raise ConfigError(f"the text has {len(token_ids)} tokens: must be at least 2, one of them to be predicted")
        given = "" if before else tokenizer.decode(token_ids[:1], skip_special_tokens=False)
        num_bytes = len(text.encode()) - len(given.encode())
        return cls(np.array(before, np.int32), np.array(token_ids, np.int32), max(1, num_bytes))

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - (0 if len(self.before) else 1)

    def windows(self, context_length: int, stride: int) -> Iterator[TextWindow]:
        """Windows of at most `context_length` tokens, each `stride` tokens behind the one before.

        Each begins with the tokens that the tokenizer puts before a text.
        """
        room = context_length - len(self.before)  # for tokens of the text
        done = min(len(self.token_ids), room)
        is_given = 0 if len(self.before) else 1
        yield TextWindow(np.concatenate([self.before, self.token_ids[:done]]), done - is_given)
        while done < len(self.token_ids):
            end = min(done + stride, len(self.token_ids))
            yield TextWindow(np.concatenate([self.before, self.token_ids[max(0, end - room) : end]]), end - done)
            done = end

    def check(self, context_length: int, stride: int) -> None:
        """Raises `ConfigError` unless the windows score each token behind at least one other."""
        if context_length < 2 + len(self.before):
            raise ConfigError(f"context_length = {context_length}: must be at least {2 + len(self.before)}")
        most = context_length - max(1, len(self.before))
        if not 1 <= stride <= most:
            raise ConfigError(
                f"stride = {stride}: must be at least 1, and at most {most} with context_length = {context_length}"
            )


def tokens_before(tokenizer: Tokenizer) -> list[int]:
    """The special tokens that the tokenizer puts before a text."""
    whole, plain = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    places = range(len(whole) - len(plain) + 1)
    start = next((place for place in places if whole[place : place + len(plain)] == plain), 0)
    return whole[:start]

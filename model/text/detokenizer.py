"""Token ids to text one by one, in linear time: whole characters only, and the same text as decoding all ids at once.

Implements the two decoders of Llama, Mistral and Qwen checkpoints:

- byte-level: the bytes of all tokens are one UTF-8 string, in which each invalid sequence is one U+FFFD;
- byte fallback: tokens are text, but a run of `<0xNN>` tokens is one UTF-8 string. If any of it is invalid, every byte
  of it is U+FFFD. So a run is held back until the token that ends it.

The first space of the text is dropped if the tokenizer prepends one.
"""

from __future__ import annotations

import codecs
import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError
from .token_bytes import byte_level_table, byte_tokens, sentencepiece_table
from .tokenizer import Tokenizer


class TextTable:
    """The text that each token id adds, made once for a tokenizer and shared by all sequences.

    `texts[i]` is the text of token i if `is_plain[i]`: whole characters that do not depend on earlier tokens. A
    sequence with nothing pending may take them from here without calling its IncrementalDecoder.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.is_byte_level, self.strips_first_space = _decoder_rules(tokenizer)
        size = len(tokenizer)
        tokens = tokenizer.tokens
        self.special_ids = tokenizer.special_ids
        table = byte_level_table(tokens) if self.is_byte_level else sentencepiece_table(tokens)
        self.is_byte: NDArray[np.bool_] = np.zeros(size, np.bool_)  # a `<0xNN>` token
        self.is_byte[[] if self.is_byte_level else byte_tokens(tokens)] = True
        texts, incomplete = _complete_texts(table, tokens)
        self.texts = texts
        self.bytes = TokenBytes(texts, incomplete)
        self.is_plain: NDArray[np.bool_] = ~self.is_byte
        self.is_plain[list(incomplete)] = False
        self.is_plain[[token_id for token_id in self.special_ids if token_id < size]] = False

    def __len__(self) -> int:
        return len(self.bytes)

    def has_text(self, token_ids: Iterable[int], skip_special_tokens: bool) -> bool:
        """Whether any of the tokens adds text."""
        skipped: frozenset[int] = self.special_ids if skip_special_tokens else frozenset()
        size = len(self.bytes)
        return any(i < size and self.bytes[i] != b"" and i not in skipped for i in map(int, token_ids))


class TokenBytes(Sequence[bytes]):
    """The bytes of each token, made of its text when asked for: to keep them takes 14 MB for 262,144 tokens."""

    def __init__(self, texts: Sequence[str], incomplete: Mapping[int, bytes]) -> None:
        """`incomplete`: those whose bytes are not whole characters, by id."""
        self._texts, self._incomplete = texts, incomplete

    def __len__(self) -> int:
        return len(self._texts)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self._texts)))]
        raw = self._incomplete.get(index)
        return self._texts[index].encode() if raw is None else raw


class IncrementalDecoder:
    """The text of one sequence, token by token.

    The results of `push` and `flush`, joined, are `tokenizer.decode` of all pushed ids. With `continues` the sequence
    follows other text, so its first space stays; `after` finds that out from a prompt.
    """

    def __init__(self, table: TextTable, skip_special_tokens: bool = True, continues: bool = False) -> None:
        self._table = table
        self._skipped_ids: frozenset[int] = table.special_ids if skip_special_tokens else frozenset()
        self._at_start = table.strips_first_space and not continues
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # the current run of byte tokens, with byte fallback
        self._has_pending = False

    @classmethod
    def after(cls, table: TextTable, prompt: Iterable[int], skip_special_tokens: bool = True) -> IncrementalDecoder:
        """A decoder for what follows the tokens of a prompt.

        A prompt of no text, as the begin token alone, leaves the answer at the start of the text.
        """
        continues = not table.strips_first_space or table.has_text(prompt, skip_special_tokens)
        return cls(table, skip_special_tokens, continues)

    def __deepcopy__(self, memo: object) -> IncrementalDecoder:
        """A decoder in the same state; the table is shared."""
        twin = copy.copy(self)
        twin._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        twin._utf8.setstate(self._utf8.getstate())
        twin._run = bytearray(self._run)
        return twin

    @property
    def is_idle(self) -> bool:
        """True while nothing is held back: plain ids may then be taken from the table, without a `push`."""
        return not (self._has_pending or self._at_start)

    def push(self, token_id: int) -> str:
        """The text that this token completes: often "", sometimes several characters."""
        table = self._table
        if token_id in self._skipped_ids or token_id >= len(table):
            return ""
        if self.is_idle and table.is_plain[token_id]:
            return table.texts[token_id]
        raw = table.bytes[token_id]
        if table.is_byte_level:
            text = self._utf8.decode(raw)
            self._has_pending = self._utf8.getstate()[0] != b""
            return text
        if table.is_byte[token_id]:
            self._run += raw
            self._has_pending = True
            return ""
        return self._from_start(self._end_run() + raw.decode())

    def flush(self) -> str:
        """The text held back, which no token will complete: the sequence has ended."""
        self._has_pending = False
        if self._table.is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._from_start(self._end_run())

    def _end_run(self) -> str:
        run, self._run, self._has_pending = bytes(self._run), bytearray(), False
        text = _complete_text(run)
        return "\N{REPLACEMENT CHARACTER}" * len(run) if text is None else text

    def _from_start(self, text: str) -> str:
        """The text without the space that the tokenizer prepends to every text."""
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text


def _complete_texts(table: Sequence[bytes], tokens: Sequence[str | None]) -> tuple[list[str], dict[int, bytes]]:
    """`_complete_text` of each without a call for each, "" for None; and the bytes of those with None, by id.

    A text that equals its token is that object, as half of them do.
    """
    texts: list[str] = []
    incomplete: dict[int, bytes] = {}
    for index, (raw, token) in enumerate(zip(table, tokens, strict=True)):
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            incomplete[index], text = raw, ""
        texts.append(token if text == token else text)
    return texts, incomplete


def _complete_text(raw: bytes) -> str | None:
    """The text of the bytes; None if they are not whole characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _decoder_rules(tokenizer: Tokenizer) -> tuple[bool, bool]:
    """(is byte-level, strips the first space). Raises CheckpointError for any other decoder."""
    if tokenizer.cleans_up:
        raise CheckpointError(
            "tokenizer_config.json: clean_up_tokenization_spaces = true would remove spaces from answers, and is "
            "supported for encoder models only; set it to false"
        )
    decoder = tokenizer.decoder_config
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and kinds[3:] in ([], ["Strip"]):
        for step in steps:
            values = {key: value for key, value in step.items() if key != "type"}
            if values != _VALUES[step["type"]]:
                raise CheckpointError(
                    f"tokenizer.json: the decoder's {step['type']} has {str(values)[:128]}; "
                    f"supported: {_VALUES[step['type']]}"
                )
        return False, kinds[3:] == ["Strip"]
    raise CheckpointError(
        f"tokenizer.json: a decoder of {' + '.join(kinds)} is not supported; "
        "supported: ByteLevel, and Replace + ByteFallback + Fuse with or without Strip"
    )


_VALUES: dict[str, dict[str, Any]] = {
    "Replace": {"pattern": {"String": "▁"}, "content": " "},
    "ByteFallback": {},
    "Fuse": {},
    "Strip": {"content": " ", "start": 1, "stop": 0},
}

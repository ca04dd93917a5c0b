"""A tokenizer without files: each byte is a token, plus four special tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...messages import ChatPrompt, Ints
from ...params import SamplingParams

EOS = 256
SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")  # ids from 256
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)


class ByteTokenizer:
    """Converts text to token ids and back: one token per byte, and four special ones."""

    eos_token = SPECIAL_TOKENS[0]
    eos_token_id = EOS
    bos_token_id = None
    special_ids = frozenset(range(256, VOCAB_SIZE))
    strips_first_space = False

    def __init__(self) -> None:
        self.bytes = [bytes([i]) for i in range(256)] + [name.encode() for name in SPECIAL_TOKENS]
        self.texts = [chr(i) if i < 128 else "" for i in range(VOCAB_SIZE)]
        self.is_plain = np.arange(VOCAB_SIZE) < 128

    def __len__(self) -> int:
        return VOCAB_SIZE

    def encode_text(self, text: str) -> list[int]:
        """The UTF-8 bytes of the text. Text cannot contain special tokens."""
        return list(text.encode(errors="replace"))

    def encode_chat(self, chat: ChatPrompt) -> list[int]:
        """Each message between its role's token and <|end|>, then the assistant's role token."""
        ids: list[int] = []
        for message in chat.messages:
            token = f"<|{message.get('role', 'user')}|>"
            role = SPECIAL_TOKENS.index(token) if token in SPECIAL_TOKENS[1:] else 2
            ids += [256 + role, *self.encode_text(_content(message.get("content"))), EOS]
        if chat.add_generation_prompt:
            ids.append(256 + 3)
        elif chat.continue_final_message and ids:
            ids.pop()
        return ids

    def encode_words(self, text: str, param: str = "bad_words") -> list[int]:
        """As `encode_text`."""
        return self.encode_text(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode_text`: there are no special tokens to add."""
        return self.encode_text(text)

    def encode_text_cut(
        self, text: str, most: int, side: str | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """As `encode_text`, cut on one side."""
        ids = self.encode_text(text)
        return ids[-most:] if side == "left" else ids[:most]

    def encode_pair_cut(
        self, first: str, second: str, most: int, side: str | None = None, instruction: str | None = None
    ) -> tuple[list[int], list[int]]:
        """Two texts with <|end|> between them, cut on one side. `instruction` has no effect."""
        begin, rest = [*self.encode_text(first), EOS], self.encode_text(second)
        kept = slice(-most, None) if side == "left" else slice(most)
        return (begin + rest)[kept], ([0] * len(begin) + [1] * len(rest))[kept]

    def count_prompt(self, text: str) -> int:
        """The bytes of the text."""
        return len(self.encode_text(text))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole answer."""
        decoder = _ByteDecoder(skip_special_tokens)
        return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()

    def decoder(self, params: SamplingParams, prompt: Sequence[int] | Ints = ()) -> _ByteDecoder:
        """A decoder for one answer, whatever its prompt."""
        return _ByteDecoder(params.skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, or the name of a special token."""
        return self.bytes[token_id]


class _ByteDecoder:
    """Decodes UTF-8 one byte at a time; invalid bytes become U+FFFD."""

    def __init__(self, skip_special_tokens: bool) -> None:
        self._skips = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id < 256:
            return self._decoder.decode(bytes([token_id]))
        return self.flush() + ("" if self._skips else SPECIAL_TOKENS[token_id - 256])

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text

    @property
    def is_idle(self) -> bool:
        return not self._decoder.getstate()[0]


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or () if isinstance(part, dict))

"""A vocabulary of bytes, and what grammars over it accept and write."""

from __future__ import annotations

import json
import random
from typing import Any

from llguidance import LLMatcher

from millrace.model.text.grammar import GrammarCompiler, grammar_text
from millrace.model.text.vocabulary import Vocabulary

EOS, QUOTE = 256, ord('"')
BYTES = Vocabulary([bytes([i]) for i in range(256)] + [b""], frozenset({EOS}), (EOS,), vocab_size=257)
COMPILER = GrammarCompiler(BYTES)


def matcher_of(schema: Any, is_compact: bool = False) -> LLMatcher:
    return COMPILER.compile(grammar_text("json", json.dumps(schema), is_compact))


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether `text` is a whole answer."""
    copy, tokens = matcher.deep_copy(), list(text.encode())
    return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()


def holds(schema: Any, value: Any) -> bool:
    """Whether an answer may be `value`, as `json.dumps` writes it."""
    return accepts(matcher_of(schema), json.dumps(value, separators=(",", ":"), ensure_ascii=False))


def write(matcher: LLMatcher, draw: random.Random, most: int = 400) -> str | None:
    """A random answer; None if it is not complete after `most` bytes."""
    copy, written = matcher.deep_copy(), bytearray()
    while len(written) < most:
        allowed = COMPILER.allowed(copy)
        if copy.is_accepting() and (not allowed or draw.random() < 0.5):
            return written.decode()
        token = QUOTE if QUOTE in allowed and draw.random() < 0.2 else draw.choice(allowed)  # strings end soon
        assert copy.consume_token(token)
        written.append(token)
    return None

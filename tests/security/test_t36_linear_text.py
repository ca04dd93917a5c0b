"""T36: texts that make tokenizers slow. Twice as long takes about twice as long, with the bundled model's tokenizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import millrace.model.demo as demo
from millrace.model.tokenizer import Tokenizer
from tests.counts import count

CHARS = 1 << count(16, full=20)
TRIES = 5


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.read(Path(next(iter(demo.__path__))) / "weights")


def seconds(run: Callable[[], object]) -> float:
    began = time.thread_time()
    run()
    return time.thread_time() - began


def check_linear(of: Callable[[int], Callable[[], object]]) -> None:
    """The best of a few ratios: what is quadratic is so each time, a busy machine is not."""
    short, long = of(CHARS // 2), of(CHARS)
    short()
    ratios = [seconds(long) / max(seconds(short), 1e-4) for _ in range(TRIES)]
    assert min(ratios) <= 2.5, ratios


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    ["a", " ", "\u0301", "<|end|", "<|", "e\u0301", "\u200d\U0001f469", "\n", "9", "\ufffd", "ab" * 7 + " "],
    ids=lambda piece: ascii(piece),
)
def test_encoding_takes_time_in_proportion_to_its_text(tokenizer, piece):
    def of(num_chars: int) -> Callable[[], object]:
        text = piece * (num_chars // len(piece))
        return lambda: tokenizer.encode(text)

    check_linear(of)


@pytest.mark.slow
def test_decoding_takes_time_in_proportion_to_its_tokens(tokenizer):
    """Of tokens that are single bytes, of which some never make a character."""
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(len(tokenizer))}
    odd = [by_bytes[bytes([byte])] for byte in (0xF0, 0x9F, 0x80, 0xC3) if bytes([byte]) in by_bytes]
    assert odd, "the tokenizer falls back to bytes"

    def of(num_chars: int) -> Callable[[], object]:
        ids = (odd * num_chars)[: num_chars // 8]
        return lambda: tokenizer.decode(ids)

    check_linear(of)

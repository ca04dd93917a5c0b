"""Texts that make tokenizers slow. Twice as long takes about twice as long, with the bundled model's tokenizer.

On average over four doublings: where a text outgrows a cache of the processor, one of them costs up to 3.1 times (at
1 MiB of U+FFFD), and those before it 2.1. What is quadratic costs 256 times in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import millrace.model.demo as demo
from millrace.model.text.tokenizer import Tokenizer
from tests.counts import count

NUM_BYTES = 1 << count(16, full=20)
DOUBLINGS = 4
MOST = 2.5**DOUBLINGS
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
    short, long = of(NUM_BYTES >> DOUBLINGS), of(NUM_BYTES)
    short()
    ratios = [seconds(long) / max(seconds(short), 1e-4) for _ in range(TRIES)]
    assert min(ratios) <= MOST, ratios


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    ["a", " ", "\u0301", "<|end|", "<|", "e\u0301", "\u200d\U0001f469", "\n", "9", "\ufffd", "ab" * 7 + " "],
    ids=lambda piece: ascii(piece),
)
def test_encoding_takes_time_in_proportion_to_its_text(tokenizer, piece):
    def of(num_bytes: int) -> Callable[[], object]:
        text = piece * (num_bytes // len(piece.encode()))
        return lambda: tokenizer.encode(text)

    check_linear(of)


@pytest.mark.slow
def test_decoding_takes_time_in_proportion_to_its_tokens(tokenizer):
    """Of tokens that are single bytes, of which some never make a character."""
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(len(tokenizer))}
    odd = [by_bytes[bytes([byte])] for byte in (0xF0, 0x9F, 0x80, 0xC3) if bytes([byte]) in by_bytes]
    assert odd, "the tokenizer falls back to bytes"

    def of(num_bytes: int) -> Callable[[], object]:
        ids = (odd * num_bytes)[: num_bytes // 8]
        return lambda: tokenizer.decode(ids)

    check_linear(of)

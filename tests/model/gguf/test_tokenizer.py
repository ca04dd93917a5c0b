"""Tokenizers of GGUF files: added tokens in texts of SentencePiece's kind."""

from __future__ import annotations

import random

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer, models

from millrace.model.errors import CheckpointError
from millrace.model.gguf.merges import LONGEST, merges_of, used_merges
from millrace.model.gguf.tokenizer import read_tokenizer

TOKENS = ["<unk>", "<s>", "\u2581", "H", "i", "Hi", "\u2581Hi", "<|user|>", "<|end|>", "\u2581\u2581", "\n"]
TYPES = [2, 3, 1, 1, 1, 1, 1, 4, 4, 4, 1]


def tokens(text: str, architecture: str, *, has_space: bool) -> list[str]:
    metadata = {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": np.array(TYPES),
        "tokenizer.ggml.scores": np.array([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0]),
        "tokenizer.ggml.add_space_prefix": has_space,
        "tokenizer.ggml.add_bos_token": False,
    }
    return [TOKENS[index] for index in read_tokenizer(metadata, "m.gguf").make().encode(text).ids]


@pytest.mark.parametrize(
    ("architecture", "has_space", "text", "expected"),
    [
        ("llama", True, "Hi<|end|>Hi", ["\u2581Hi", "<|end|>", "\u2581Hi"]),  # of the chat's tokens, all are found
        ("llama", True, "<|user|>Hi<|end|>", ["<|user|>", "\u2581Hi", "<|end|>"]),
        ("gemma", False, "Hi  Hi<|end|>Hi", ["Hi", "\u2581\u2581", "Hi", "<|end|>", "Hi"]),
        ("phi3", True, "<|user|>\nHi<|end|>\n", ["<|user|>", "\u2581Hi", "<|end|>"]),
        ("llama", True, "<|end|>\n", ["<|end|>", "\u2581", "\n"]),
    ],
)
def test_added_tokens_are_found_anywhere_in_a_text(
    architecture: str, has_space: bool, text: str, expected: list[str]
) -> None:
    assert tokens(text, architecture, has_space=has_space) == expected


def merges(texts: list[str]) -> list[tuple[str, str]]:
    vocabulary = {text: index for index, text in enumerate(texts)}
    scores = [float(-index) for index in range(len(texts))]
    ids = merges_of(texts, scores, [True] * len(texts), vocabulary, "m.gguf")
    return [(texts[left], texts[right]) for left, right in ids.tolist()]


def test_merges_are_all_pairs_of_tokens_by_score_then_by_their_ids() -> None:
    assert merges(["a", "b", "ab", "abb", "bb"]) == [("a", "b"), ("a", "bb"), ("ab", "b"), ("b", "b")]


def test_tokens_too_long_and_merges_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"m.gguf: tokenizer.ggml.tokens: a token has 1025 characters"):
        merges(["a", "a" * (LONGEST + 1)])
    runs = ["a" * count for count in range(1, 5)]  # of 2, 2 x 3 and 3 x 4 characters
    monkeypatch.setattr("millrace.model.gguf.merges.MERGED", 20)
    assert len(merges(runs)) == 6
    monkeypatch.setattr("millrace.model.gguf.merges.MERGED", 19)
    with pytest.raises(CheckpointError, match="made of each other in merges of more than 19 characters"):
        merges(runs)


def vocabulary_of(seed: int) -> tuple[list[str], list[int], list[bool]]:
    """Texts, scores and what is made: letters, random tokens with random scores, and one that is never made."""
    dice = random.Random(seed)
    words = {"".join(dice.choices("abc", k=dice.randint(2, 6))) for _ in range(dice.randint(3, 60))}
    texts = ["a", "b", "c", "<0x0A>", *sorted(words), *(["<0x0A>a", "b<0x0A>a"] if seed % 2 else [])]
    scores = [dice.randint(-9, 9) if dice.random() < 0.3 else -index for index in range(len(texts))]
    return texts, scores, [text != "<0x0A>" for text in texts]


@pytest.mark.parametrize("seed", range(40))
def test_merges_that_are_left_out_change_no_text(seed: int) -> None:
    texts, scores, is_made = vocabulary_of(seed)
    ids = {text: index for index, text in enumerate(texts)}
    every = merges_of(texts, scores, is_made, ids, "m.gguf")
    used = used_merges(texts, every, is_made, ids)
    dice = random.Random(seed)
    strings = ["".join(dice.choices("abc\n", (5, 5, 5, 1), k=dice.randint(1, 14))) for _ in range(200)]
    found, expected = (
        [encoding.ids for encoding in bpe_of(texts, some).encode_batch([*strings, *texts])] for some in (used, every)
    )
    assert found == expected
    results = [texts[left] + texts[right] for left, right in used.tolist()]
    assert len({*results}) == len(results) or seed % 2, "one merge makes each token"


def bpe_of(texts: list[str], merges: NDArray[np.int32]) -> Tokenizer:
    pairs = [(texts[left], texts[right]) for left, right in merges.tolist()]
    return Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=pairs, byte_fallback=True))


def test_listed_merges_make_tokens_whose_spaces_have_signs_as_in_gemma_4() -> None:
    texts = ["<unk>", "<bos>", "▁", "H", "i", "Hi", "▁Hi", "<0x0A>"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array([2, 3, 1, 1, 1, 1, 1, 6]),
        "tokenizer.ggml.merges": ["H i", "▁ Hi"],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.bos_token_id": 1,
    }
    made = read_tokenizer(metadata, "m.gguf").make()
    assert [texts[index] for index in made.encode("Hi Hi\ni").ids] == ["<bos>", "Hi", "▁Hi", "<0x0A>", "i"]
    assert made.decode(made.encode("Hi  Hi\ni").ids) == "Hi  Hi\ni"
    with pytest.raises(CheckpointError, match="merges: a merge is not of two tokens"):
        read_tokenizer({**metadata, "tokenizer.ggml.merges": ["i H"]}, "m.gguf")

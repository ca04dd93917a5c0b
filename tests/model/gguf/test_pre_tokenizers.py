"""Ways to split a text by their names in GGUF files: against the models' own tokenizers, and against llama.cpp.

`words_of_llama_cpp.json` has the sizes in bytes of the words that llama.cpp (11549) splits `hard_texts.TEXTS` into, by
`tokenizer.ggml.pre`. A vocabulary with all substrings of the texts, and merges of any two to any third, shows them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import regex
import transformers
from tokenizers import Regex, Tokenizer, pre_tokenizers

from millrace.model.errors import CheckpointError
from millrace.model.gguf.pre_tokenizers import OF_ARCHITECTURE, PRE_TOKENIZERS, PreTokenizer
from millrace.model.gguf.tokenizer import read_tokenizer
from tests.model.gguf.hard_texts import TEXTS

GROUPS = json.loads((Path(__file__).parent / "words_of_llama_cpp.json").read_text())
THEIRS: dict[str, list[str]] = {name: group["words"] for group in GROUPS for name in group["names"].split()}
CASE, MARKS = 7, (15, 16, 17)  # texts: llama.cpp makes little of letters' case, and less of marks
NOT_AS_LLAMA_CPP: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), MARKS),
    "kimi-k2": (CASE, *MARKS),
    "youtu": (CASE,),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), (3, CASE, 9)),  # nor of words' ends in other scripts
    "deepseek-llm": (2, 3, 9, 14, 21, 23, 24),  # it keeps digits together, as no merge joins them anyway
    "deepseek-coder": (23,),  # wide spaces count as East Asian
}
# pre_tokenizer of tokenizer.json, but for its last step, which is the same in all
DEEPSEEK_CODER = [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"]
DEEPSEEK_V3 = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
# tokenization_kimi.py, pat_str; and tiktoken's o200k_base
KIMI = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)


def words(way: PreTokenizer, text: str) -> list[str]:
    steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in way.splits]
    return [word for word, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize("name", THEIRS)
def test_each_way_finds_the_words_of_llama_cpp(name: str) -> None:
    way, apart = PRE_TOKENIZERS[name], NOT_AS_LLAMA_CPP.get(name, ())
    for index, (text, theirs) in enumerate(zip(TEXTS, THEIRS[name], strict=True)):
        sizes = " ".join(str(len(word.encode())) for word in words(way, text))
        assert (sizes == theirs) == (index not in apart), f"{text!r}: {words(way, text)}, and there {theirs}"


def read(pre: str | None, **more: Any) -> Tokenizer:
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
    }
    return read_tokenizer({**metadata, **more}, "m.gguf").make()


def words_of(tokenizer: Any, text: str) -> list[str]:
    """The words, in letters for bytes, of the text as it is normalized."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre", "name"),
    [
        ("qwen2", "Qwen2Tokenizer"),
        ("qwen35", "Qwen3_5Tokenizer"),
        ("gpt-2", "GPT2Tokenizer"),
        ("phi-2", "CodeGenTokenizer"),
        ("olmo", "GPTNeoXTokenizer"),
        ("command-r", "CohereTokenizer"),
    ],
)
@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_normalized_and_split_as_by_the_tokenizers_of_transformers(pre: str, name: str, text: str) -> None:
    theirs = getattr(transformers, name)(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])._tokenizer
    assert words_of(read(pre), text) == words_of(theirs, text)


@pytest.mark.parametrize(("pre", "splits"), [("deepseek-coder", DEEPSEEK_CODER), ("deepseek-v3", DEEPSEEK_V3)])
@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_split_as_the_tokenizer_json_of_deepseek_says(pre: str, splits: list[str], text: str) -> None:
    steps: list[Any] = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in splits]
    digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "deepseek-coder" else []
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs = pre_tokenizers.Sequence([*steps, *digits, bytes_only]).pre_tokenize_str(text)
    assert words_of(read(pre), text) == [word for word, _ in theirs]


@pytest.mark.parametrize(("pre", "parts"), [("kimi-k2", KIMI), ("kimi-k25", KIMI), ("gpt-4o", O200K)])
@pytest.mark.parametrize("text", TEXTS)
def test_texts_are_split_as_by_the_expressions_of_tiktoken(pre: str, parts: tuple[str, ...], text: str) -> None:
    theirs = regex.findall("|".join(f"(?:{part})" for part in parts), text, regex.V1)
    assert words(PRE_TOKENIZERS[pre], text) == theirs


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_no_byte_of_a_text_is_lost(name: str) -> None:
    tokenizer = read(name)
    for text in TEXTS:
        left = "".join(words_of(tokenizer, text))
        assert len(left) == len(
            tokenizer.normalizer.normalize_str(text).encode() if tokenizer.normalizer else text.encode()
        )


def test_files_that_do_not_name_a_way_have_that_of_their_architecture() -> None:
    for architecture, name in OF_ARCHITECTURE.items():
        silent = read(None, **{"general.architecture": architecture})
        assert silent.to_str() == read(name).to_str(), architecture
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre = 'default': its way to split a text is unknown"):
        read(None, **{"general.architecture": "llama"})


def test_a_byte_level_vocabulary_without_merges_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"m\.gguf: tokenizer\.ggml\.merges is missing"):
        read("gpt-2", **{"tokenizer.ggml.merges": []})

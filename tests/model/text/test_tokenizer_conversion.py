"""Tokenizers without tokenizer.json: made of older files as transformers makes them, or refused with the way out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from transformers import AutoTokenizer

from millrace.model.errors import CheckpointError
from millrace.model.text.detokenizer import TextTable
from millrace.model.text.tokenizer import Tokenizer
from tests.model.text.family_tokenizers import AWKWARD, FAMILIES
from tests.model.text.tokenizer_variants import tokenizer_json
from tests.model.tiny_tokenizers import TEXT

HAS_SENTENCEPIECE = importlib.util.find_spec("sentencepiece") is not None
OPT = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, **dict.fromkeys(("bos_token", "eos_token"), "</s>")}


def write_merges(root: Path, model_type: str, config: dict[str, Any]) -> None:
    """A checkpoint with the files of GPT-2."""
    made = json.loads(FAMILIES["GPT-2"].make().to_str())["model"]
    vocab = made["vocab"] | {token: len(made["vocab"]) + place for place, token in enumerate(("<|endoftext|>", "</s>"))}
    (root / "vocab.json").write_text(json.dumps(vocab))
    lines = "\n".join(" ".join(pair) for pair in made["merges"])
    (root / "merges.txt").write_text(f"#version: 0.2\n{lines}\n")
    (root / "config.json").write_text(json.dumps({"model_type": model_type}))
    (root / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("gpt2", {}),
        ("opt", OPT),
        ("qwen2", {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>"}),
        ("gpt_neox", {"tokenizer_class": "GPTNeoXTokenizer"}),
        ("phi", {"tokenizer_class": "CodeGenTokenizer", "bos_token": None}),
        ("llama", {"tokenizer_class": "GPT2Tokenizer", "chat_template": "{{ 'x' }}"}),
    ],
    ids=["gpt2", "opt", "qwen2", "gpt_neox", "phi", "llama"],
)
def test_vocab_and_merges_are_read_as_by_transformers(model_type: str, config: dict[str, Any], tmp_path: Path) -> None:
    write_merges(tmp_path, model_type, config)
    are_equal(tmp_path)
    assert Tokenizer.read(tmp_path).sources == ("vocab.json", "merges.txt")


def test_the_begin_token_that_only_a_setting_asks_for_is_added(tmp_path: Path) -> None:
    write_merges(tmp_path, "opt", OPT)
    tokenizer = Tokenizer.read(tmp_path)
    assert tokenizer.encode("a") == [tokenizer.token_id("</s>"), tokenizer.token_id("a")]


def test_a_vocabulary_of_words_is_read_as_by_transformers(tmp_path: Path) -> None:
    vocab = json.loads(tokenizer_json("word_piece"))["model"]["vocab"]
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocab, key=vocab.get)))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    are_equal(tmp_path)


@pytest.mark.skipif(not HAS_SENTENCEPIECE, reason="sentencepiece is missing: pip install -e '.[test-models]'")
@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {"tokenizer_class": "LlamaTokenizer", "legacy": False, "add_bos_token": True}),
        ("llama", {}),
        ("phi3", {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}),
        ("gemma2", {"add_bos_token": True}),
        ("internlm2", {"auto_map": {"AutoTokenizer": ["x.Y", None]}}),
    ],
)
def test_a_sentencepiece_model_is_read_as_by_transformers(
    model_type: str, config: dict[str, Any], tmp_path: Path
) -> None:
    import sentencepiece

    (tmp_path / "text").write_text("\n".join(TEXT * 5))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        vocab_size=360,
        hard_vocab_limit=False,
        byte_fallback=True,
        character_coverage=0.98,
        minloglevel=3,
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    are_equal(tmp_path)


def are_equal(root: Path) -> None:
    """Checks ids, texts and names, and that answers can be streamed unless it is an encoder's."""
    ours, theirs = Tokenizer.read(root), AutoTokenizer.from_pretrained(root)
    assert ours.named_tokens == theirs.special_tokens_map
    for text in (*AWKWARD, *TEXT):
        for has_specials in (True, False):
            ids = ours.encode(text, has_specials)
            assert ids == theirs.encode(text, add_special_tokens=has_specials), text
        assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False), text
    if not (root / "vocab.txt").exists():
        TextTable(ours)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json; save one with transformers: .*save_pretrained"),
        ({"vocab.json": "{}"}, "no tokenizer.json; save one"),
        ({"vocab.json": "{", "merges.txt": ""}, "vocab.json and merges.txt cannot be converted: "),
        ({"vocab.json": '{"a": 0}', "merges.txt": ""}, "cannot be converted: transformers has no class for them"),
        ({"vocab.json": '{"a": []}', "merges.txt": "a b"}, "vocab.json and merges.txt cannot be converted: "),
    ],
    ids=["nothing", "half", "broken", "nearly empty", "wrong values"],
)
def test_files_that_cannot_be_converted_are_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        Tokenizer.read(tmp_path)
    assert str(caught.value).isprintable()


def test_a_class_without_these_files_is_refused(tmp_path: Path) -> None:
    write_merges(tmp_path, "granite", {"tokenizer_class": "GPT2Tokenizer"})
    with pytest.raises(
        CheckpointError, match="merges.txt cannot be converted: .* no class .*; fetch the model's tokenizer.json"
    ):
        Tokenizer.read(tmp_path)


def test_a_sentencepiece_model_is_refused_with_the_packages_that_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.model.text.tokenizer_conversion.find_spec", lambda name: None)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match="without sentencepiece and protobuf; pip install sentencepiece protobuf"):
        Tokenizer.read(tmp_path)


def test_code_of_the_checkpoint_is_not_run_where_the_class_is_not_needed(tmp_path: Path) -> None:
    """transformers reads tokenizer.json for these model types, whatever their files name."""
    FAMILIES["Phi-3"].write(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"auto_map": {"AutoTokenizer": ["x.Y", None]}}))
    (tmp_path / "x.py").write_text("raise SystemExit(9)")
    ours, theirs = Tokenizer.read(tmp_path), RustTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert ours.encode(TEXT[0]) == theirs.encode(TEXT[0]).ids

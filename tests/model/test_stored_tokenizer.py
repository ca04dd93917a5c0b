"""Tokenizers in three files: the same tokenizer as of one tokenizer.json, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from millrace.model.errors import CheckpointError
from millrace.model.stored_tokenizer import MERGES, STEPS, TOKENS, StoredTokenizer
from millrace.model.text.token_bytes import byte_level_table, sentencepiece_bytes, sentencepiece_table
from millrace.model.text.tokenizer import Tokenizer as OurTokenizer

VOCABULARY = {"Ġ": 0, "a": 1, "b": 2, "ab": 3, "Ġab": 4, "<end>": 5, "Ċ": 6}
MERGED = [("a", "b"), ("Ġ", "ab")]


def whole() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab=VOCABULARY, merges=MERGED))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken("<end>", special=True, normalized=False)])
    return made


def write(root: Path) -> None:
    told = json.loads(whole().to_str())
    told["model"] |= {"vocab": {}, "merges": []}
    ids = [[VOCABULARY[left], VOCABULARY[right]] for left, right in MERGED]
    StoredTokenizer(told, list(VOCABULARY), np.array(ids, np.int32)).write(root)


def test_the_tokenizer_is_that_of_one_file(tmp_path: Path) -> None:
    write(tmp_path)
    stored = StoredTokenizer.read(tmp_path)
    assert stored is not None
    assert json.loads(stored.make().to_str()) == json.loads(whole().to_str())
    one, three = tmp_path / "one", tmp_path / "three"
    one.mkdir(), three.mkdir()
    whole().save(str(one / "tokenizer.json"))
    write(three)
    ours, other = OurTokenizer.read(three), OurTokenizer.read(one)
    for text in (" ab<end>ab\n", "", "ba ab"):
        assert ours.encode(text) == other.encode(text)
    assert ours.tokens == other.tokens and ours.special_ids == other.special_ids == {5}
    assert ours.is_byte_level and ours.sources == ("tokenizer.json",)


def test_a_folder_with_a_part_of_the_files_has_no_such_tokenizer(tmp_path: Path) -> None:
    assert StoredTokenizer.read(tmp_path) is None
    write(tmp_path)
    (tmp_path / TOKENS).unlink()
    assert StoredTokenizer.read(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        (TOKENS, b'["a", 1]', "must be a list of texts"),
        (TOKENS, b'["a"]', "ids beyond 1 tokens"),
        (TOKENS, b'["a"', "Expecting"),
        (STEPS, b"[]", "must be the steps of a BPE tokenizer"),
        (STEPS, b'{"model": {"type": "Unigram"}}', "must be the steps of a BPE tokenizer"),
        (STEPS, b'{"model": {"type": "BPE"}}', "has no unk_token"),
        (MERGES, b"", "cannot be used"),
        (MERGES, b"pickle", "cannot be used"),
    ],
)
def test_files_that_are_none_are_refused_by_name(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=problem):
        StoredTokenizer.read(tmp_path)


def test_merges_that_are_objects_or_other_numbers_are_refused(tmp_path: Path) -> None:
    for array in (np.array([[None, None]]), np.zeros((2, 2)), np.zeros(4, np.int32), np.array([[-1, 0]], np.int32)):
        write(tmp_path)
        np.save(tmp_path / MERGES, array)
        with pytest.raises(CheckpointError, match="cannot be used"):
            StoredTokenizer.read(tmp_path)


def test_merges_that_make_no_token_are_refused_as_those_of_tokenizer_json(tmp_path: Path) -> None:
    write(tmp_path)
    np.save(tmp_path / MERGES, np.array([[2, 2]], np.int32))  # bb is no token
    with pytest.raises(CheckpointError, match="cannot be used"):
        OurTokenizer.read(tmp_path)


@pytest.mark.parametrize("last", ["▁", "\0", "a\0b", "<0x0A>"])
def test_a_table_holds_the_bytes_of_each_token(last: str) -> None:
    tokens = ["▁a", None, "", "<0x00>", "<0xfF>", "<0xgg>", "<s>", "é▁", last]
    assert sentencepiece_table(tokens) == [sentencepiece_bytes(token) if token else b"" for token in tokens]
    assert sentencepiece_table([]) == []
    assert byte_level_table(["Ġa", None, "▁", "Ã"]) == [b" a", b"", "▁".encode(), b"\xc3"]

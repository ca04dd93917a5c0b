"""Tokenizers in the style of each family against transformers' AutoTokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from millrace.model.text.detokenizer import IncrementalDecoder, TextTable
from millrace.model.text.tokenizer import Tokenizer
from tests.model.text.family_tokenizers import AWKWARD, FAMILIES
from tests.model.tiny_tokenizers import TEXT


@pytest.fixture(scope="module", params=FAMILIES)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, PreTrainedTokenizerBase]:
    root: Path = tmp_path_factory.mktemp("family")
    FAMILIES[request.param].write(root)
    return Tokenizer.read(root), AutoTokenizer.from_pretrained(root)


def test_ids_texts_and_names_of_a_family_are_those_of_transformers(both):
    ours, theirs = both
    assert ours.named_tokens == theirs.special_tokens_map
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert len(ours) == len(theirs)
    for text in (*AWKWARD, *TEXT):
        for has_specials in (True, False):
            ids = ours.encode(text, has_specials)
            assert ids == theirs.encode(text, add_special_tokens=has_specials), text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text


def test_answers_of_a_family_come_token_by_token_as_whole(both):
    ours, _ = both
    table = TextTable(ours)
    for text in (*AWKWARD, *TEXT):
        for skip in (True, False):
            ids = ours.encode(text)
            decoder = IncrementalDecoder(table, skip)
            assert "".join([*map(decoder.push, ids), decoder.flush()]) == ours.decode(ids, skip), text


def test_a_chat_of_a_family_has_one_begin_token_if_any(both):
    """The template writes it, so the tokenizer must not add it."""
    ours, theirs = both
    begin = "" if ours.bos_token_id is None else "{{ bos_token }}"
    theirs.chat_template = begin + "{{ messages[0].content }}"
    ids = ours.encode_chat((ours.bos_token or "" if begin else "") + "Once upon a time")
    assert ids == theirs.apply_chat_template([{"role": "user", "content": "Once upon a time"}], return_dict=False)
    assert ids.count(ours.bos_token_id) == bool(begin)

"""Tokenizers for the tests of this folder, one of each kind, read by this project and by transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from millrace.model.text.tokenizer import Tokenizer
from tests.model.tiny_tokenizers import STYLES, VOCAB_SIZE, make_tokenizer


@pytest.fixture(scope="module", params=STYLES)
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer with `VOCAB_SIZE` tokens."""
    path: Path = tmp_path_factory.mktemp(request.param)
    make_tokenizer(request.param, path, VOCAB_SIZE)
    return path


@pytest.fixture(scope="module")
def tokenizer(root: Path) -> Tokenizer:
    return Tokenizer.read(root)


@pytest.fixture(scope="module")
def theirs(root: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(root)

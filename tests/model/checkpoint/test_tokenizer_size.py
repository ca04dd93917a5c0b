"""The bound on tokenizer.json by the rows of the embedding."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.model.checkpoint.tokenizer_size import SPARE_TOKENS, TOKEN_BYTES, check_tokenizer_file, check_tokens
from millrace.model.errors import CheckpointError

TOKEN = b'{"id":1,"content":"<x>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true},'


def test_added_tokens_beyond_the_rows_are_refused_by_their_number(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    for vocab_size in (5_000, 50_000):
        file.write_bytes(TOKEN * (vocab_size + SPARE_TOKENS))
        check_tokenizer_file(tmp_path, vocab_size)
        file.write_bytes(TOKEN * (vocab_size + SPARE_TOKENS + 1))
        with pytest.raises(
            CheckpointError, match=rf"added_tokens: {vocab_size + SPARE_TOKENS + 1} objects.*{vocab_size} rows"
        ):
            check_tokenizer_file(tmp_path, vocab_size)


def test_a_file_of_more_bytes_than_its_tokens_need_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"a" * (3 << 20))
    with pytest.raises(CheckpointError, match="3145728 bytes, and at most 2107392 for the 10 tokens"):
        check_tokenizer_file(tmp_path, 10)
    check_tokenizer_file(tmp_path, (1 << 20) // TOKEN_BYTES)


def test_a_few_ids_beyond_the_rows_are_allowed_and_many_are_not(tmp_path: Path) -> None:
    check_tokens(tmp_path, 100 + SPARE_TOKENS, 100)
    with pytest.raises(CheckpointError, match="ids go up to 1124, and the embedding has 100 rows"):
        check_tokens(tmp_path, 101 + SPARE_TOKENS, 100)

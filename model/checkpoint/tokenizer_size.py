"""A bound on tokenizer.json by the model's vocabulary, before the tokenizer takes ten times the file's memory."""

from __future__ import annotations

from pathlib import Path

from ..errors import CheckpointError
from ..files import checkpoint_file, read_bytes

SPARE_TOKENS = 1024  # that a tokenizer may have beyond the rows of the embedding; a prompt with one of them is refused
TOKEN_BYTES = 1024  # most bytes of a token in the file, its merges included; published ones take up to 200
SPARE_BYTES = 2 << 20  # for normalizers
ADDED_TOKEN_BYTES = 100  # least bytes of an added token, which is an object of seven keys


def check_tokenizer_file(root: Path, vocab_size: int) -> None:
    """Raises CheckpointError if tokenizer.json holds far more tokens than the embedding of `vocab_size` rows.

    Each added token is an object, and no vocabulary has more braces than tokens, so counting them parses nothing.
    """
    path = checkpoint_file(root, "tokenizer.json")
    if path is None:
        return
    num_bytes, most = path.stat().st_size, SPARE_BYTES + vocab_size * TOKEN_BYTES
    source = f"tokenizer.json ({root})"
    if num_bytes > most:
        raise CheckpointError(
            f"{source}: {num_bytes} bytes, and at most {most} for the {vocab_size} tokens of the model"
        )
    if num_bytes < ADDED_TOKEN_BYTES * (vocab_size + SPARE_TOKENS):
        return
    num_objects = (read_bytes(root, "tokenizer.json") or b"").count(b"{")
    if num_objects > vocab_size + SPARE_TOKENS:
        raise CheckpointError(
            f"{source}: added_tokens: {num_objects} objects, and the embedding has {vocab_size} rows: ids beyond them "
            "have no meaning; fetch the file again"
        )


def check_tokens(root: Path, num_tokens: int, vocab_size: int) -> None:
    """Raises CheckpointError if ids go far beyond the rows of the embedding."""
    if num_tokens > vocab_size + SPARE_TOKENS:
        raise CheckpointError(
            f"tokenizer.json ({root}): its ids go up to {num_tokens - 1}, and the embedding has {vocab_size} rows; it "
            "is of another model"
        )

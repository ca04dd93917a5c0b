"""The folder that stands for a GGUF file: where links lead, and metadata of other kinds than they should be."""

from __future__ import annotations

import os
import struct
import time
from pathlib import Path

import pytest

from millrace.model.errors import CheckpointError
from millrace.model.gguf import folder
from millrace.model.gguf.folder import cache_directory, folder_of, open_checkpoint
from tests.model.gguf.test_reader import listed, number, string, tensor, text, whole

SIZES = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 32, "attention.head_count": 2}
EMBEDDING = [tensor("token_embd.weight", (32, 4), 8, 0)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def numbers(key: str, values: list[int]) -> bytes:
    """An array of 32-bit numbers."""
    return text(key) + struct.pack(f"<IIQ{len(values)}I", 9, 4, len(values), *values)


def metadata(**changed: bytes) -> list[bytes]:
    """Of a model with a byte-level tokenizer of four tokens."""
    pairs = {key: number(f"llama.{key}", value) for key, value in {**SIZES, "context_length": 64}.items()}
    pairs |= {
        "architecture": string("general.architecture", "llama"),
        "model": string("tokenizer.ggml.model", "gpt2"),
        "pre": string("tokenizer.ggml.pre", "gpt-2"),
        "tokens": listed("tokenizer.ggml.tokens", ["<s>", "a", "b", "ab"]),
        "merges": listed("tokenizer.ggml.merges", ["a b"]),
    }
    return list({**pairs, **changed}.values())


def test_a_split_model_is_found_through_the_links_of_the_hubs_cache(tmp_path: Path) -> None:
    names = [f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    tensors = [EMBEDDING, [tensor("output_norm.weight", (32,), 0, 0)]]
    (tmp_path / "snapshot").mkdir()
    for part, name in enumerate(names):
        (tmp_path / f"digest{part}").write_bytes(whole([*metadata(), number("split.count", 2)], tensors[part]))
        os.symlink(f"../digest{part}", tmp_path / "snapshot" / name)
    root = folder_of(tmp_path / "snapshot" / names[0])
    assert open_checkpoint(root).names == {"model.embed_tokens.weight", "model.norm.weight"}


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m.gguf").write_bytes(whole(metadata(), EMBEDDING))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "m.gguf"))
    with pytest.raises(CheckpointError, match="cannot be made: Not a directory; set XDG_CACHE_HOME"):
        folder_of(tmp_path / "m.gguf")


def test_another_size_of_any_part_makes_a_folder_of_its_own(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-0000{part}-of-00002.gguf" for part in (1, 2)]
    split = [*metadata(), number("split.count", 2)]
    paths[0].write_bytes(whole(split, EMBEDDING))
    paths[1].write_bytes(whole(split, [tensor("output_norm.weight", (32,), 0, 0)]))
    before = folder_of(paths[0])
    assert folder_of(paths[1]) == before, "any part may be named"
    paths[1].write_bytes(whole(split, [tensor("output_norm.weight", (32,), 0, 0)], bytes(512)))
    assert folder_of(paths[0]) != before


def test_folders_of_files_that_are_gone_and_long_unused_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "MOST_FOLDERS", 3)
    roots, paths = [], [tmp_path / f"m{number}.gguf" for number in range(5)]
    for age, path in enumerate(paths[:4]):
        path.write_bytes(whole(metadata(), EMBEDDING))
        roots.append(folder_of(path))
        long_ago = time.time() - 1e4 * (5 - age)
        os.utime(roots[age] / "gguf.json", (long_ago, long_ago))
    paths[3].unlink()
    unfinished, other = cache_directory() / "making-x", cache_directory() / "not-ours"
    for made in (unfinished, other):
        made.mkdir()
        os.utime(made, (1, 1))
    folder_of(paths[0])  # used again, so it stays
    paths[4].write_bytes(whole(metadata(), EMBEDDING))
    newest = folder_of(paths[4])
    assert {path.name for path in cache_directory().iterdir()} == {
        *(root.name for root in (roots[0], roots[1], roots[2], newest)),
        "not-ours",
    }, "two long unused ones stay beside the new one, and one that was used within the hour"
    os.utime(roots[0] / "gguf.json", (1, 1))
    folder.remove_unused(cache_directory(), but=newest)
    assert not roots[0].exists() and roots[1].exists() and roots[2].exists()


@pytest.mark.parametrize("factors", [bytes(64), struct.pack("<16f", *[1.0] * 15, float("nan"))])
def test_factors_that_no_frequency_can_be_divided_by_are_refused(factors: bytes, tmp_path: Path) -> None:
    tensors = [tensor("rope_freqs.weight", (16,), 0, 0), tensor("token_embd.weight", (32, 4), 8, 64)]
    (tmp_path / "m.gguf").write_bytes(whole(metadata(), tensors, factors + bytes(256)))
    with pytest.raises(CheckpointError, match=r"m.gguf: tensor rope_freqs.weight: must hold a number above 0 for each"):
        folder_of(tmp_path / "m.gguf")


WRONG = [
    ({"architecture": listed("general.architecture", ["llama"])}, "general.architecture = "),
    ({"block_count": number("llama.block_count", 2**32 - 1)}, "block_count = 4294967295, and it holds 1 tensors"),
    ({"model": listed("tokenizer.ggml.model", ["gpt2"])}, "tokenizer.ggml.model = ['gpt2']: must be a text"),
    ({"pre": number("tokenizer.ggml.pre", 1)}, "tokenizer.ggml.pre = 1: must be a text"),
    ({"tokens": number("tokenizer.ggml.tokens", 5)}, "tokenizer.ggml.tokens = 5: must be a list of texts"),
    ({"merges": numbers("tokenizer.ggml.merges", [1])}, "tokenizer.ggml.merges = [1]: must be a list of texts"),
    ({"merges": listed("tokenizer.ggml.merges", ["x y"])}, "a merge is not of two tokens that make a third"),
    ({"merges": listed("tokenizer.ggml.merges", ["", "a"])}, "a merge is not of two tokens that make a third"),
    ({"types": string("tokenizer.ggml.token_type", "1")}, "token_type = '1': must be a list of whole numbers"),
    ({"bos": string("tokenizer.ggml.bos_token_id", "a")}, "bos_token_id = 'a': must be a whole number"),
    ({"tokens": numbers("tokenizer.ggml.tokens", [7])}, "tokenizer.ggml.tokens = [7]: must be a list of texts"),
    ({"flag": numbers("tokenizer.ggml.add_bos_token", [1])}, "add_bos_token = [1]: must be true or false"),
    ({"kind": numbers("general.type", [1, 2])}, "general.type = array([1, 2], dtype=uint32): not a whole model"),
    ({"split": numbers("split.count", [1, 2])}, "split.count = array([1, 2], dtype=uint32)"),
    (
        {"feed_forward_length": numbers("llama.feed_forward_length", [1] * 4097)},
        "holds 4097 numbers, and at most 4096",
    ),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=[message for _, message in WRONG])
def test_metadata_of_another_kind_are_refused_by_their_key(
    changed: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    (tmp_path / "m.gguf").write_bytes(whole(metadata(**changed), EMBEDDING))
    with pytest.raises(CheckpointError) as caught:
        folder_of(tmp_path / "m.gguf")
    assert message in str(caught.value) and str(caught.value).startswith("m.gguf: ")

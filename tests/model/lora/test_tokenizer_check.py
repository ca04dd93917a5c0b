"""Tokenizers in adapters' folders: those that are the model's pass, others are refused by their tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.model.errors import AdapterError
from millrace.model.lora.tokenizer_check import check_tokenizer

BASE = ["a", "b", "ab", "<end>", None]


def folder(path: Path, **files: Any) -> Path:
    path.mkdir()
    for name, values in files.items():
        (path / f"{name}.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return path


def tokenizer(*added: tuple[str, int], vocab: Any = None) -> dict[str, Any]:
    vocab = {"a": 0, "b": 1, "ab": 2} if vocab is None else vocab
    entries = [{"content": token, "id": id_, "special": True} for token, id_ in (("<end>", 3), *added)]
    return {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": entries}


def check(adapter: Path, base: Path) -> None:
    check_tokenizer(adapter, "x", base, lambda: BASE)


def test_the_same_file_is_not_parsed_and_no_file_is_needed(tmp_path: Path) -> None:
    def never() -> Sequence[str | None]:
        raise AssertionError("the tokens are not needed")

    base = folder(tmp_path / "base", tokenizer="not JSON")
    check_tokenizer(folder(tmp_path / "same", tokenizer="not JSON"), "x", base, never)
    check_tokenizer(folder(tmp_path / "none"), "x", base, never)


@pytest.mark.parametrize("vocab", [None, [["a", -1.0], ["b", -2.0], ["ab", -3.0]], {}])
def test_another_file_with_the_same_tokens_passes(tmp_path: Path, vocab: Any) -> None:
    base = folder(tmp_path / "base", tokenizer=json.dumps(tokenizer(), indent=1))
    check(folder(tmp_path / "adapter", tokenizer=tokenizer(vocab=vocab), added_tokens={"<end>": 3}), base)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer": tokenizer(("<pad>", 4))}, r"adds 1 token to the model's tokenizer \('<pad>'\)"),
        ({"tokenizer": tokenizer(("<x>", 9), ("<y>", 4), ("<z>", -1), ("<w>", 5))}, r"adds 4 tokens .*'<z>', …\)"),
        ({"tokenizer": tokenizer(vocab={"a": 1, "b": 0})}, r"adds 2 tokens .*\('a', 'b'\)"),
        ({"added_tokens": {"<tool>": 4}}, r"adds 1 token .*<tool>"),
        ({"tokenizer": "{"}, "not valid JSON"),
        ({"tokenizer": "[]"}, "must hold a JSON object"),
        ({"tokenizer": {"model": 3, "added_tokens": [3, {"content": 3, "id": "x"}, {"content": "q", "id": 7}]}}, "'q'"),
    ],
)
def test_other_tokens_are_refused_by_their_text(tmp_path: Path, files: dict[str, Any], said: str) -> None:
    base = folder(tmp_path / "base", tokenizer=tokenizer())
    with pytest.raises(AdapterError, match=rf"adapter 'x'.*{said}"):
        check(folder(tmp_path / "adapter", **files), base)


def test_a_large_tokenizer_is_compared_as_a_small_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("files", "lora.tokenizer_check"):
        monkeypatch.setattr(f"millrace.model.{room}.JSON_BYTES", 300, raising=False)
    base = folder(tmp_path / "base", tokenizer=json.dumps(tokenizer(), indent=1))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)

    def large(*added: tuple[str, int]) -> dict[str, Any]:
        values = tokenizer(*added)
        entries = [{**entry, **flags} for entry in values["added_tokens"]]
        return {"version": "1.0", "model": {**values["model"], "merges": ["a b"]}, "added_tokens": entries}

    assert len(json.dumps(large())) < 300 < len(json.dumps(large(), indent=4))
    check(folder(tmp_path / "adapter", tokenizer=json.dumps(large(), indent=4)), base)
    with pytest.raises(AdapterError, match=r"adds 1 token .*<tool>"):
        check(folder(tmp_path / "other", tokenizer=large(("<tool>", 4))), base)
    with pytest.raises(AdapterError, match="adapter 'x'.*not a tokenizer"):
        check(folder(tmp_path / "broken", tokenizer="{" * 400), base)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", tokenizer=tokenizer())
    adapter = folder(tmp_path / "adapter")
    (adapter / "tokenizer.json").symlink_to(base / "tokenizer.json")
    with pytest.raises(AdapterError, match="a link that leads out"):
        check(adapter, base)

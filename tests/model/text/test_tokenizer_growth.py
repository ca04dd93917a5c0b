"""Tokenizers whose steps make a text longer and longer: refused before any text is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from millrace.model.errors import CheckpointError
from millrace.model.text.tokenizer import Tokenizer
from tests.model.text.tokenizer_variants import tokenizer_json

Change = Callable[[dict[str, Any]], None]


def normalized(*steps: Any) -> Change:
    return lambda values: values.update(normalizer=json.loads(normalizers.Sequence(list(steps)).__getstate__()))


def templates(*counts: int) -> Change:
    """A post-processor of templates, each with its text `count` times."""

    def template(count: int) -> dict[str, Any]:
        single = [{"Sequence": {"id": "A", "type_id": 0}}] * count
        pair = [{"Sequence": {"id": text, "type_id": 0}} for text in "AB"]
        return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {}}

    return lambda values: values.update(post_processor={"type": "Sequence", "processors": list(map(template, counts))})


def written(change: Change, root: Path) -> Path:
    values = json.loads(tokenizer_json("word_piece"))
    change(values)
    (root / "tokenizer.json").write_text(json.dumps(values))
    return root


GROWING: dict[str, tuple[Change, str]] = {
    "doubling": (normalized(*[normalizers.Replace("a", "aa")] * 30), "normalizer: its steps make a text 32 times"),
    "one long": (normalized(normalizers.Replace("a", "b" * 10**6)), r"1e\+06 times as long"),
    "a regex": (normalized(normalizers.Replace(Regex("."), "xyzxyz" * 4)), "25 times as long"),
    "a regex of nothing": (normalized(*[normalizers.Replace(Regex("q*"), "xyz")] * 3), "64 times as long"),
    "before the text": (normalized(normalizers.Prepend("x" * 300)), "plus 300 characters"),
    "bytes of bytes": (normalized(*[normalizers.ByteLevel()] * 5), "5 steps of type ByteLevel"),
    "blanks around signs": (normalized(*[normalizers.BertNormalizer()] * 9), "9 steps of type BertNormalizer"),
    "pieces": (
        lambda values: values.update(
            pre_tokenizer=json.loads(pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 20).__getstate__())
        ),
        "pre_tokenizer: 20 steps of type ByteLevel",
    ),
    "a template": (templates(1, 3), r"post_processor: the template single repeats \$A 3 times"),
    "a decoder": (
        lambda values: values.update(decoder={"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 99}),
        "decoder: its steps make a text 99 times",
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_steps_that_make_a_text_much_longer_are_refused_with_the_numbers(name: str, tmp_path: Path):
    change, message = GROWING[name]
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.read(written(change, tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        normalized(normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")),
        normalized(normalizers.NFKD(), normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace("``", '"')),
        normalized(normalizers.Replace("\n", "<n>"), normalizers.BertNormalizer()),
        templates(1, 1),
    ],
)
def test_steps_of_published_tokenizers_are_used(change: Change, tmp_path: Path):
    assert Tokenizer.read(written(change, tmp_path)).encode("the dog")

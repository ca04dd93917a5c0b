"""Tokenizers as checkpoints come, in old and new files, against transformers' AutoTokenizer on the same files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from millrace.model.errors import CheckpointError
from millrace.model.text.chat_template import ChatTemplate
from millrace.model.text.detokenizer import TextTable
from millrace.model.text.tokenizer import Tokenizer
from tests.model.text.tokenizer_variants import VARIANTS, Variant, token, write_kind
from tests.model.tiny_tokenizers import TEXT

TEXTS = [
    *TEXT,
    "",
    " ",
    "Hello",
    " Hello  world ",
    "a <|im_end|> b<|im_end|>c <|im_start|>x <|eot_id|> y<|begin_of_text|> <|IM_END|>",
    "<s>Hello</s>there</s> x [INST] y [MASK] <mask>",
    "The Cat's cat cats dog Dogs abc ABC xyz XYZ, isn 't it do n't . !",
    "Élan vital naïve ``x'' 日本 e\u0301",
    "one<one> <two><p> <pad> <a> <b> <c><end> x<image> <|pad|> y",
]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of each kind of tokenizer."""
    folders: dict[str, Path] = {}
    for kind in sorted({variant.kind for variant in VARIANTS.values()}):
        folders[kind] = tmp_path_factory.mktemp(kind)
        write_kind(kind, folders[kind])
    return folders


def written(kinds: dict[str, Path], variant: Variant, root: Path) -> Path:
    return variant.write(Path(shutil.copytree(kinds[variant.kind], root / "variant")))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variants_ids_texts_and_names_are_those_of_transformers(kinds: dict[str, Path], name: str, tmp_path: Path):
    root = written(kinds, VARIANTS[name], tmp_path)
    ours, theirs = Tokenizer.read(root), AutoTokenizer.from_pretrained(root)
    assert ours.named_tokens == theirs.special_tokens_map
    assert len(ours) == len(theirs)
    for text in TEXTS:
        for has_specials in (True, False):
            ids = ours.encode(text, has_specials)
            assert ids == theirs.encode(text, add_special_tokens=has_specials), text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    if VARIANTS[name].kind in ("word_piece", "unigram", "albert"):  # of encoders, which take pairs
        pair = theirs(TEXTS[0], TEXTS[6], return_token_type_ids=True)
        assert ours.encode_pair(TEXTS[0], TEXTS[6]) == (pair["input_ids"], pair["token_type_ids"])


def test_templates_see_the_names_that_only_special_tokens_map_has(kinds: dict[str, Path], tmp_path: Path):
    root = written(kinds, VARIANTS["names only in special_tokens_map.json"], tmp_path)
    tokenizer = Tokenizer.read(root)
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", tokenizer)
    assert template.render([{"role": "user", "content": "hi"}]).text == "<|im_start|>hi<|im_end|>"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    "step",
    [{"type": "Digits", "individual_digits": True}, {"type": "Punctuation", "behavior": "Isolated"}],
    ids=lambda step: step["type"],
)
def test_steps_that_the_class_does_not_have_stay_as_in_tokenizer_json(
    kinds: dict[str, Path], step: dict[str, Any], tmp_path: Path
):
    """AutoTokenizer would replace them by those of GPT-2, and give ids that the model was not trained with."""

    def change(values: dict[str, Any]) -> None:
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step, values["pre_tokenizer"]]}

    root = written(kinds, Variant("chatml", {"tokenizer_class": "GPT2Tokenizer"}, change=change), tmp_path)
    ours, theirs = Tokenizer.read(root), PreTrainedTokenizerFast.from_pretrained(root)
    for text in ["in 2023, it's 650841823!", *TEXTS]:
        assert ours.encode(text) == theirs.encode(text)


REFUSED: dict[str, tuple[Variant, str]] = {
    "a name that is no text": (Variant("chatml", {"bos_token": 5}), r"tokenizer_config.json .*bos_token: .*not 5"),
    "a name in the older file": (
        Variant("chatml", files={"special_tokens_map.json": {"eos_token": ["x"]}}),
        r"special_tokens_map.json .*eos_token: .*not \['x'\]",
    ),
    "a token's flag": (
        Variant("chatml", {"added_tokens_decoder": {"2": token("x") | {"lstrip": "yes"}}}),
        r"tokenizer_config.json .*added_tokens_decoder.2.lstrip: must be true or false, not 'yes'",
    ),
    "a token without content": (
        Variant("chatml", {"added_tokens_decoder": {"2": {"lstrip": True}}}),
        r"added_tokens_decoder.2: must be a token's text, or an object with its content, not \{'lstrip': True\}",
    ),
    "an id that is none": (Variant("chatml", {"added_tokens_decoder": {"two": token("x")}}), "'two' is not a token id"),
    "a list for an object": (Variant("chatml", {"added_tokens_decoder": [1]}), r"must be an object .*not \[1\]"),
    "an added id that is none": (
        Variant("chatml", files={"added_tokens.json": {"<x>": "7"}}),
        r"added_tokens.json .*'<x>': must be a token id, not '7'",
    ),
    "a text for a list": (
        Variant("chatml", {"extra_special_tokens": "<x>"}),
        "extra_special_tokens: must be a list of tokens or an object of named ones, not '<x>'",
    ),
    "a token of a list": (
        Variant("chatml", {"additional_special_tokens": [3]}, drops=("extra_special_tokens",)),
        r"additional_special_tokens\[0\]: must be a token's text",
    ),
    "a switch": (
        Variant("chatml", {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": "yes"}),
        "tokenizer_config.json .*add_prefix_space: must be true or false, not 'yes'",
    ),
    "a switch for all classes": (Variant("chatml", {"split_special_tokens": 1}), "split_special_tokens: .*, not 1"),
    "a file of another version": (
        Variant("chatml", {"fast_tokenizer_files": ["tokenizer.json", "tokenizer.4.0.0.json"]}),
        "fast_tokenizer_files lists tokenizer.4.0.0.json",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_is_wrong_is_refused_with_file_key_and_value(kinds: dict[str, Path], name: str, tmp_path: Path):
    variant, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.read(written(kinds, variant, tmp_path))


def _decoder(step: int, **values: Any) -> Variant:
    return Variant("mistral", change=lambda read: read["decoder"]["decoders"][step].update(values))


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (_decoder(0, content="_"), r"tokenizer.json: the decoder's Replace has .*'content': '_'.*; supported: "),
        (_decoder(3, start=2), r"the decoder's Strip has .*'start': 2"),
        (Variant("unigram", {"clean_up_tokenization_spaces": True}), "clean_up_tokenization_spaces = true"),
    ],
    ids=["another space", "two spaces", "cleaned"],
)
def test_answers_are_not_decoded_by_other_rules_than_the_files(
    kinds: dict[str, Path], variant: Variant, message: str, tmp_path: Path
):
    tokenizer = Tokenizer.read(written(kinds, variant, tmp_path))
    with pytest.raises(CheckpointError, match=message):
        TextTable(tokenizer)


def test_a_folder_with_nothing_but_tokenizer_json_is_enough(kinds: dict[str, Path], tmp_path: Path):
    root = written(kinds, Variant("llama3"), tmp_path)
    (root / "tokenizer_config.json").unlink()
    ours, theirs = Tokenizer.read(root), PreTrainedTokenizerFast.from_pretrained(root)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.named_tokens == theirs.special_tokens_map == {}


@pytest.mark.parametrize("kind", ["word_piece", "unigram", "llama3", "chatml"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_cut_as_transformers_cuts_them(kinds: dict[str, Path], kind: str, side: str, tmp_path: Path):
    root = written(kinds, Variant(kind, {"truncation_side": side}), tmp_path)
    ours, theirs = Tokenizer.read(root), AutoTokenizer.from_pretrained(root)
    short, long = "the dog", " ".join(TEXT)
    for most in (6, 7, 12, 33, 10_000):
        assert ours.encode_cut(long, most) == theirs.encode(long, truncation=True, max_length=most)
        for pair in ((short, long), (long, short), (long, long), (short, short)):
            right = theirs(*pair, truncation=True, max_length=most, return_token_type_ids=True)
            assert ours.encode_pair_cut(*pair, most) == (right["input_ids"], right["token_type_ids"])
    assert ours.encode_cut(long, 5, "left", add_special_tokens=False) == ours.encode(long, False)[-5:]


def test_a_cut_without_room_beside_the_special_tokens_is_refused(kinds: dict[str, Path], tmp_path: Path):
    tokenizer = Tokenizer.read(written(kinds, Variant("word_piece"), tmp_path))
    with pytest.raises(ValueError, match="2 tokens: must be above 2, the number of special tokens"):
        tokenizer.encode_cut("a b c", 2)

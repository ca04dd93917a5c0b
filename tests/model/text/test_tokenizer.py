"""The tokenizer against transformers' AutoTokenizer on the same files, and one token at a time against all at once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from millrace.model.errors import CheckpointError
from millrace.model.text.detokenizer import IncrementalDecoder, TextTable
from millrace.model.text.tokenizer import Tokenizer
from tests.model.tiny_tokenizers import TEXT, VOCAB_SIZE, make_tokenizer

TEXTS = [
    *TEXT,
    "",
    " ",
    "a",
    "  two spaces, a tab\tand\r\n\r\nlines   ",
    "ünïcödé e\u0301 \u200d\ufeff \U0001f9d1\U0001f3fd\u200d\U0001f680 ﷽",
    "<|im_start|>user\nhi<|im_end|> <s>[INST] x [/INST]</s> <|begin_of_text|><|eot_id|><extra_3>",
    "x" * 500,
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encode_gives_the_ids_of_transformers(
    tokenizer: Tokenizer, theirs: PreTrainedTokenizerBase, text: str, add_special_tokens: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens)
    assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_names_and_sizes_are_those_of_transformers(tokenizer: Tokenizer, theirs: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == len(theirs) == VOCAB_SIZE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert tokenizer.special_ids >= set(theirs.all_special_ids)


@pytest.mark.parametrize("keys", [{"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_begin_and_end_tokens_are_those_of_the_post_processor_as_in_transformers(
    root: Path, tmp_path: Path, keys: dict[str, bool]
) -> None:
    changed = _copy_with(root, tmp_path, keys)
    expected = AutoTokenizer.from_pretrained(changed).encode("Hello there")
    assert Tokenizer.read(changed).encode("Hello there") == expected


@pytest.mark.parametrize("legacy", [True, False])
def test_a_llama_tokenizer_puts_its_space_where_transformers_does(tmp_path: Path, legacy: bool) -> None:
    make_tokenizer("mistral", tmp_path / "made", VOCAB_SIZE)
    root = _copy_with(tmp_path / "made", tmp_path, {"tokenizer_class": "LlamaTokenizer", "legacy": legacy})
    ours, theirs = Tokenizer.read(root), AutoTokenizer.from_pretrained(root)
    for text in [*TEXTS, "<s>Hello</s>there</s> x"]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_a_named_token_missing_from_the_vocabulary_is_added(root: Path, tmp_path: Path) -> None:
    changed = _copy_with(root, tmp_path, {"eos_token": "<|new end|>"})
    ours, theirs = Tokenizer.read(changed), AutoTokenizer.from_pretrained(changed)
    assert ours.encode("a<|new end|>b") == theirs.encode("a<|new end|>b")
    assert ours.eos_token_id == VOCAB_SIZE == theirs.eos_token_id


def test_several_named_tokens_that_only_the_configuration_has_get_the_ids_of_transformers(
    root: Path, tmp_path: Path
) -> None:
    flags = {"lstrip": True, "rstrip": False, "normalized": False, "single_word": False}
    end = {"__type": "AddedToken", "content": "<|new end|>", **flags}
    named = {"eos_token": end, "pad_token": "<|pad|>", "additional_special_tokens": ["<|pad|>", "<|more|>"]}
    changed = _copy_with(root, tmp_path, named)
    ours, theirs = Tokenizer.read(changed), AutoTokenizer.from_pretrained(changed)
    text = "a <|new end|>b <|pad|><|more|>"
    assert ours.encode(text) == theirs.encode(text)
    assert len(ours) == len(theirs) > VOCAB_SIZE + 1
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "cannot be used"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": "x.Y"}}', "auto_map"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    root: Path, tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    changed = _copy_with(root, tmp_path, {})
    (changed / name).unlink()
    if content is not None:
        (changed / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.read(changed)


def test_the_list_of_tokens_is_each_of_them_added_ones_as_they_are_normalised(tokenizer: Tokenizer) -> None:
    assert tokenizer.tokens == [tokenizer.token(token_id) for token_id in range(len(tokenizer))]
    assert tokenizer.token(len(tokenizer)) is None


def pushed(decoder: IncrementalDecoder, ids: list[int]) -> str:
    text = ""
    for token_id in ids:
        text += decoder.push(token_id)
    return text + decoder.flush()


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_tokens_one_by_one_give_the_text_of_all_at_once(tokenizer: Tokenizer, data: st.DataObject) -> None:
    table = _table(tokenizer)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 5), max_size=40))
    skip = data.draw(st.booleans())
    assert pushed(IncrementalDecoder(table, skip), ids) == tokenizer.decode(ids, skip)


def test_the_table_has_the_bytes_of_each_token(tokenizer: Tokenizer) -> None:
    table = _table(tokenizer)
    expected = [b"" if token is None else tokenizer.token_bytes(i) for i, token in enumerate(tokenizer.tokens)]
    assert list(table.bytes) == table.bytes[:] == expected and len(table.bytes) == len(table)
    assert table.bytes[5:2:-2] == expected[5:2:-2]
    is_kept = [text is token for text, token in zip(table.texts, tokenizer.tokens, strict=True)]
    assert is_kept == [text == token for text, token in zip(table.texts, tokenizer.tokens, strict=True)]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("é🙂👩‍👧語 \n▁"), max_size=30))
def test_a_text_comes_back_in_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    table = _table(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoder, pieces = IncrementalDecoder(table), []
    for token_id in ids:
        if decoder.is_idle and table.is_plain[token_id]:  # as a stage does, without a call
            pieces.append(table.texts[token_id])
        else:
            pieces.append(decoder.push(token_id))
    pieces.append(decoder.flush())
    whole = tokenizer.decode(ids)
    assert "".join(pieces) == whole
    assert "".join(pieces).count("\ufffd") == whole.count("\ufffd") == text.count("\ufffd")


def test_an_emoji_of_several_tokens_appears_with_its_last_one(tokenizer: Tokenizer) -> None:
    ids = [token_id for token_id in range(len(tokenizer)) if tokenizer.token_bytes(token_id) in _SINGLE_BYTES]
    by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in ids}
    smile = [by_byte[bytes([byte])] for byte in "🙂".encode()]
    decoder = IncrementalDecoder(_table(tokenizer), continues=True)
    assert [decoder.push(token_id) for token_id in smile[:-1]] == ["", "", ""]
    assert decoder.push(smile[-1]) + decoder.flush() == "🙂"


_SINGLE_BYTES = {bytes([byte]) for byte in range(128, 256)}


def test_the_first_space_goes_at_the_start_of_a_text_and_stays_where_it_continues(tmp_path: Path) -> None:
    make_tokenizer("mistral", tmp_path, VOCAB_SIZE)
    tokenizer = Tokenizer.read(tmp_path)
    ids = tokenizer.encode("the cats", add_special_tokens=False)
    assert tokenizer.token(ids[0]).startswith("▁")  # type: ignore[union-attr]
    assert pushed(IncrementalDecoder(_table(tokenizer)), ids) == "the cats"
    assert pushed(IncrementalDecoder(_table(tokenizer), continues=True), ids) == " the cats"


@pytest.mark.parametrize("skip", [True, False])
def test_an_answer_continues_the_text_of_its_prompt_and_begins_it_where_there_is_none(
    tokenizer: Tokenizer, skip: bool
) -> None:
    """So the begin token alone, unless it is shown, leaves the answer at the start of the text."""
    words = tokenizer.encode(" the cats", add_special_tokens=False)
    special, space = sorted(tokenizer.special_ids)[:2], tokenizer.encode(" ", add_special_tokens=False)
    for prompt in ([], special, [*special, len(tokenizer) + 1], [*special, *space], [*special, *words], words):
        decoder = IncrementalDecoder.after(_table(tokenizer), np.array(prompt, np.int32), skip)
        whole = tokenizer.decode([*prompt, *words], skip)
        assert tokenizer.decode(prompt, skip) + pushed(decoder, words) == whole


def test_decoding_many_byte_tokens_takes_linear_time(tokenizer: Tokenizer) -> None:
    table = _table(tokenizer)
    byte = next(i for i in range(len(tokenizer)) if tokenizer.token_bytes(i) == b"\xe4")

    def seconds(count: int) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            pushed(IncrementalDecoder(table), [byte] * count)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(16_000) < 5 * seconds(8_000) + 0.01


@pytest.mark.slow
def test_other_threads_run_while_a_long_text_is_encoded(tokenizer: Tokenizer) -> None:
    text = (" ".join(TEXT) + "\n") * 400
    result: list[list[int]] = []
    worker = threading.Thread(target=lambda: result.append(tokenizer.encode(text)))
    turns = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20  # were the GIL held, there would be one
    assert result[0] == tokenizer._rust.encode(text).ids  # in pieces, but complete


def test_several_threads_get_the_ids_of_one(tokenizer: Tokenizer) -> None:
    texts = [f"{index} {text}" for index in range(8) for text in TEXT]
    expected = [tokenizer.encode(text) for text in texts]
    found: dict[int, list[list[int]]] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.__setitem__(n, [tokenizer.encode(text) for text in texts]))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[n] == expected for n in range(4))


@pytest.mark.slow
def test_the_front_of_the_model_package_imports_neither_torch_nor_transformers() -> None:
    modules = [
        "families.registry",
        "text.tokenizer",
        "text.detokenizer",
        "text.chat_template",
        "checkpoint.generation_defaults",
        "checkpoint.hub",
    ]
    code = "".join(f"import millrace.model.{name}\n" for name in modules)
    code += "import sys; print([name for name in ('torch', 'transformers', 'huggingface_hub') if name in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


_tables: dict[int, TextTable] = {}


def _table(tokenizer: Tokenizer) -> TextTable:
    if id(tokenizer) not in _tables:
        _tables[id(tokenizer)] = TextTable(tokenizer)
    return _tables[id(tokenizer)]


def _copy_with(root: Path, parent: Path, keys: dict[str, object]) -> Path:
    """A copy of a tokenizer's directory with other keys in its tokenizer_config.json."""
    copy = parent / "changed"
    copy.mkdir()
    for file in root.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = copy / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **keys}))
    return copy

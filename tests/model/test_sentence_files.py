"""The files of sentence-transformers: what old and new keys say, and what is refused with file, key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.model.errors import CheckpointError
from millrace.model.pooling import read_decoder_pooling, read_pooling
from millrace.model.sentence_files import SentenceFiles, read_sentence_files, transformer_folder

NEW = ("Transformer", "Pooling", "Normalize")


def write(root: Path, kinds: tuple[str, ...] = NEW, **files: Any) -> Path:
    """modules.json with modules of these kinds, and files by name; "/" is written "__", and ".json" is added."""
    modules = [{"path": f"{i}_{kind}" if i else "", "type": f"a.modules.{kind}"} for i, kind in enumerate(kinds)]
    files = {"modules": modules, "1_Pooling__config": {"pooling_mode": "mean"}} | files
    for name, values in files.items():
        path = root / (name.replace("__", "/") + ".json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(values))
    return root


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": ["lasttoken"], "embedding_dimension": 8}, "last"),
        ({"pooling_mode": "weightedmean"}, "weighted_mean"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, "max"),
        ({"pooling_mode_mean_sqrt_len_tokens": True, "word_embedding_dimension": 8}, "mean_sqrt_len"),
        ({"word_embedding_dimension": 8, "pooling_mode_cls_token": False}, "mean"),
    ],
    ids=str,
)
def test_the_pooling_is_read_by_its_new_and_its_old_keys(config: dict[str, Any], kind: str, tmp_path: Path):
    assert read_sentence_files(write(tmp_path, **{"1_Pooling__config": config})).pooling == kind


def test_lengths_are_those_of_the_modules_files_or_else_of_the_tokenizer(tmp_path: Path):
    def read(**files: Any) -> int | None:
        return read_sentence_files(write(tmp_path, **files)).max_tokens

    assert read() is None
    assert read(tokenizer_config={"model_max_length": 10**30}) is None
    assert read(tokenizer_config={"model_max_length": 96}) == 96
    assert read(sentence_bert_config={"processing_kwargs": {"text": {"max_length": 50}}}) == 50
    assert read(sentence_bert_config={"max_seq_length": 128}) == 128
    assert read(sentence_bert_config={"max_seq_length": 128, "tokenizer_args": {"model_max_length": 64}}) == 64


def test_settings_of_the_model_are_read(tmp_path: Path):
    settings = {
        "prompts": {"query": "q: ", "document": None},
        "default_prompt_name": "query",
        "similarity_fn_name": "dot",
        "truncate_dim": 4,
        "activation_fn": "torch.nn.modules.linear.Identity",
    }
    files = read_sentence_files(
        write(tmp_path, NEW[:2], config_sentence_transformers=settings, sentence_bert_config={"do_lower_case": True})
    )
    assert (files.default_prompt, files.similarity, files.truncate_dim) == ("q: ", "dot", 4)
    assert files.lower_case and not files.normalizes and files.activation == settings["activation_fn"]
    pooling = read_pooling(tmp_path, files, 8, "mean")
    assert pooling.prompt(None, "query") == "q: " and pooling.prompt(None, "document") == ""
    assert pooling.prompt(None, None) == "q: " and pooling.prompt("document", "query") == ""
    assert pooling.allows(4) and not pooling.allows(5)


def test_a_checkpoint_without_these_files_has_the_defaults(tmp_path: Path):
    assert read_sentence_files(tmp_path) == SentenceFiles() and transformer_folder(tmp_path) == ""


@pytest.mark.parametrize(
    ("kinds", "files", "message"),
    [
        (("Transformer", "LSTM"), {}, "module 'LSTM' is not supported"),
        (("Transformer", "Pooling", "Normalize", "Dense"), {}, "Normalize, Dense: supported: .*Normalize last"),
        (("Pooling",), {}, "the first module is Pooling: must be Transformer"),
        (NEW, {"modules": [{"type": "x.Transformer", "path": "../x"}]}, r"path = '../x': must be a folder of the"),
        (NEW, {"1_Pooling__config": {}}, "1_Pooling/config.json .*is missing or empty"),
        (NEW, {"2_Normalize__config": {"module_input_name": "token_embeddings"}}, "module_input_name = 'token_emb"),
        (NEW, {"sentence_bert_config": {"max_seq_length": "long"}}, "max_seq_length = 'long': must be a number"),
        (NEW, {"sentence_bert_config": {"transformer_task": "fill-mask"}}, "transformer_task = 'fill-mask'"),
        (NEW, {"sentence_bert_config": {"modality_config": {"message": {}}}}, "modality_config = .*message"),
        (NEW, {"sentence_bert_config": {"query_length": 8}}, "query_length = 8: not supported"),
        (NEW, {"sentence_bert_config": {"config_args": {"is_causal": False}}}, "config_args = .*is_causal"),
        (NEW, {"sentence_bert_config": {"processing_kwargs": {"text": {"add_special_tokens": False}}}}, "processing_k"),
        (NEW, {"config_sentence_transformers": {"model_type": "SparseEncoder"}}, "model_type = 'SparseEncoder'"),
        (NEW, {"config_sentence_transformers": {"similarity_fn_name": "maxsim"}}, "similarity_fn_name = 'maxsim'"),
        (NEW, {"config_sentence_transformers": {"default_prompt_name": "x"}}, "default_prompt_name = 'x': must be one"),
        (NEW, {"config_sentence_transformers": {"prompts": {"x": 1}}}, "prompts = {'x': 1}: must be texts"),
    ],
    ids=lambda value: str(value)[:48] if isinstance(value, str) else "",
)
def test_what_would_change_numbers_is_refused_by_file_key_and_value(
    kinds: tuple[str, ...], files: dict[str, Any], message: str, tmp_path: Path
):
    with pytest.raises(CheckpointError, match=message):
        read_sentence_files(write(tmp_path, kinds, **files))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"1_Pooling__config": {"pooling_mode": "max"}}, "pooling_mode for max: is supported for encoder models"),
        ({"config_sentence_transformers": {"truncate_dim": 9}}, "truncate_dim = 9: must be at most 8"),
        ({"1_Pooling__config": {"pooling_mode": ["cls", "max"]}}, r"pooling_mode = \['cls', 'max'\]: exactly one of"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:30],
)
def test_a_decoder_refuses_what_only_encoders_support(files: dict[str, Any], message: str, tmp_path: Path):
    root = write(tmp_path, **files)
    with pytest.raises(CheckpointError, match=message):
        read_decoder_pooling(root, read_sentence_files(root), 8)

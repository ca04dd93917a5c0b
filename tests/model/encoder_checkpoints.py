"""Tiny random encoders, written by transformers, which is also the oracle; and the files sentence-transformers adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from tests.model.tiny_tokenizers import TEXT

VOCAB_SIZE = 300
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _SHAPE,
    "roberta": _SHAPE | {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 130},
    "xlm-roberta": _SHAPE | {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 130},
    "distilbert": {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 64,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "mpnet": _SHAPE | {"pad_token_id": 1, "max_position_embeddings": 130},
}


def make_encoder(
    family: str, path: Path, *, labels: int | None = None, pooling: str | None = None, **overrides: Any
) -> Any:
    """Writes an encoder of `family`, a cross-encoder if it has `labels`, and returns the model in it. `pooling` is one
    of sentence-transformers' modes, written as it writes it."""
    more = {} if labels is None else {"num_labels": labels}
    config = AutoConfig.for_model(family, **ENCODERS[family], **more)
    kind = AutoModel if labels is None else AutoModelForSequenceClassification
    model = kind.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
    model.save_pretrained(path)
    change_config(path, **overrides)
    make_encoder_tokenizer(path, pad=config.pad_token_id, has_types=family == "bert")
    if pooling is not None:
        write_pooling(path, pooling)
    return model


def change_config(path: Path, **values: Any) -> None:
    """Sets keys of config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def write_pooling(path: Path, *modes: str, other: str | None = None) -> None:
    """modules.json and 1_Pooling/config.json, with the pooling `modes` on; `other` is one more module."""
    kinds = ["Transformer", "Pooling", *([other] if other else []), "Normalize"]
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"a.b.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    values = {f"pooling_mode_{name}": name in modes for name in names}
    (path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, **values}))


def make_encoder_tokenizer(path: Path, pad: int = 0, has_types: bool = True) -> PreTrainedTokenizerFast:
    """WordPiece as BERT has it: [CLS] a [SEP], and [CLS] a [SEP] b [SEP] for a pair.

    With `has_types` the model gets the types of a pair's tokens.
    """
    names = SPECIALS if pad == 0 else ["[UNK]", "[PAD]", *SPECIALS[2:]]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    tokens = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", *(["token_type_ids"] if has_types else []), "attention_mask"]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", model_input_names=inputs, **tokens)
    fast.save_pretrained(path)
    return fast

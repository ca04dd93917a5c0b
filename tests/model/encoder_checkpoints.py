"""Tiny random encoders, written by transformers, which is also the oracle; and the files sentence-transformers adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    PreTrainedTokenizerFast,
)

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
_ROPE = {"head_dim": 8, "num_key_value_heads": 2} | _SHAPE
_FROM_PAD = _SHAPE | {"pad_token_id": 1, "max_position_embeddings": 130}  # as RoBERTa counts positions
_XLM = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 128}
_XLM |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "dropout": 0.0, "attention_dropout": 0.0}
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_T5 = {"d_model": 32, "num_layers": 2, "num_heads": 4, "d_kv": 8, "d_ff": 64, "vocab_size": VOCAB_SIZE}
_T5 |= {"pad_token_id": 0}
MORE_ENCODERS: dict[str, dict[str, Any]] = {  # where hidden_dropout_prob has another name, eval() turns it off
    "albert": _SHAPE | {"embedding_size": 16},
    "bert-generation": _SHAPE,
    "big_bird": _SHAPE | {"attention_type": "original_full"},
    "camembert": _FROM_PAD,
    "convbert": _SHAPE | {"embedding_size": 32},
    "data2vec-text": _FROM_PAD,
    "deberta": _SHAPE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": _SHAPE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 16},
    "electra": _SHAPE | {"embedding_size": 16},
    "ernie": _SHAPE,
    "eurobert": _ROPE,
    "flaubert": _XLM,
    "fnet": _SHAPE,
    "gemma2": _ROPE | {"is_causal": False, "query_pre_attn_scalar": 8, **_WINDOWS},
    "gemma3_text": _ROPE | {"use_bidirectional_attention": True, "query_pre_attn_scalar": 8, **_WINDOWS},
    "gte": _SHAPE,
    "ibert": _FROM_PAD,
    "jina_embeddings_v3": _SHAPE | {"pad_token_id": 1},
    "llama": _ROPE | {"is_causal": False},
    "longformer": _FROM_PAD | {"attention_window": 8},
    "megatron-bert": _SHAPE,
    "mistral": _ROPE | {"is_causal": False, "sliding_window": 8},
    "mobilebert": _SHAPE | {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "modernbert": _SHAPE | {"local_attention": 8, "global_attn_every_n_layers": 2},
    "mt5": _T5 | {"feed_forward_proj": "gated-gelu"},
    "nomic_bert": _SHAPE,
    "nystromformer": _SHAPE,
    "qwen2": _ROPE | {"is_causal": False},
    "qwen3": _ROPE | {"is_causal": False},
    "rembert": _SHAPE | {"input_embedding_size": 16},
    "roberta-prelayernorm": _FROM_PAD,
    "roformer": _SHAPE,
    "squeezebert": _SHAPE | {"embedding_size": 32},
    "t5": _T5,
    "ultrabert": _SHAPE | {"num_key_value_heads": 4, "head_dim": 8},
    "umt5": _T5,
    "xlm": _XLM,
    "xlm-roberta-xl": _FROM_PAD,
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64, "vocab_size": VOCAB_SIZE, "pad_token_id": 5},
    "yoso": _SHAPE,
}


def make_encoder(
    family: str, path: Path, *, labels: int | None = None, pooling: str | None = None, **overrides: Any
) -> Any:
    """Writes an encoder of `family`, a cross-encoder if it has `labels`, and returns the model in it. `pooling` is one
    of sentence-transformers' modes, written as it writes it."""
    more = {} if labels is None else {"num_labels": labels}
    config = AutoConfig.for_model(family, **(ENCODERS | MORE_ENCODERS)[family], **more)
    kind = AutoModelForTextEncoding if family in ("t5", "mt5", "umt5") else AutoModel
    kind = kind if labels is None else AutoModelForSequenceClassification
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

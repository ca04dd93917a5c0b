"""What the class of a tokenizer adds to its tokenizer.json.

A checkpoint names a class of transformers. The class has default tokens, and applies keys of tokenizer_config.json to
the steps that a text goes through. The steps themselves are those of tokenizer.json: where transformers 5 would
replace them by others that the class is used to have, they stay, as the model was trained with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import read_json

# The class of a model_type; None: the steps of tokenizer.json as they are.
_OF_MODEL = {
    "albert": "AlbertTokenizer",
    "bert": "BertTokenizer",
    "camembert": "CamembertTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    "mistral": None,
    "modernbert": None,
    "mpnet": "MPNetTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}
_CLASS_IGNORED = frozenset({"modernbert", "qwen2"})  # model types whose checkpoints often name a wrong class
_ALIASES = {
    "ElectraTokenizer": "BertTokenizer",
    "BartTokenizer": "RobertaTokenizer",
}


@dataclass(frozen=True, slots=True)
class TokenizerClass:
    """A class of transformers: its default tokens, by name, and further special ones."""

    name: str | None = None
    named: Mapping[str, str] = field(default_factory=dict)
    extra: tuple[str, ...] = ()
    has_types: bool = False  # it tells the two texts of a pair apart, unless tokenizer_config.json says otherwise


_SENTENCEPIECE = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_ROBERTA = _SENTENCEPIECE | {"sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>", "mask_token": "<mask>"}
_BERT = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_END_OF_TEXT = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_INFILLING = {
    "prefix_token": "▁<PRE>",
    "middle_token": "▁<MID>",
    "suffix_token": "▁<SUF>",
    "eot_token": "▁<EOT>",
    "fill_token": "<FILL_ME>",
}
_CLASSES = {
    "DistilBertTokenizer": _BERT,
    "AlbertTokenizer": _BERT | {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "<unk>", "pad_token": "<pad>"},
    "BertTokenizer": _BERT,
    "CamembertTokenizer": _ROBERTA,
    "CodeLlamaTokenizer": _SENTENCEPIECE | _INFILLING,
    "DebertaV2Tokenizer": _BERT | {"bos_token": "[CLS]", "eos_token": "[SEP]"},
    "GPT2Tokenizer": _END_OF_TEXT,
    "LlamaTokenizer": _SENTENCEPIECE,
    "MPNetTokenizer": _ROBERTA | {"unk_token": "[UNK]"},
    "Qwen2Tokenizer": {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "RobertaTokenizer": _ROBERTA,
    "XLMRobertaTokenizer": _ROBERTA,
}
_TYPED = ("BertTokenizer", "DebertaV2Tokenizer")
_EXTRA = {"CamembertTokenizer": ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")}


def tokenizer_class(root: Path, config: Mapping[str, Any], has_byte_level: bool) -> TokenizerClass:
    """The class that transformers 5 chooses for the checkpoint in `root`, with tokenizer_config.json in `config`.

    `has_byte_level`: whether tokenizer.json has a byte-level step.
    """
    model = read_json(root, "config.json") or {}
    model_type = model.get("model_type")
    said = config.get("tokenizer_class") or model.get("tokenizer_class")
    name = None if said is None else str(said).removesuffix("Fast")
    name = _ALIASES.get(name or "", name)
    if name == "LlamaTokenizer" and has_byte_level and model_type not in _CLASS_IGNORED:
        name = None
    elif isinstance(model_type, str) and model_type in _OF_MODEL:
        of_model = _OF_MODEL[model_type]
        if name is None or of_model is None or model_type in _CLASS_IGNORED:
            name = of_model
    if name not in _CLASSES:
        return TokenizerClass()
    return TokenizerClass(name, _CLASSES[name], _EXTRA.get(name, ()), name in _TYPED)

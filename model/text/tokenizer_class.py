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

# The class of a model_type, which holds if tokenizer_config.json names none.
_MODELS_OF = {
    "AlbertTokenizer": "albert",
    "BertTokenizer": "bert distilbert electra",
    "CamembertTokenizer": "camembert",
    "CohereTokenizer": "cohere cohere2",
    "DebertaV2Tokenizer": "deberta-v2",
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma",
    "GPT2Tokenizer": "codegen dbrx gpt2 gpt_neo gptj jais2 opt phi starcoder2",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "MPNetTokenizer": "mpnet",
    "Qwen2Tokenizer": "qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text",
    "RobertaTokenizer": "roberta",
    "XLMRobertaTokenizer": "xlm-roberta",
}
# Model types with the steps of tokenizer.json as they are, whatever class tokenizer_config.json names.
_AS_IT_IS = (
    "ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite gpt_bigcode granite granitemoe "
    "granitemoehybrid granitemoeshared hyperclovax internlm2 internlm3 iquestcoder jamba kimi_linear mimo_v2_flash "
    "minicpm3 minimax_m2 ministral ministral3 mistral mistral3 mixtral modernbert nemotron olmo2 olmo3 olmo_hybrid "
    "persimmon phi3 phimoe stablelm"
)
_OF_MODEL: dict[str, str | None] = {
    model: name for name, models in _MODELS_OF.items() for model in models.split()
} | dict.fromkeys(_AS_IT_IS.split())
# Model types whose checkpoints often name a wrong class.
_OFTEN_WRONG = (
    "ernie4_5 ernie4_5_moe fuyu hyperclovax internlm2 internlm3 iquestcoder jamba minicpm3 minimax_m2 modernbert "
    "nemotron phi3 phimoe qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text"
)
_CLASS_IGNORED = frozenset(_OFTEN_WRONG.split())
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
_GEMMA = {
    "unk_token": "<unk>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_COHERE = {
    "unk_token": "<UNK>",
    "bos_token": "<BOS_TOKEN>",
    "eos_token": "<|END_OF_TURN_TOKEN|>",
    "pad_token": "<PAD>",
    "cls_token": "<CLS>",
    "sep_token": "<SEP>",
    "mask_token": "<MASK_TOKEN>",
}
_QWEN = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_CLASSES = {
    "DistilBertTokenizer": _BERT,
    "AlbertTokenizer": _BERT | {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "<unk>", "pad_token": "<pad>"},
    "BertTokenizer": _BERT,
    "CamembertTokenizer": _ROBERTA,
    "CodeGenTokenizer": _END_OF_TEXT,
    "CodeLlamaTokenizer": _SENTENCEPIECE | _INFILLING,
    "CohereTokenizer": _COHERE,
    "DebertaV2Tokenizer": _BERT | {"bos_token": "[CLS]", "eos_token": "[SEP]"},
    "GemmaTokenizer": _GEMMA,
    "GPT2Tokenizer": _END_OF_TEXT,
    "GPTNeoXTokenizer": _END_OF_TEXT | {"pad_token": "<|padding|>"},
    "LlamaTokenizer": _SENTENCEPIECE,
    "MPNetTokenizer": _ROBERTA | {"unk_token": "[UNK]"},
    "Qwen2Tokenizer": _QWEN,
    "Qwen3_5Tokenizer": _QWEN,
    "RobertaTokenizer": _ROBERTA,
    "XLMRobertaTokenizer": _ROBERTA,
}
_TYPED = ("BertTokenizer", "DebertaV2Tokenizer")
_EXTRA = {"CamembertTokenizer": ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")}


def reads_as_it_is(root: Path) -> bool:
    """Whether the steps of tokenizer.json hold for the checkpoint in `root`, whatever class its files name."""
    model_type = (read_json(root, "config.json") or {}).get("model_type")
    return isinstance(model_type, str) and _OF_MODEL.get(model_type, "") is None


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

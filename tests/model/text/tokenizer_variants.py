"""Small tokenizers of more kinds, and changes to their files, for comparison with transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from millrace.model.text.tokenizer import ALWAYS_CLEANS
from tests.model.tiny_tokenizers import TEXT, make_tokenizer

VOCAB_SIZE = 600
MARKS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


@cache
def tokenizer_json(kind: str) -> str:
    """The tokenizer.json of a kind: chatml, llama3, mistral, word_piece, unigram, albert."""
    return {"word_piece": _word_piece, "unigram": _unigram, "albert": _albert}[kind]()


def _word_piece() -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator([*TEXT, *(text.lower() for text in TEXT)] * 3, trainer)
    tokenizer.post_processor = _template(tokenizer, "[CLS]", "[SEP]")
    return tokenizer.to_str()


def _unigram() -> str:
    tokenizer = _trained_unigram(list(MARKS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer.to_str()


def _albert() -> str:
    names = ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = _trained_unigram(names)
    steps = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.post_processor = _template(tokenizer, "[CLS]", "[SEP]")
    return tokenizer.to_str()


def _trained_unigram(names: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace("▁", prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=names, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    return tokenizer


def _template(tokenizer: Tokenizer, begin: str, end: str) -> processors.TemplateProcessing:
    ids = [(name, tokenizer.token_to_id(name)) for name in (begin, end)]
    pair = f"{begin}:0 $A:0 {end}:0 $B:1 {end}:1"
    return processors.TemplateProcessing(single=f"{begin}:0 $A:0 {end}:0", pair=pair, special_tokens=ids)


def write_kind(kind: str, root: Path) -> None:
    """Writes the files of a kind into `root`."""
    root.mkdir(exist_ok=True)
    if kind in ("chatml", "llama3", "mistral"):
        make_tokenizer(kind, root, VOCAB_SIZE)
        return
    (root / "tokenizer.json").write_text(tokenizer_json(kind))
    (root / "tokenizer_config.json").write_text("{}")


def token(content: str, **flags: bool) -> dict[str, Any]:
    """An added token of the `tokenizers` library, as JSON; not special, and no flag set."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": content, **dict.fromkeys(names, False), **flags}


def named(content: str, **flags: bool) -> dict[str, Any]:
    """A special token in tokenizer_config.json."""
    return {"__type": "AddedToken", **token(content, special=True, **flags)}


@dataclass(frozen=True, slots=True)
class Variant:
    """The files of a tokenizer of a kind, changed."""

    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)  # keys of tokenizer_config.json; None: no file
    model: Mapping[str, Any] = field(default_factory=dict)  # config.json
    files: Mapping[str, Any] = field(default_factory=dict)  # other files beside them
    change: Callable[[dict[str, Any]], None] | None = None  # to tokenizer.json
    drops: tuple[str, ...] = ()  # keys that tokenizer_config.json loses

    def write(self, root: Path) -> Path:
        """Writes the variant into `root`, over the files of its kind."""
        config = json.loads((root / "tokenizer_config.json").read_text()) | dict(self.config)
        config = {key: value for key, value in config.items() if key not in self.drops}
        (root / "tokenizer_config.json").write_text(json.dumps(config))
        if self.model:
            (root / "config.json").write_text(json.dumps(self.model))
        for name, values in self.files.items():
            (root / name).write_text(json.dumps(values))
        if self.change is not None:
            values = json.loads((root / "tokenizer.json").read_text())
            self.change(values)
            (root / "tokenizer.json").write_text(json.dumps(values))
        return root


def _flags_of(content: str, **flags: bool) -> Callable[[dict[str, Any]], None]:
    """A change to the flags of an added token in tokenizer.json."""

    def change(values: dict[str, Any]) -> None:
        (entry,) = (entry for entry in values["added_tokens"] if entry["content"] == content)
        entry.update(flags)

    return change


def _normalizer(step: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.update(normalizer=json.loads(step.__getstate__()))


_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_LOWER = _normalizer(normalizers.Lowercase())
_ROBERTA = {"tokenizer_class": "RobertaTokenizer", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
_ROBERTA |= {"sep_token": "<|im_end|>", "cls_token": "<|im_start|>", "unk_token": "<|endoftext|>"}
_ROBERTA |= {"pad_token": "<|endoftext|>", "mask_token": "<|endoftext|>"}


def _roberta_ends(values: dict[str, Any]) -> None:
    values["post_processor"] = json.loads(
        processors.RobertaProcessing(("<|im_end|>", 2), ("<|im_start|>", 1)).__getstate__()
    )


def _qwen_steps(values: dict[str, Any]) -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    steps = [
        pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    values["pre_tokenizer"] = json.loads(pre_tokenizers.Sequence(steps).__getstate__())
    values["normalizer"] = {"type": "NFC"}


_GPT2 = {"tokenizer_class": "GPT2Tokenizer"}
_LLAMA = {"tokenizer_class": "LlamaTokenizer"}
_BERT = {"tokenizer_class": "BertTokenizer"}
_XLM = {"tokenizer_class": "XLMRobertaTokenizer"}
_MAP = "special_tokens_map.json"
_IM_END = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

VARIANTS: dict[str, Variant] = {
    # names and added tokens, in three files
    "names only in special_tokens_map.json": Variant("chatml", drops=_NAMES, files={_MAP: _IM_END}),
    "names with flags in special_tokens_map.json": Variant(
        "chatml",
        drops=_NAMES,
        files={_MAP: {"eos_token": token("<|im_end|>", lstrip=True), "pad_token": token("<|pad|>", rstrip=True)}},
    ),
    "special_tokens_map.json over tokenizer_config.json": Variant(
        "chatml", {"eos_token": "<|endoftext|>"}, files={_MAP: {"eos_token": "<|im_end|>", "bos_token": None}}
    ),
    "further tokens in special_tokens_map.json": Variant(
        "llama3", drops=("extra_special_tokens",), files={_MAP: {"additional_special_tokens": ["<a>", "<|eot_id|>"]}}
    ),
    "further tokens in both files": Variant(
        "llama3",
        {"extra_special_tokens": ["<a>"]},
        files={_MAP: {"extra_special_tokens": ["<b>", {"content": "<c>", "lstrip": True}], "mask_token": "<m>"}},
    ),
    "special_tokens_map.json beside added_tokens_decoder": Variant(
        "chatml", {"added_tokens_decoder": {"2": token("<|im_end|>", special=True)}}, files={_MAP: {"eos_token": "<x>"}}
    ),
    "added_tokens.json": Variant("chatml", files={"added_tokens.json": {"<two>": 601, "<one>": 600, "<|im_end|>": 2}}),
    "added_tokens.json with a special name": Variant(
        "chatml", {"eos_token": "<one>"}, files={"added_tokens.json": {"<two>": 601, "<one>": 600}}
    ),
    "all three files": Variant(
        "mistral", {"pad_token": "<pad>"}, files={_MAP: {"pad_token": "<p>"}, "added_tokens.json": {"<p>": 600}}
    ),
    "named tokens of a model": Variant("chatml", {"image_token": "<image>", "audio_token": "<|im_end|>"}),
    "extra tokens by name": Variant("chatml", {"extra_special_tokens": {"image_token": "<image>"}}),
    "additional_special_tokens": Variant(
        "llama3", {"additional_special_tokens": ["<a>"]}, drops=("extra_special_tokens",)
    ),
    "a name that is null": Variant("llama3", {"bos_token": None}),
    "no tokenizer_config.json": Variant("llama3", drops=(*_NAMES, "tokenizer_class")),
    # flags of added tokens
    "lstrip and rstrip in added_tokens_decoder": Variant(
        "chatml", {"added_tokens_decoder": {"2": token("<|im_end|>", lstrip=True, rstrip=True, special=True)}}
    ),
    "single_word in added_tokens_decoder": Variant(
        "chatml",
        {"added_tokens_decoder": {"590": token("cat", single_word=True), "591": token("dog", normalized=True)}},
    ),
    "normalized in added_tokens_decoder": Variant(
        "chatml", {"added_tokens_decoder": {"590": token("ABC", normalized=True), "591": token("XYZ")}}, change=_LOWER
    ),
    "a special token that added_tokens_decoder makes ordinary": Variant(
        "chatml", {"added_tokens_decoder": {"1": token("<|im_start|>")}, "bos_token": None}
    ),
    "an ordinary token that added_tokens_decoder makes special": Variant(
        "chatml", {"added_tokens_decoder": {"590": token("dog", special=True)}}
    ),
    "flags of a named token": Variant("chatml", {"eos_token": named("<end>", lstrip=True, rstrip=True)}),
    "flags of a named token that is there": Variant("chatml", {"eos_token": named("<|im_end|>", lstrip=True)}),
    "flags in tokenizer.json": Variant("chatml", change=_flags_of("<|im_end|>", lstrip=True, rstrip=True)),
    "normalized in tokenizer.json": Variant(
        "chatml", change=lambda v: (_LOWER(v), _flags_of("<|im_end|>", normalized=True)(v), None)[2]
    ),
    "split_special_tokens": Variant("chatml", {"split_special_tokens": True}),
    "split_special_tokens of SentencePiece": Variant("mistral", {"split_special_tokens": True}),
    "cleaned decoding, which BPE ignores": Variant("chatml", {"clean_up_tokenization_spaces": True}),
    "cleaned decoding, which BPE is told to use": Variant(
        "chatml", {"clean_up_tokenization_spaces": True, ALWAYS_CLEANS: True}
    ),
    # byte-level classes
    "GPT-2": Variant("chatml", _GPT2),
    "GPT-2 with a space": Variant("chatml", _GPT2 | {"add_prefix_space": True}),
    "GPT-2 without the space of tokenizer.json": Variant(
        "chatml", _GPT2, change=lambda v: v["pre_tokenizer"].update(add_prefix_space=True)
    ),
    "GPT-2 without names": Variant("chatml", _GPT2, drops=_NAMES),
    "no class, with a space": Variant("chatml", {"add_prefix_space": True}),
    "RoBERTa with a space": Variant("chatml", _ROBERTA | {"add_prefix_space": True}, change=_roberta_ends),
    "Qwen2 with a space": Variant(
        "chatml", {"tokenizer_class": "Qwen2Tokenizer", "add_prefix_space": True}, change=_qwen_steps
    ),
    "Qwen2 with flags": Variant(
        "chatml", {"tokenizer_class": "Qwen2Tokenizer", "pad_token": named("<p>", lstrip=True)}, change=_qwen_steps
    ),
    "Qwen3 by its model_type": Variant(
        "chatml", model={"model_type": "qwen3"}, drops=("tokenizer_class",), change=_qwen_steps
    ),
    # SentencePiece-like classes
    "Llama 2": Variant("mistral", _LLAMA),
    "Llama 2, legacy": Variant("mistral", _LLAMA | {"legacy": True}),
    "Llama 2 without a space": Variant("mistral", _LLAMA | {"add_prefix_space": False}),
    "Llama 2 without names": Variant("mistral", _LLAMA, drops=_NAMES),
    "Llama 2 as a Llama model": Variant("mistral", _LLAMA, {"model_type": "llama"}),
    "Llama's class for a Mistral model": Variant("mistral", _LLAMA, {"model_type": "mistral"}),
    "Code Llama": Variant("mistral", {"tokenizer_class": "CodeLlamaTokenizer"}),
    "no class, SentencePiece without a space": Variant("mistral", {"add_prefix_space": False}),
    # WordPiece
    "BERT": Variant("word_piece", _BERT),
    "BERT by its model_type": Variant("word_piece", model={"model_type": "bert"}),
    "BERT with capitals": Variant("word_piece", _BERT | {"do_lower_case": False}),
    "BERT with accents": Variant("word_piece", _BERT | {"strip_accents": False, "tokenize_chinese_chars": False}),
    "BERT as ELECTRA": Variant("word_piece", {"tokenizer_class": "ElectraTokenizer", "do_lower_case": False}),
    "BERT with cleaned decoding": Variant("word_piece", _BERT | {"clean_up_tokenization_spaces": True}),
    "BERT without a class": Variant("word_piece", {"do_lower_case": False}),
    # Unigram
    "XLM-RoBERTa": Variant("unigram", _XLM),
    "XLM-RoBERTa without a space": Variant("unigram", _XLM | {"add_prefix_space": False}),
    "XLM-RoBERTa, cleaned decoding": Variant("unigram", {"clean_up_tokenization_spaces": True}),
    "ALBERT": Variant("albert", {"tokenizer_class": "AlbertTokenizer"}),
    "ALBERT with capitals and accents": Variant(
        "albert", {"tokenizer_class": "AlbertTokenizer", "do_lower_case": False, "keep_accents": True}
    ),
}

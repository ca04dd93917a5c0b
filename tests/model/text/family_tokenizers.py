"""Small tokenizers with the steps, tokens and settings of the families' checkpoints, and texts hard to split."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.model.tiny_tokenizers import TEXT

AWKWARD = (
    "",
    " ",
    "  two  spaces\n\n\n\tand\ttabs \r\n",
    "Ünï 🙂🙃 👩‍👩‍👧‍👦 e\u0301 \u200b\ufeff\x00\x7f \U000e0001",
    "in 2023, it's 650841823! 3.14159",
    "<bos>x<eos> <|im_start|>user\n<|im_end|><start_of_turn> <unused7> </s> [INST] <0x41> <table>",
    "x <|end|> \n y<|endoftext|>  z<|assistant|>\n<s>",
    "▁low ▁▁line Ġg",
    "日本語のテキスト。 Привет 你好 ไทย العربية हिन्दी",
    "print(f'{x}')  # don't\n\n    return None",
    "a" * 90,
    "The quick brown fox. ",
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
_PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}
_END_OF_TEXT = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}


@cache
def _merges(is_byte_level: bool) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The pieces and merges that the texts give."""
    trained = Tokenizer(models.BPE())
    if is_byte_level:
        trained.pre_tokenizer = WORDS
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
        trained.train_from_iterator(TEXT * 3, trainer)
    else:
        trained.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
        trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
        trained.train_from_iterator([text for text in TEXT if text.isascii()] * 3, trainer)
    made = json.loads(trained.to_str())["model"]
    return tuple(sorted(made["vocab"], key=made["vocab"].get)), tuple((a, b) for a, b in made["merges"])


def byte_level(
    *steps: Any, names: Sequence[str | AddedToken], normalizer: Any = None, before: Sequence[str] = ()
) -> Tokenizer:
    """Byte-level BPE after the steps; `before` are the tokens that the post-processor puts before a text."""
    pieces, merges = _merges(True)
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(steps)) if len(steps) > 1 else steps[0]
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return _with_tokens(tokenizer, names, before)


def byte_fallback(
    names: Sequence[str | AddedToken],
    *,
    normalizer: Any = None,
    pre_tokenizer: Any = None,
    strips: bool = False,
    before: Sequence[str] = (),
) -> Tokenizer:
    """BPE over pieces with "▁" for a space, and bytes for unknown characters."""
    pieces, merges = _merges(False)
    first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {piece: i for i, piece in enumerate([*first, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab, list(merges), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return _with_tokens(tokenizer, names, before)


def _with_tokens(tokenizer: Tokenizer, names: Sequence[str | AddedToken], before: Sequence[str]) -> Tokenizer:
    added = [AddedToken(name, normalized=False, special=True) if isinstance(name, str) else name for name in names]
    tokenizer.add_tokens(added)
    if before:
        single = " ".join(f"{name}:0" for name in before) + " $A:0"
        pair = single + "".join(f" {name}:1" for name in before) + " $B:1"
        special = [(name, tokenizer.token_to_id(name)) for name in before]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)
    return tokenizer


_GEMMA_NAMES = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>", "<unused7>")
_GEMMA = partial(
    byte_fallback,
    (*_GEMMA_NAMES, AddedToken("\n\n", normalized=False), AddedToken("<table>", normalized=False)),
    normalizer=normalizers.Replace(" ", "▁"),
    pre_tokenizer=pre_tokenizers.Split(" ", "merged_with_previous"),
    before=("<bos>",),
)
_PREPENDED = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
_PHI3_NAMES = (
    "<s>",
    AddedToken("</s>", rstrip=True, normalized=False),
    *(AddedToken(name, rstrip=True, normalized=False, special=True) for name in ("<|end|>", "<|assistant|>")),
    "<|endoftext|>",
)
_NEOX_NAMES = ("<|endoftext|>", "<|padding|>", AddedToken("  ", normalized=True), AddedToken("    ", normalized=True))
_COHERE_NAMES = ("<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>")
_COHERE = partial(byte_level, DIGITS, WORDS, names=_COHERE_NAMES, normalizer=normalizers.NFC(), before=("<BOS_TOKEN>",))
_ISOLATED = partial(pre_tokenizers.Split, behavior="isolated")
_CHATML_NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, slots=True)
class Family:
    """The tokenizer files of a checkpoint of the family."""

    model_type: str
    make: Callable[[], Tokenizer]
    config: Mapping[str, Any] = field(default_factory=dict)  # tokenizer_config.json

    def write(self, root: Path) -> None:
        """Writes them into an existing folder."""
        self.make().save(str(root / "tokenizer.json"))
        (root / "tokenizer_config.json").write_text(json.dumps(self.config))
        (root / "config.json").write_text(json.dumps({"model_type": self.model_type}))


FAMILIES: dict[str, Family] = {
    "Gemma": Family(
        "gemma3_text",
        _GEMMA,
        {
            "tokenizer_class": "GemmaTokenizer",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "extra_special_tokens": {"boi_token": "<start_of_image>"},
        },
    ),
    "Gemma without names": Family("gemma2", _GEMMA),
    "Gemma 3 with images": Family("gemma3", _GEMMA, {"tokenizer_class": "GemmaTokenizerFast"}),
    "Llama 2, legacy": Family(
        "llama",
        partial(byte_fallback, ("<s>", "</s>"), normalizer=_PREPENDED, strips=True, before=("<s>",)),
        {"tokenizer_class": "LlamaTokenizer", "legacy": True, "bos_token": "<s>", "eos_token": "</s>"},
    ),
    "Phi-3": Family(
        "phi3",
        partial(byte_fallback, _PHI3_NAMES, normalizer=_PREPENDED, strips=True),
        {
            "tokenizer_class": "LlamaTokenizer",
            "legacy": False,
            "add_bos_token": False,
            "bos_token": "<s>",
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "unk_token": "<unk>",
        },
    ),
    "Ministral": Family(
        "ministral",
        partial(
            byte_fallback,
            ("<s>", "</s>", "[INST]", "[/INST]"),
            pre_tokenizer=pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False),
            strips=True,
            before=("<s>",),
        ),
        {"tokenizer_class": "LlamaTokenizer", "legacy": False, "bos_token": "<s>", "eos_token": "</s>"},
    ),
    "Ministral 3": Family(
        "ministral3",
        partial(byte_level, _ISOLATED(Regex(SPLIT)), BYTES, names=("<s>", "</s>", "[INST]"), before=("<s>",)),
        {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"},
    ),
    "Ernie 4.5": Family(
        "ernie4_5",
        partial(byte_fallback, ("<s>", "</s>"), normalizer=normalizers.Replace(" ", "▁")),
        {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False},
    ),
    "Phi-2": Family(
        "phi",
        partial(byte_level, WORDS, names=("<|endoftext|>", AddedToken("  "), AddedToken("\t\t"))),
        {"tokenizer_class": "CodeGenTokenizer", "add_prefix_space": False, **_END_OF_TEXT},
    ),
    "Phi-4": Family(
        "phi3",
        partial(byte_level, _ISOLATED(Regex(SPLIT)), BYTES, names=_CHATML_NAMES),
        {"tokenizer_class": "GPT2Tokenizer", **_END_OF_TEXT, "eos_token": "<|im_end|>"},
    ),
    "GPT-2": Family("gpt2", partial(byte_level, WORDS, names=("<|endoftext|>",)), {"model_max_length": 1024}),
    "GPT-J": Family(
        "gptj",
        partial(byte_level, WORDS, names=("<|endoftext|>", *(AddedToken(f"<|extratoken_{i}|>") for i in range(9)))),
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, **_END_OF_TEXT},
    ),
    "Pythia": Family(
        "gpt_neox",
        partial(byte_level, WORDS, names=_NEOX_NAMES, normalizer=normalizers.NFC()),
        {"tokenizer_class": "GPTNeoXTokenizer", "add_prefix_space": False, **_END_OF_TEXT},
    ),
    "Pythia without names": Family(
        "gpt_neox", partial(byte_level, WORDS, names=_NEOX_NAMES, normalizer=normalizers.NFC())
    ),
    "OLMo 2": Family(
        "olmo2",
        partial(byte_level, _ISOLATED(Regex(SPLIT)), BYTES, names=("<|endoftext|>", "<|pad|>")),
        {"tokenizer_class": "GPT2Tokenizer", **_END_OF_TEXT, "pad_token": "<|pad|>"},
    ),
    "Granite": Family(
        "granite",
        partial(byte_level, DIGITS, WORDS, names=("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>")),
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|end_of_text|>", "eos_token": "<|end_of_text|>"},
    ),
    "StarCoder2": Family(
        "starcoder2",
        partial(byte_level, WORDS, names=("<|endoftext|>", "<fim_prefix>")),
        {"tokenizer_class": "GPT2Tokenizer", **_END_OF_TEXT},
    ),
    "StableLM 2": Family(
        "stablelm",
        partial(byte_level, _ISOLATED(Regex(SPLIT)), BYTES, names=_CHATML_NAMES),
        {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
    "Cohere": Family(
        "cohere2",
        _COHERE,
        {"tokenizer_class": "CohereTokenizer", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"},
    ),
    "Cohere without names": Family("cohere", _COHERE),
    "GLM-4": Family(
        "glm4",
        partial(
            byte_level,
            _ISOLATED(Regex(SPLIT)),
            BYTES,
            names=("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>"),
            before=("[gMASK]", "<sop>"),
        ),
        {"tokenizer_class": "PreTrainedTokenizer", "eos_token": "<|endoftext|>", "do_lower_case": False},
    ),
    "Falcon": Family(
        "falcon",
        partial(
            byte_level,
            pre_tokenizers.Punctuation("contiguous"),
            WORDS,
            pre_tokenizers.Digits(individual_digits=False),
            _ISOLATED(Regex("[0-9][0-9][0-9]")),
            names=(">>TITLE<<", "<|endoftext|>"),
        ),
        {**_PLAIN, "eos_token": "<|endoftext|>", "add_prefix_space": False},
    ),
    "BLOOM": Family(
        "bloom",
        partial(byte_level, _ISOLATED(Regex(r" ?[^(\s|[.,!?…。，、।۔،])]+")), BYTES, names=("<unk>", "<s>", "</s>")),
        {"tokenizer_class": "BloomTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    ),
    "DeepSeek": Family(
        "deepseek_v3",
        partial(
            byte_level,
            _ISOLATED(Regex(r"\p{N}{1,3}")),
            _ISOLATED(Regex("[一-龥぀-ゟ゠-ヿ]+")),
            _ISOLATED(Regex(SPLIT)),
            BYTES,
            names=("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", AddedToken("<｜User｜>", normalized=False)),
            before=("<｜begin▁of▁sentence｜>",),
        ),
        {
            "tokenizer_class": "LlamaTokenizerFast",
            "legacy": True,
            "bos_token": {"__type": "AddedToken", "content": "<｜begin▁of▁sentence｜>", "normalized": True},
            "eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>", "normalized": True},
        },
    ),
    "SmolLM3": Family(
        "smollm3",
        partial(byte_level, _ISOLATED(Regex(SPLIT)), BYTES, names=("<|begin_of_text|>", *_CHATML_NAMES)),
        {**_PLAIN, "bos_token": None, "eos_token": "<|im_end|>"},
    ),
    "EXAONE 4": Family(
        "exaone4",
        partial(byte_level, WORDS, names=("[BOS]", "[EOS]", "[PAD]", AddedToken("▁▁", normalized=True))),
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[BOS]"},
    ),
    "Qwen3 MoE": Family(
        "qwen3_moe",
        partial(byte_level, WORDS, names=_CHATML_NAMES),
        {**_PLAIN, "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
    "gpt-oss": Family(
        "gpt_oss",
        partial(byte_level, _ISOLATED(Regex(SPLIT)), BYTES, names=("<|startoftext|>", "<|return|>", "<|start|>")),
        {**_PLAIN, "bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
    ),
}

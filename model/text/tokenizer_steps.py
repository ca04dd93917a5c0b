"""Applies tokenizer_config.json to the steps of a tokenizer: normalizer, pre-tokenizer and decoder.

Which keys apply depends on the tokenizer's class (see `tokenizer_class.py`). A key changes the parameters of a step
that tokenizer.json has; it replaces no step by another. Only Llama's steps, of which there are several equal forms, are
put in the form that transformers 5 uses.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers

from ..errors import CheckpointError
from .tokenizer_class import TokenizerClass

_BYTE_LEVEL = (
    "CodeGenTokenizer",
    "CohereTokenizer",
    "GPT2Tokenizer",
    "GPTNeoXTokenizer",
    "Qwen2Tokenizer",
    "Qwen3_5Tokenizer",
    "RobertaTokenizer",
)
_WORD_PIECE = ("BertTokenizer", "DistilBertTokenizer", "MPNetTokenizer")
_UNIGRAM = ("AlbertTokenizer", "CamembertTokenizer", "DebertaV2Tokenizer", "XLMRobertaTokenizer")
_LLAMA = ("LlamaTokenizer", "CodeLlamaTokenizer")


def apply_class(rust: RustTokenizer, kind: TokenizerClass, config: Mapping[str, Any], root: Path) -> None:
    """Applies the keys that the class knows, and `split_special_tokens`.

    Raises CheckpointError that names a key whose value is not one."""
    flags = _Flags(config, root)
    rust.encode_special_tokens = flags("split_special_tokens", False)
    if kind.name in _BYTE_LEVEL:
        for step in steps_of(rust.pre_tokenizer):
            if isinstance(step, pre_tokenizers.ByteLevel):
                step.add_prefix_space = flags("add_prefix_space", False)
    elif kind.name in _WORD_PIECE:
        for step in steps_of(rust.normalizer):
            if isinstance(step, normalizers.BertNormalizer):
                _set_bert(step, flags)
    elif kind.name in _UNIGRAM:
        _set_metaspace(rust, flags("add_prefix_space", True), kind.name)
        if kind.name == "AlbertTokenizer":
            _set_albert(rust, flags)
        if kind.name == "DebertaV2Tokenizer":
            _set_deberta(rust, flags)
    elif kind.name in _LLAMA and _is_llama(rust):
        _set_llama(rust, flags, is_code=kind.name == "CodeLlamaTokenizer")


def lower_texts(rust: RustTokenizer) -> None:
    """Makes lower case of a text before its other steps, unless one of them does so."""
    steps = list(steps_of(rust.normalizer))
    if not any(isinstance(step, normalizers.Lowercase) for step in steps):
        rust.normalizer = normalizers.Sequence([normalizers.Lowercase(), *steps])


class _Flags:
    """Reads true, false and null from tokenizer_config.json."""

    def __init__(self, config: Mapping[str, Any], root: Path) -> None:
        self._config = config
        self._root = root

    def __call__(self, key: str, default: bool) -> bool:
        value = self.optional(key, default)
        return default if value is None else value

    def optional(self, key: str, default: bool | None = None) -> bool | None:
        value = self._config.get(key, default)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(f"tokenizer_config.json ({self._root}): {key}: must be true or false, not {value!r}")
        return value


def steps_of(step: Any) -> Iterator[Any]:
    """The steps of a sequence, nested ones too; a single step is itself."""
    if isinstance(step, normalizers.Sequence | pre_tokenizers.Sequence):
        for index in itertools.count():
            try:
                part = step[index]  # NOTE: a sequence has neither a length nor an iterator
            except IndexError:
                return
            yield from steps_of(part)
    elif step is not None:
        yield step


def _set_bert(step: Any, flags: _Flags) -> None:
    step.clean_text = True
    step.lowercase = flags("do_lower_case", True)
    step.handle_chinese_chars = flags("tokenize_chinese_chars", True)
    step.strip_accents = flags.optional("strip_accents")


def _set_metaspace(rust: RustTokenizer, has_prefix: bool, name: str) -> None:
    scheme = "always" if has_prefix else "first" if name == "DebertaV2Tokenizer" else "never"
    for step in [*steps_of(rust.pre_tokenizer), rust.decoder]:
        if isinstance(step, pre_tokenizers.Metaspace | decoders.Metaspace):
            step.prepend_scheme = scheme


def _set_albert(rust: RustTokenizer, flags: _Flags) -> None:
    steps = list(steps_of(rust.normalizer))
    changed = (normalizers.NFKD, normalizers.StripAccents, normalizers.Lowercase)
    rest = [step for step in steps if not isinstance(step, changed)]
    if not all(isinstance(step, normalizers.Replace | normalizers.Precompiled) for step in rest):
        return
    first = next((index for index, step in enumerate(rest) if isinstance(step, normalizers.Precompiled)), len(rest))
    added = [] if flags("keep_accents", False) else [normalizers.NFKD(), normalizers.StripAccents()]
    added += [normalizers.Lowercase()] if flags("do_lower_case", True) else []
    rust.normalizer = normalizers.Sequence([*rest[:first], *added, *rest[first:]])


def _set_deberta(rust: RustTokenizer, flags: _Flags) -> None:
    steps = [step for step in steps_of(rust.normalizer) if not isinstance(step, normalizers.Lowercase)]
    lower = [normalizers.Lowercase()] if flags("do_lower_case", False) else []
    rust.normalizer = normalizers.Sequence([*lower, *steps])
    pieces = [step for step in steps_of(rust.pre_tokenizer) if not isinstance(step, pre_tokenizers.Punctuation)]
    punctuation = [pre_tokenizers.Punctuation(behavior="isolated")] if flags("split_by_punct", False) else []
    rust.pre_tokenizer = pre_tokenizers.Sequence([*punctuation, *pieces])


def _is_llama(rust: RustTokenizer) -> bool:
    """Whether the steps only write "▁" for a space and put one before the text."""
    before = [json.loads(step.__getstate__()) for step in steps_of(rust.normalizer)]
    spaces = ({"String": " "}, "▁")
    kinds = [
        step["type"] == "Prepend"
        and step["prepend"] == "▁"
        or step["type"] == "Replace"
        and (step["pattern"], step["content"]) == spaces
        for step in before
    ]
    return all(kinds) and isinstance(rust.pre_tokenizer, pre_tokenizers.Metaspace | None)


def _set_llama(rust: RustTokenizer, flags: _Flags, is_code: bool) -> None:
    """Llama 2's steps: "▁" before the text; if legacy, before each piece between special tokens."""
    has_prefix = flags("add_prefix_space", True)
    is_legacy = flags("legacy", False) and not is_code
    scheme = ("always" if is_legacy else "first") if has_prefix else "never"
    rust.normalizer = None
    rust.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix or is_code else steps)

"""The tokenizer that a GGUF file describes.

Three kinds are read: `gpt2`, byte-level BPE with merges, whose way to split a text has a name (`tokenizer.ggml.pre`);
`llama`, SentencePiece's BPE, whose merges follow from the scores of its tokens; and `gemma4`, the same with merges.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CheckpointError, quoted
from ..stored_tokenizer import StoredTokenizer
from .merges import merges_of, used_merges
from .pre_tokenizers import OF_ARCHITECTURE, PRE_TOKENIZERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token_type

SPACE = "▁"
SENTENCEPIECE = ("llama", "gemma4")
PHI_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")  # Phi-3's other added tokens take the spaces behind them
KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {  # of values that are used: a check, and what it checks
    **dict.fromkeys(("model", "pre"), (lambda value: isinstance(value, str), "a text")),
    **dict.fromkeys(("tokens", "merges"), (lambda value: isinstance(value, list), "a list of texts")),
    "scores": (lambda value: isinstance(value, np.ndarray) and value.dtype.kind in "fiu", "a list of numbers"),
    "token_type": (lambda value: isinstance(value, np.ndarray) and value.dtype.kind in "iu", "a list of whole numbers"),
    **dict.fromkeys(
        (f"{name}_token_id" for name in ("bos", "eos", "unknown")),
        (lambda value: isinstance(value, int), "a whole number"),
    ),
    **dict.fromkeys(
        ("add_bos_token", "add_eos_token", "add_space_prefix"),
        (lambda value: isinstance(value, int), "true or false"),
    ),
}


def read_tokenizer(metadata: Mapping[str, Any], source: str) -> StoredTokenizer:
    """The tokenizer. Raises CheckpointError naming the key; `source` is the file's name."""
    _check_kinds(metadata, source)
    kind = metadata.get("tokenizer.ggml.model")
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens") or ()
    if not tokens:
        raise CheckpointError(
            f"{source}: tokenizer.ggml.tokens: holds no vocabulary; "
            "serve another GGUF file of the model, or its checkpoint"
        )
    told = metadata.get("tokenizer.ggml.token_type")
    types: Sequence[int] = [NORMAL] * len(tokens) if told is None else told.tolist()
    if len(types) != len(tokens):
        raise CheckpointError(f"{source}: tokenizer.ggml.token_type: {len(types)} types of {len(tokens)} tokens")
    makers = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece_with_merges}
    if kind not in makers:
        raise CheckpointError(
            f"{source}: tokenizer.ggml.model = {quoted(kind)}: only gpt2, llama and gemma4 are read; serve the "
            "model's checkpoint instead"
        )
    vocabulary = _vocabulary(tokens)
    made, merges = makers[kind](metadata, vocabulary, types, source)
    _add_template(made, metadata, tokens)
    steps = json.loads(made.to_str())
    steps["added_tokens"] = _added_tokens(metadata, tokens, types)
    return StoredTokenizer(steps, list(vocabulary), merges)


def _added_tokens(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> list[dict[str, Any]]:
    """The tokens that are found in a text before any other, as tokenizer.json tells them."""
    # Runs of spaces are found where spaces have their sign, unless one is put before the text: that hides other tokens.
    is_llama = metadata.get("tokenizer.ggml.model") in SENTENCEPIECE
    is_signed = is_llama and not _flag(metadata, "add_space_prefix", True)
    is_phi = is_llama and metadata.get("general.architecture") == "phi3"
    return [
        {
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": is_phi and token not in PHI_KEEPS_SPACES,
            "normalized": type_ == USER_DEFINED and is_signed,
            "special": type_ == CONTROL,
        }
        for token, type_ in zip(tokens, types, strict=True)
        if type_ in (CONTROL, USER_DEFINED) and token
    ]


def _check_kinds(metadata: Mapping[str, Any], source: str) -> None:
    """Raises CheckpointError for a value of another kind than its key has."""
    for key, (is_right, what) in KINDS.items():
        value = metadata.get(f"tokenizer.ggml.{key}")
        if value is not None and not is_right(value):
            told = value[:8].tolist() if isinstance(value, np.ndarray) else value
            raise CheckpointError(f"{source}: tokenizer.ggml.{key} = {quoted(told)}: must be {what}")


def _vocabulary(tokens: Sequence[str]) -> dict[str, int]:
    """Ids by token; of two tokens with one text the first is found, and the other keeps a name of its own."""
    vocabulary: dict[str, int] = {}
    for index, token in enumerate(tokens):
        vocabulary[token if token not in vocabulary else f"{token}\0{index}"] = index
    return vocabulary


def _byte_level(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], types: Sequence[int], source: str
) -> tuple[Any, NDArray[np.int32]]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = _pre_tokenizer(metadata)
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{source}: tokenizer.ggml.pre = {quoted(name)}: its way to split a text is unknown; serve the "
            "model's checkpoint in Hugging Face format"
        )
    if not metadata.get("tokenizer.ggml.merges"):
        raise CheckpointError(f"{source}: tokenizer.ggml.merges is missing, without which no token is made of bytes")
    merges, way = _listed_merges(metadata, vocabulary, source), PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(models.BPE(ignore_merges=way.takes_words))
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in way.splits]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=_flag(metadata, "add_space_prefix", False), use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_only])
    if way.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, merges


def _pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    """The name of the way to split a text. The first files had none: then that of all models of the architecture."""
    silent = OF_ARCHITECTURE.get(str(metadata.get("general.architecture")), "default")
    return str(metadata.get("tokenizer.ggml.pre", silent))


def _listed_merges(metadata: Mapping[str, Any], vocabulary: dict[str, int], source: str) -> NDArray[np.int32]:
    """[M, 2] ids of the tokens that each merge of the file joins."""
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or ()]
    if not all(len(merge) == 2 and {*merge, "".join(merge)} <= vocabulary.keys() for merge in merges):
        raise CheckpointError(f"{source}: tokenizer.ggml.merges: a merge is not of two tokens that make a third")
    ids = [vocabulary[token] for merge in merges for token in merge]
    return np.array(ids, np.int32).reshape(-1, 2)


def _sentencepiece(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], types: Sequence[int], source: str
) -> tuple[Any, NDArray[np.int32]]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(types):
        raise CheckpointError(f"{source}: tokenizer.ggml.scores: must be a number for each of {len(types)} tokens")
    texts = list(vocabulary)
    is_made = [kind in (NORMAL, USER_DEFINED) for kind in types]
    merges = merges_of(texts, scores.tolist(), is_made, vocabulary, source)
    return _with_signed_spaces(metadata, texts), used_merges(texts, merges, is_made, vocabulary)


def _sentencepiece_with_merges(
    metadata: Mapping[str, Any], vocabulary: dict[str, int], types: Sequence[int], source: str
) -> tuple[Any, NDArray[np.int32]]:
    return _with_signed_spaces(metadata, list(vocabulary)), _listed_merges(metadata, vocabulary, source)


def _with_signed_spaces(metadata: Mapping[str, Any], texts: Sequence[str]) -> Any:
    """A tokenizer of tokens that hold `SPACE` for a space, and bytes for what they lack."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    has_space = _flag(metadata, "add_space_prefix", True)
    known = texts[unknown] if 0 <= unknown < len(texts) else None
    tokenizer = Tokenizer(models.BPE(unk_token=known, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces] if has_space else [spaces])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_space else steps)
    return tokenizer


def _add_template(tokenizer: Any, metadata: Mapping[str, Any], tokens: Sequence[str]) -> None:
    """Has the tokenizer put its begin and end tokens around a text, where the file says so."""
    from tokenizers.processors import TemplateProcessing

    is_byte_level = metadata["tokenizer.ggml.model"] not in SENTENCEPIECE
    begins = PRE_TOKENIZERS[_pre_tokenizer(metadata)].begins if is_byte_level else True
    around = {
        "bos": _flag(metadata, "add_bos_token", begins),
        "eos": _flag(metadata, "add_eos_token", False),
    }
    ids = {key: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, is_added in around.items() if is_added}
    special = {
        key: (tokens[index], index) for key, index in ids.items() if index is not None and 0 <= index < len(tokens)
    }
    if not special:
        return
    before, after = ([special[key][0]] if key in special else [] for key in ("bos", "eos"))
    pair = [f"{text}:1" for text in (*before, "$B", *after)]
    tokenizer.post_processor = TemplateProcessing(
        single=[*before, "$A", *after], pair=[*before, "$A", *after, *pair], special_tokens=list(special.values())
    )


def _flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    return bool(metadata.get(f"tokenizer.ggml.{name}", default))

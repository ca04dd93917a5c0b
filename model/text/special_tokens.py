"""The special and added tokens that the files beside a tokenizer.json name.

There are three: tokenizer_config.json, and, if that lists no `added_tokens_decoder`, the older special_tokens_map.json
and added_tokens.json. They are merged as transformers 5 merges them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files import read_json

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_CONFIG, _MAP, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpec:
    """An added token and its flags, as the `tokenizers` library has them."""

    content: str
    single_word: bool = False  # matches only a whole word
    lstrip: bool = False  # absorbs white space before it
    rstrip: bool = False  # absorbs white space after it
    normalized: bool = False  # is found in the normalized text
    special: bool = True  # `skip_special_tokens` leaves it out


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens of a checkpoint's files, those in tokenizer.json apart."""

    named: Mapping[str, TokenSpec] = field(default_factory=dict)  # by name: bos_token, eos_token, image_token ...
    extra: Sequence[TokenSpec] = ()  # special tokens without a name
    listed: Sequence[TokenSpec] = ()  # added tokens that are listed with an id, in the order of the ids

    @classmethod
    def read(
        cls, root: Path, config: Mapping[str, Any], named: Mapping[str, str], extra: Sequence[str] = ()
    ) -> SpecialTokens:
        """The tokens of the checkpoint in `root`, with tokenizer_config.json in `config`.

        `named` and `extra` are those of the tokenizer's class, for what no file says. Raises CheckpointError that names
        file, key and value of a token that is not one.
        """
        values, sources = _merged(root, config)
        listed = _listed(root, config, values)
        flags = {token.content: token for token in listed}
        found = {name: TokenSpec(content=text) for name, text in named.items() if name not in values}
        for name, value in values.items():
            token = _named(f"{sources[name]} ({root}): {name}", name, value)
            if token is not None:
                found[name] = flags.get(token.content, token) if name in NAMED_TOKENS else token
        extras, source = values.get("extra_special_tokens", list(extra)), sources.get("extra_special_tokens", "")
        where = f"{source} ({root}): {'extra' if 'extra_special_tokens' in config else 'additional'}_special_tokens"
        if isinstance(extras, Mapping):
            found |= {name: _token(f"{where}.{name}", value) for name, value in extras.items()}
            extras = []
        if not isinstance(extras, list | None):
            raise CheckpointError(f"{where}: must be a list of tokens or an object of named ones, not {_short(extras)}")
        tokens = [_token(f"{where}[{index}]", value) for index, value in enumerate(extras or [])]
        return cls(found, tokens, listed)

    @property
    def texts(self) -> dict[str, str]:
        """The named tokens' texts, which chat templates use."""
        return {name: token.content for name, token in self.named.items()}


def _merged(root: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of keys of tokens, and the file that each is from.

    special_tokens_map.json replaces what tokenizer_config.json says, except lists of further tokens, which it extends.
    """
    values, extra = dict(config), "extra_special_tokens"
    if "additional_special_tokens" in values and not values.get(extra):
        values[extra] = values.pop("additional_special_tokens")
    sources = dict.fromkeys(values, _CONFIG)
    if _lists_tokens(config):
        return values, sources
    for key, value in (read_json(root, _MAP) or {}).items():
        name = extra if key == "additional_special_tokens" else key
        if name == extra and name in values:
            if key == extra and isinstance(value, list) and isinstance(values[name] or [], list):
                values[name] = [*(values[name] or []), *(v for v in value if v not in (values[name] or []))]
            continue
        values[name], sources[name] = _as_added(value), _MAP
    return values, sources


def _lists_tokens(config: Mapping[str, Any]) -> bool:
    return config.get("added_tokens_decoder") is not None


def _listed(root: Path, config: Mapping[str, Any], values: Mapping[str, Any]) -> list[TokenSpec]:
    if not _lists_tokens(config):
        extras = values.get("extra_special_tokens")
        special = [values.get(name) for name in NAMED_TOKENS] + (extras if isinstance(extras, list) else [])
        names = {_text(value) for value in special}
        ids = read_json(root, _ADDED) or {}
        for text, token_id in ids.items():
            if not isinstance(token_id, int):
                raise CheckpointError(f"{_ADDED} ({root}): {text!r}: must be a token id, not {_short(token_id)}")
        texts = [text for text, _ in sorted(ids.items(), key=lambda item: item[1])]
        return [TokenSpec(content=text, normalized=text not in names, special=text in names) for text in texts]
    where = f"{_CONFIG} ({root}): added_tokens_decoder"
    tokens = config["added_tokens_decoder"]
    if not isinstance(tokens, Mapping):
        raise CheckpointError(f"{where}: must be an object of tokens by id, not {_short(tokens)}")
    for token_id in tokens:
        if not (token_id.isascii() and token_id.isdigit()):
            raise CheckpointError(f"{where}: {token_id[:64]!r} is not a token id")
    by_id = sorted(tokens.items(), key=lambda item: int(item[0]))
    return [_token(f"{where}.{token_id}", value, special=False) for token_id, value in by_id]


def _named(where: str, name: str, value: Any) -> TokenSpec | None:
    """The token under a key; None if the key is not one of a token, or has none."""
    if value is None or not name.endswith("_token"):
        return None
    if name in NAMED_TOKENS or isinstance(value, str) or (isinstance(value, Mapping) and "content" in value):
        return _token(where, value)
    return None  # a setting, as add_bos_token


def _token(where: str, value: Any, special: bool = True) -> TokenSpec:
    """A token that is written as its text, or as an object with its flags."""
    if isinstance(value, str):
        return TokenSpec(content=value, special=special, normalized=not special)
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise CheckpointError(f"{where}: must be a token's text, or an object with its content, not {_short(value)}")
    flags = {name: value[name] for name in _FLAGS if value.get(name) is not None}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise CheckpointError(f"{where}.{name}: must be true or false, not {_short(flag)}")
    flags.setdefault("special", special)
    flags.setdefault("normalized", not flags["special"])
    return TokenSpec(content=value["content"], **flags)


def _as_added(value: Any) -> Any:
    """A token of special_tokens_map.json: special, whatever its flags say."""
    return {**value, "special": True} if isinstance(value, Mapping) and "content" in value else value


def _text(value: Any) -> str:
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else ""


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 64 else shown[:61] + "..."

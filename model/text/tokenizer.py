"""Text to token ids and back, from a checkpoint's tokenizer.json, with the same ids as transformers' AutoTokenizer.

Does not import transformers or torch. Every method may be called from several threads at once: a call changes no state
of the Rust tokenizer, and it releases the GIL while it works.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files import read_bytes, read_json, refuse_code

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the caller has its own threads
from tokenizers import AddedToken, Encoding, decoders, pre_tokenizers  # noqa: E402
from tokenizers import Tokenizer as RustTokenizer  # noqa: E402

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
IDS_AT_ONCE = 16_384  # making a list of ids holds the GIL: 46 ms for 240k ids at once, 2 ms for pieces of this size


class Tokenizer:
    """A checkpoint's tokenizer.

    `bos_token_id` and `eos_token_id` are from tokenizer_config.json; `special_ids` are the ids that
    `skip_special_tokens` leaves out. With `is_byte_level`, tokens spell bytes in a substitute alphabet; without, they
    spell text with "▁" for a space, and bytes as `<0xNN>`.
    """

    def __init__(self, rust: RustTokenizer, config: dict[str, Any]) -> None:
        self._rust = rust
        self._plain: RustTokenizer | None = None  # made when first needed
        self._plain_lock = threading.Lock()
        self.config = config  # tokenizer_config.json
        self.decoder_config: dict[str, Any] = (
            json.loads(rust.decoder.__getstate__()) if rust.decoder else {"type": "None"}
        )
        self.is_byte_level = self.decoder_config["type"] == "ByteLevel"
        added = rust.get_added_tokens_decoder()
        self._added_ids = list(added)
        self.special_tokens = {str(token.content): index for index, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        self.bos_token = _token_text(config.get("bos_token"))
        self.eos_token = _token_text(config.get("eos_token"))
        self.bos_token_id = None if self.bos_token is None else rust.token_to_id(self.bos_token)
        self.eos_token_id = None if self.eos_token is None else rust.token_to_id(self.eos_token)

    @classmethod
    def read(cls, root: Path) -> Tokenizer:
        """The tokenizer of the checkpoint in `root`. Raises CheckpointError if it is missing or unusable."""
        raw = read_bytes(root, "tokenizer.json")  # bytes, as a str would be encoded again for Rust
        if raw is None:
            raise CheckpointError(
                f"{root}: no tokenizer.json; save one with transformers: "
                "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
            )
        config = read_json(root, "tokenizer_config.json") or {}
        refuse_code(root, "tokenizer_config.json", config)
        try:
            rust = RustTokenizer.from_buffer(raw)
            _configure(rust, config, has_byte_level=b'"ByteLevel"' in raw)
        except Exception as error:  # the bindings raise Exception itself
            raise CheckpointError(f"tokenizer.json ({root}): cannot be used: {str(error)[:200]}") from None
        return cls(rust, config)

    def __len__(self) -> int:
        """One more than the largest id, added tokens included. An embedding may have more rows or, by mistake, less."""
        return len(self.tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text in which special tokens may be spelled, as in a completion prompt."""
        return _ids(self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0])

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """The ids of two texts joined by the tokenizer, and the type of each id.

        The type is 0 for the first text and 1 for the second, if the tokenizer distinguishes them.
        """
        encoding = self._rust.encode_batch([(first, second)], add_special_tokens=True)[0]
        pieces = _pieces(encoding)
        return _ids_of(pieces), [type_id for piece in pieces for type_id in piece.type_ids]

    def encode_chat(self, text: str, mark: str | None = None) -> list[int]:
        """The ids of a rendered chat prompt, in which the template spells special tokens.

        `mark`, if given, is inside every string that looks like a special token but is from a message (see
        `chat_template.py`). Marks are removed, and the strings around them are encoded as ordinary text.
        """
        if mark is None:
            return self.encode(text, add_special_tokens=False)
        ids: list[int] = []
        position = 0
        for begin, end, token_id in self._special_spans(text):
            ids += self._encode_plain(text[position:begin].replace(mark, ""), is_start=position == 0)
            ids.append(token_id)
            position = end
        return ids + self._encode_plain(text[position:].replace(mark, ""), is_start=position == 0)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all ids at once. Invalid bytes become U+FFFD; unknown ids are left out."""
        return self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's entry, in the tokenizer's own alphabet; None for an unknown id."""
        return self._rust.id_to_token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; b"" for an unknown id."""
        token = self._rust.id_to_token(token_id)
        if token is None:
            return b""
        return byte_level_bytes(token) if self.is_byte_level else sentencepiece_bytes(token)

    @cached_property
    def tokens(self) -> list[str | None]:
        """`token` of every id, in a tenth of the time of separate calls."""
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        entries: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            entries[token_id] = token
        for token_id in self._added_ids:  # NOTE: the vocabulary has them before normalisation
            entries[token_id] = self.token(token_id)
        return entries

    def to_json(self) -> str:
        """The tokenizer.json of this tokenizer, with the changes from tokenizer_config.json."""
        return self._rust.to_str()

    def _special_spans(self, text: str) -> list[tuple[int, int, int]]:
        """[begin, end) and id of each special token spelled in the text, including whitespace that it absorbs."""
        spans = []
        for piece in _pieces(self._rust.encode_batch([text], add_special_tokens=False)[0]):
            for token_id, (begin, end) in zip(piece.ids, piece.offsets, strict=True):
                if token_id in self.special_ids and self.special_tokens.get(text[begin:end].strip()) == token_id:
                    spans.append((begin, end, token_id))
        return spans

    def _encode_plain(self, text: str, is_start: bool) -> list[int]:
        """The ids of a piece of a prompt, all of it ordinary text."""
        if not text:
            return []
        plain = self._without_special_tokens()
        if is_start and self._prepends_only_at_start and not text.startswith((" ", "▁")):
            text = " " + text
        return _ids(plain.encode_batch_fast([text], add_special_tokens=False)[0])

    def _without_special_tokens(self) -> RustTokenizer:
        """A copy that encodes special tokens as ordinary text; a tokenizer in use cannot change the setting."""
        with self._plain_lock:
            if self._plain is None:
                plain = RustTokenizer.from_str(self._rust.to_str())
                plain.encode_special_tokens = True
                if self._prepends_only_at_start:
                    plain.pre_tokenizer.prepend_scheme = "never"
                self._plain = plain
            return self._plain

    @property
    def _prepends_only_at_start(self) -> bool:
        pre_tokenizer = self._rust.pre_tokenizer
        return isinstance(pre_tokenizer, pre_tokenizers.Metaspace) and pre_tokenizer.prepend_scheme == "first"


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token with a character outside the substitute alphabet is itself as UTF-8."""
    try:
        return token.translate(LATIN_1_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """The bytes of a token that spells text with "▁" for a space, or one byte as `<0xNN>`."""
    if is_byte_token(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


def is_byte_token(token: str) -> bool:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return False
    return all(character in "0123456789abcdefABCDEF" for character in token[3:5])


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters are their own bytes; the others are from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


# Other characters below U+0100 map to one outside Latin-1, so that encoding them fails.
LATIN_1_OF_CHARACTER = dict.fromkeys(range(256), "\u0100") | {
    ord(character): chr(byte) for character, byte in _byte_alphabet().items()
}


def _configure(rust: RustTokenizer, config: dict[str, Any], *, has_byte_level: bool) -> None:
    """Applies tokenizer_config.json to the tokenizer, as transformers 5 does.

    NOTE: `add_bos_token` and `add_eos_token` have no effect with a tokenizer.json, whose post-processor decides.
    """
    rust.no_truncation()
    rust.no_padding()
    is_llama = str(config.get("tokenizer_class")).removesuffix("Fast") == "LlamaTokenizer"
    if is_llama and not has_byte_level:
        _configure_llama(rust, config)
    decoder = sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    missing = [token for _, token in decoder if rust.token_to_id(str(token["content"])) is None]
    tokens = [_added(token, is_special=bool(token.get("special"))) for token in missing]
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    named = [*(config.get(name) for name in NAMED_TOKENS), *(extra.values() if isinstance(extra, dict) else extra)]
    tokens += [_added(token, is_special=True) for token in named if token]
    if tokens:
        rust.add_tokens(tokens)  # in one call, as each call goes through all added tokens


def _configure_llama(rust: RustTokenizer, config: dict[str, Any]) -> None:
    """Llama 2's tokenizer: prepends "▁" to the text; if legacy, to each piece between special tokens."""
    has_prefix = config.get("add_prefix_space") is not False
    scheme = ("always" if config.get("legacy") else "first") if has_prefix else "never"
    rust.normalizer = None
    rust.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    rust.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)


def _added(token: Any, is_special: bool) -> AddedToken:
    flags = token if isinstance(token, dict) else {}
    names = ("single_word", "lstrip", "rstrip", "normalized")
    return AddedToken(_token_text(token), special=is_special, **{name: bool(flags.get(name, False)) for name in names})


def _token_text(token: Any) -> str | None:
    """A token of tokenizer_config.json, which is a string or an object with its flags."""
    text = token["content"] if isinstance(token, dict) else token
    return None if text is None else str(text)


def _ids(encoding: Encoding) -> list[int]:
    return _ids_of(_pieces(encoding))


def _ids_of(pieces: list[Encoding]) -> list[int]:
    return [token_id for piece in pieces for token_id in piece.ids]


def _pieces(encoding: Encoding) -> list[Encoding]:
    """The encoding in pieces of IDS_AT_ONCE ids, so that making a list blocks other threads only briefly."""
    encoding.truncate(IDS_AT_ONCE)
    return [encoding, *encoding.overflowing]

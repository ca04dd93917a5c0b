"""Text to token ids and back, from a checkpoint's tokenizer.json, with the same ids as transformers' AutoTokenizer.

Does not import transformers or torch. Every method may be called from several threads at once: a call changes no state
of the Rust tokenizer, and it releases the GIL while it works.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckpointError
from ..files import read_bytes, read_json, refuse_code
from ..stored_tokenizer import StoredTokenizer
from .special_tokens import SpecialTokens, TokenSpec
from .token_bytes import byte_level_bytes, sentencepiece_bytes
from .tokenizer_class import TokenizerClass, reads_as_it_is, tokenizer_class
from .tokenizer_conversion import convert

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the caller has its own threads
from tokenizers import AddedToken, Encoding, models, pre_tokenizers  # noqa: E402
from tokenizers import Tokenizer as RustTokenizer  # noqa: E402

from .tokenizer_growth import check_growth  # noqa: E402
from .tokenizer_steps import apply_class, lower_texts  # noqa: E402

# clean_up_tokenization_spaces: what a tokenizer of words puts spaces around, as transformers writes it, in its order
SPACED_MARKS = {
    " .": ".",
    " ?": "?",
    " !": "!",
    " ,": ",",
    " ' ": "'",
    " n't": "n't",
    " 'm": "'m",
    " 's": "'s",
    " 've": "'ve",
    " 're": "'re",
}
ALWAYS_CLEANS = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
SPARSEST = 8  # most ids a token of a vocabulary, which has few gaps
Side = Literal["left", "right"]
_Typed = tuple[list[int], list[int]]  # ids and their types
IDS_AT_ONCE = 16_384  # making a list of ids holds the GIL: 46 ms for 240k ids at once, 2 ms for pieces of this size


class Tokenizer:
    """A checkpoint's tokenizer.

    `named_tokens` are the texts of `bos_token`, `eos_token` and others, from the files beside tokenizer.json;
    `special_ids` are the ids that `skip_special_tokens` leaves out. With `is_byte_level`, tokens spell bytes in a
    substitute alphabet; without, they spell text with "▁" for a space, and bytes as `<0xNN>`.
    """

    def __init__(
        self, rust: RustTokenizer, config: dict[str, Any], named_tokens: Mapping[str, str], special: Collection[str]
    ) -> None:
        """`special` are the texts of the special tokens; some may have lost the flag while files were merged."""
        self._rust = rust
        self._plain: RustTokenizer | None = None  # made when first needed
        self._plain_lock = threading.Lock()
        self.config = config  # tokenizer_config.json
        self.decoder_config: dict[str, Any] = (
            json.loads(rust.decoder.__getstate__()) if rust.decoder else {"type": "None"}
        )
        self.is_byte_level = self.decoder_config["type"] == "ByteLevel"
        last_step = (self.decoder_config.get("decoders") or [{}])[-1]
        self.strips_first_space = last_step.get("type") == "Strip"  # of a decoded text
        is_bpe = isinstance(rust.model, models.BPE) and config.get(ALWAYS_CLEANS) is not True
        self.cleans_up = config.get("clean_up_tokenization_spaces") is True and not is_bpe
        added = rust.get_added_tokens_decoder()
        self._added_ids = list(added)
        self.special_tokens = {token.content: index for index, token in added.items() if token.content in special}
        self.special_ids = frozenset(self.special_tokens.values())
        self.sources: tuple[str, ...] = ("tokenizer.json",)  # files that it was read from
        self._vocabulary: Sequence[str] | None = None  # by id, where it need not be asked for
        self.gives_types = True  # whether the model gets the types of a pair's tokens
        self.truncation_side: Side = "left" if config.get("truncation_side") == "left" else "right"
        self.named_tokens = dict(named_tokens)  # texts by name; chat templates get them as variables
        self.bos_token = named_tokens.get("bos_token")
        self.eos_token = named_tokens.get("eos_token")
        self.bos_token_id = None if self.bos_token is None else rust.token_to_id(self.bos_token)
        self.eos_token_id = None if self.eos_token is None else rust.token_to_id(self.eos_token)

    @classmethod
    def read(cls, root: Path, lower_case: bool = False) -> Tokenizer:
        """The tokenizer of the checkpoint in `root`. Raises CheckpointError if it is missing or unusable.

        `lower_case`: texts are written small before any other step, as the files of an embedding model may demand.
        """
        raw = read_bytes(root, "tokenizer.json")  # bytes, as a str would be encoded again for Rust
        config = read_json(root, "tokenizer_config.json") or {}
        is_known = reads_as_it_is(root)  # so a class of the checkpoint's own is not needed
        refuse_code(
            root, "tokenizer_config.json", {k: v for k, v in config.items() if not (is_known and k == "auto_map")}
        )
        named: Mapping[str, str] = {}
        sources: tuple[str, ...] = ()
        stored = StoredTokenizer.read(root) if raw is None else None
        if raw is None and stored is None:
            converted = convert(root, config)
            raw, named, sources = converted.tokenizer_json, converted.named_tokens, converted.sources
        others = [name for name in config.get("fast_tokenizer_files") or () if name != "tokenizer.json"]
        if others:
            raise CheckpointError(
                f"tokenizer_config.json ({root}): fast_tokenizer_files lists {str(others[-1])[:64]}, and only "
                "tokenizer.json is read; rename the newest of them, and remove the key"
            )
        try:
            rust = stored.make() if stored is not None else RustTokenizer.from_buffer(raw or b"")
        except BaseException as error:  # the bindings raise Exception itself, and a panic is not even one
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise CheckpointError(f"tokenizer.json ({root}): cannot be used: {str(error)[:200]}") from None
        check_growth(rust, root)
        kind = tokenizer_class(root, config, has_byte_level=_has_byte_level(raw, stored))
        special = SpecialTokens.read(root, config, {**kind.named, **named}, kind.extra)
        texts = _special_texts(rust)
        _configure(rust, config, kind, special, root)
        if lower_case:
            lower_texts(rust)
        made = cls(rust, config, special.texts, texts | _special_texts(rust))
        made.sources = sources or ("tokenizer.json",)
        made._vocabulary = None if stored is None else stored.tokens
        inputs = config.get("model_input_names")
        made.gives_types = "token_type_ids" in inputs if isinstance(inputs, list) else kind.has_types
        return made

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

    def encode_cut(self, text: str, most: int, side: Side | None = None, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, at most `most` of them: the text is cut on one side, by default the tokenizer's.

        Special tokens are kept. Raises ValueError if `most` leaves no room beside them.
        """
        ids = self.encode(text, add_special_tokens)
        if len(ids) <= most:
            return ids
        before, after = self._around[0] if add_special_tokens else ([], [])
        text_ids = ids[len(before) : len(ids) - len(after)]
        return [*before, *self._cut(text_ids, _room(most, len(before) + len(after)), side), *after]

    def encode_pair_cut(
        self, first: str, second: str, most: int, side: Side | None = None
    ) -> tuple[list[int], list[int]]:
        """As `encode_pair`, at most `most` ids: the longer text is cut first, as transformers does it."""
        ids, type_ids = self.encode_pair(first, second)
        if len(ids) <= most:
            return ids, type_ids
        before, between, after, one_type, two_type = self._around[1]
        room = _room(most, sum(len(special) for special, _ in (before, between, after)))
        texts = [self.encode(text, add_special_tokens=False) for text in (first, second)]
        short = min(*map(len, texts), room)
        kept = [short, max(short, room - short)]
        if sum(kept) > room:
            kept = [room // 2, room - room // 2]
        if len(texts[0]) > len(texts[1]):
            kept.reverse()
        one, two = (self._cut(text, count, side) for text, count in zip(texts, kept, strict=True))
        inside = ((one, [one_type] * len(one)), (two, [two_type] * len(two)))
        parts = (before, inside[0], between, inside[1], after)
        return [i for part, _ in parts for i in part], [kind for _, types in parts for kind in types]

    def _cut(self, ids: list[int], most: int, side: Side | None) -> list[int]:
        if (side or self.truncation_side) == "left":
            return ids[max(0, len(ids) - most) :]
        return ids[:most]

    @cached_property
    def _around(self) -> tuple[tuple[list[int], list[int]], tuple[_Typed, _Typed, _Typed, int, int]]:
        """The special tokens before and after a text; those around two texts, with types, and the texts' own types."""
        single = self._rust.encode_batch(["a"], add_special_tokens=True)[0]
        inside = [place for place, sequence in enumerate(single.sequence_ids) if sequence is not None]
        pair = self._rust.encode_batch([("a", "a")], add_special_tokens=True)[0]
        one, two = ([p for p, sequence in enumerate(pair.sequence_ids) if sequence == text] for text in (0, 1))
        if not inside or not one or not two:
            raise ValueError("the tokenizer gives no token for the letter a, so its texts cannot be cut")
        spans = (slice(0, one[0]), slice(one[-1] + 1, two[0]), slice(two[-1] + 1, None))
        before, between, after = ((pair.ids[span], pair.type_ids[span]) for span in spans)
        ends = (single.ids[: inside[0]], single.ids[inside[-1] + 1 :])
        return ends, (before, between, after, pair.type_ids[one[0]], pair.type_ids[two[0]])

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

    def encode_plain(self, text: str) -> list[int]:
        """The ids of a text in which special tokens, if it spells any, are ordinary text."""
        if any(token in text for token in self.special_tokens):
            return self._encode_plain(text, is_start=True)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all ids at once. Invalid bytes become U+FFFD; unknown ids are left out."""
        text = self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens)
        if not self.cleans_up:
            return text
        for spaced, cleaned in SPACED_MARKS.items():
            text = text.replace(spaced, cleaned)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's entry, in the tokenizer's own alphabet; None for an unknown id."""
        return self._rust.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary entry, spelled in the tokenizer's own alphabet; None if there is none."""
        found: int | None = self._rust.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; b"" for an unknown id."""
        token = self._rust.id_to_token(token_id)
        if token is None:
            return b""
        return byte_level_bytes(token) if self.is_byte_level else sentencepiece_bytes(token)

    @cached_property
    def tokens(self) -> list[str | None]:
        """`token` of every id, in a tenth of the time of separate calls."""
        entries = self._entries()
        for token_id in self._added_ids:  # NOTE: the vocabulary has them before normalisation
            entries[token_id] = self.token(token_id)
        return entries

    def _entries(self) -> list[str | None]:
        if self._vocabulary is not None:
            return [*self._vocabulary, *[None] * (max(self._added_ids, default=-1) + 1 - len(self._vocabulary))]
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        if size > SPARSEST * len(vocabulary) + IDS_AT_ONCE:
            raise CheckpointError(f"tokenizer.json: model: vocab: an id is {size - 1}, of {len(vocabulary)} tokens")
        entries: list[str | None] = [None] * size
        for token, token_id in vocabulary.items():
            entries[token_id] = token
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


def _room(most: int, num_special: int) -> int:
    if most <= num_special:
        raise ValueError(f"{most} tokens: must be above {num_special}, the number of special tokens around a text")
    return most - num_special


def _configure(
    rust: RustTokenizer, config: dict[str, Any], kind: TokenizerClass, special: SpecialTokens, root: Path
) -> None:
    """Applies the files beside tokenizer.json to the tokenizer, as transformers 5 does.

    NOTE: `add_bos_token` and `add_eos_token` have no effect with a tokenizer.json, whose post-processor decides.
    """
    rust.no_truncation()
    rust.no_padding()
    apply_class(rust, kind, config, root)
    tokens = _missing_tokens(rust, special)
    if tokens:
        rust.add_tokens(tokens)  # in one call, as each call goes through all added tokens
    if kind.name == "Qwen2Tokenizer":
        again = dict.fromkeys(token.content for token in (*special.named.values(), *special.extra))
        rust.add_tokens([AddedToken(content, special=True) for content in again])


def _has_byte_level(raw: bytes | None, stored: StoredTokenizer | None) -> bool:
    return b'"ByteLevel"' in (raw or b"") or (stored is not None and '"ByteLevel"' in json.dumps(stored.steps))


def _special_texts(rust: RustTokenizer) -> set[str]:
    return {token.content for token in rust.get_added_tokens_decoder().values() if token.special}


def _missing_tokens(rust: RustTokenizer, special: SpecialTokens) -> list[AddedToken]:
    """The tokens of the other files that the tokenizer does not have, or has with other flags."""
    present = {TokenSpec(**token.__getstate__()) for token in rust.get_added_tokens_decoder().values()}
    named = {token.content for token in special.named.values()}
    tokens = [token for token in special.listed if token not in present]
    contents = {token.content for token in (*present, *tokens)}
    for token in (*special.named.values(), *special.extra):
        if token.content not in contents:
            contents.add(token.content)
            tokens.append(token)
    return [AddedToken(**asdict(token) | {"special": token.special or token.content in named}) for token in tokens]


def _ids(encoding: Encoding) -> list[int]:
    return _ids_of(_pieces(encoding))


def _ids_of(pieces: list[Encoding]) -> list[int]:
    return [token_id for piece in pieces for token_id in piece.ids]


def _pieces(encoding: Encoding) -> list[Encoding]:
    """The encoding in pieces of IDS_AT_ONCE ids, so that making a list blocks other threads only briefly."""
    encoding.truncate(IDS_AT_ONCE)
    return [encoding, *encoding.overflowing]

"""Compiles grammars against a vocabulary with llguidance: from a schema, regex, choices or grammar to token masks.

It holds the compiler's limits and workarounds. Import it only on first use, as it loads llguidance.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from ..schema.exact_numbers import UnsupportedBesideNumber
from ..schema.schema_closing import closed
from ..schema.schema_keywords import may_repeat_keys, with_safe_patterns, without_idle_keywords
from ..schema.schema_rules import schema_rules
from .thoughts import Section, after_thoughts, thought_mask
from .vocabulary import Vocabulary

# Limits of a matcher: about 10 ms of CPU for a step. Typical schemas take a hundredth of that.
LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=20_000,
    step_max_items=10_000,
    max_lexer_states=50_000,  # 1 to 2 kB each, shared by all answers with one grammar
    verbose_errors=False,
)
MAX_MESSAGE_CHARS = 200
WHITESPACE = r"(\x20|\r?\n[\x20\x09]{0,32})"  # between JSON's tokens: one space, or a new line with indentation
DIALECTS = (  # values of `$schema`, with or without a # at the end; the newest applies without one
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-04/schema",
)
OTHER_DIALECTS = ("http://json-schema.org/draft-03/schema", "https://json-schema.org/draft/next/schema")  # as well
ESCAPES = 'nrbtf\\"'  # after a backslash in a string, where `\\u` could spell a key that an object has already
SOURCE_OR_STATE = re.compile(r"<state>|<non-verbose|\n\s*\d+ \|")
GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class GrammarError(ValueError):
    """A grammar that cannot be used. The message is for the client."""


def grammar_text(kind: str, source: str | Sequence[str], is_compact: bool = False) -> str:
    """A grammar in llguidance's own form. `kind` and `source` are those of `StructuredOutputs`.

    The source of json_object is ignored. Raises `GrammarError` for a source that cannot be parsed.
    """
    if kind == "json_object":
        kind, source = "json", '{"type":"object"}'
    if kind == "choice":
        quoted = " | ".join(json.dumps(text, ensure_ascii=False) for text in source)
        return LLMatcher.grammar_from_lark(f"start: {quoted}")
    assert isinstance(source, str), f"a {kind} is one text"
    if kind == "json":
        return _schema_text(source, is_compact)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(_unanchored(source))
    return LLMatcher.grammar_from_lark(_as_lark(source))


def _schema_text(source: str, is_compact: bool) -> str:
    """The grammar of a JSON schema. Overrides the schema's own `x-guidance`, which could disable the checks."""
    spacing: dict[str, object] = {"whitespace_pattern": WHITESPACE, "item_separator": ",", "key_separator": ":"}
    if is_compact:
        spacing = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    try:
        schema = closed(with_safe_patterns(without_idle_keywords(json.loads(source))))
        if isinstance(schema, dict):
            _check_dialect(schema.get("$schema"))
            schema.pop("x-guidance", None)
        if may_repeat_keys(schema):
            spacing["json_allowed_escapes"] = ESCAPES
        if (rules := schema_rules(schema, spacing)) is not None:
            return LLMatcher.grammar_from_lark(rules)
        overrides = spacing | {"lenient": False, "coerce_one_of": False}
        text = json.dumps({} if schema is True else schema, ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(text, overrides=overrides)  # type: ignore[arg-type]
    except UnsupportedBesideNumber as error:
        problem = f"has a number of more than 53 bits, which is not supported together with {error}"
        raise GrammarError(problem) from None
    except RecursionError:
        raise GrammarError("refers to itself too deeply") from None
    except GrammarError:
        raise
    except ValueError as error:
        raise GrammarError(_client_message(str(error))) from None


def _check_dialect(name: object) -> None:
    if isinstance(name, str) and name and name.removesuffix("#") not in DIALECTS + OTHER_DIALECTS:
        known = ", ".join(DIALECTS)
        raise GrammarError(f"has $schema = {name[:100]!r}, which is not known: leave it out, or use one of {known}")


def _unanchored(regex: str) -> str:
    """Removes anchors at both ends: the whole answer must match anyway, and llguidance does not support them."""
    regex = regex.removeprefix("^")
    backslashes = len(regex[:-1]) - len(regex[:-1].rstrip("\\"))
    return regex[:-1] if regex.endswith("$") and backslashes % 2 == 0 else regex


def _as_lark(grammar: str) -> str:
    if not GBNF.search(grammar):
        return grammar
    try:
        return str(any_to_lark(grammar))
    except Exception as error:  # its parser raises Exception itself
        raise GrammarError(f"is no GBNF: {_client_message(str(error))}") from None


def _client_message(error: str) -> str:
    """A compiler's message for a client: one line, without the parser's state and the quoted source."""
    line = " ".join(SOURCE_OR_STATE.split(error)[0].split()).replace("Error:", "error:")
    return line if len(line) <= MAX_MESSAGE_CHARS else line[: MAX_MESSAGE_CHARS - 3] + "..."


class GrammarCompiler:
    """Makes matchers for one vocabulary. Several threads may call its methods at once; they release the GIL.

    Masks have a bit for each of the V logits, in words of 32: bit i % 32 of word i // 32. If the model has no EOS, one
    more bit after the last stands for the end.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = vocabulary.vocab_size
        self.eos_ids = [i for i in vocabulary.eos_ids if i < vocabulary.vocab_size] or [vocabulary.vocab_size]
        num_bits = max(vocabulary.vocab_size, max(self.eos_ids) + 1)
        self.num_words = -(-num_bits // 32)
        self.is_end = np.zeros(32 * self.num_words, np.bool_)
        self.is_end[self.eos_ids] = True
        words = np.packbits(self.is_end.reshape(-1, 32), axis=1, bitorder="little").view("<i4")[:, 0]
        self.ends = [(int(word), words[word]) for word in np.flatnonzero(words)]  # words with ends, and their bits
        self._vocabulary = vocabulary
        self._thought_masks: dict[str, NDArray[np.int32]] = {}  # by end marker
        self._tokenizer = _make_tokenizer(vocabulary, num_bits, self.eos_ids)

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the start of the grammar. Raises `GrammarError` if it does not compile."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise GrammarError(_client_message(matcher.get_error()))
        return matcher

    def after_thoughts(self, grammar: str, section: Section) -> str:
        """The grammar behind a section of thoughts."""
        return after_thoughts(grammar, section, self._vocabulary)

    def thought_mask(self, section: Section) -> NDArray[np.int32]:
        """The tokens that may come where the scan of an answer's thoughts `is_free`. Not to be written to.

        It takes no matcher: a mask of any text costs milliseconds, as it walks the whole vocabulary.
        """
        mask = self._thought_masks.get(section.end)
        if mask is None:
            mask = self._thought_masks[section.end] = thought_mask(section, self._vocabulary, self.num_words)
        return mask

    def check_start(self, matcher: LLMatcher) -> None:
        """Raises `GrammarError` if a matcher at its start allows no text. Leaves the matcher usable."""
        if not self.allowed(matcher):
            problem = _client_message(matcher.get_error())
            raise GrammarError("matches no text" + (f": {problem}" if matcher.is_error() else ""))

    def mask(self, matcher: LLMatcher) -> NDArray[np.int32]:
        """The tokens that may come next as a mask, [W] i32; all zero if the matcher has failed."""
        mask = np.zeros(self.num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return np.zeros_like(mask) if matcher.is_error() else mask

    def allowed(self, matcher: LLMatcher) -> list[int]:
        """The ids of the tokens that may come next, without EOS."""
        mask = self.mask(matcher)
        ids = np.flatnonzero(unpack(mask[None], self.vocab_size)[0])
        return [token_id for token_id in ids.tolist() if token_id not in self.eos_ids]


def unpack(masks: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """The masks [n, W] as booleans, [n, V]."""
    little = masks.astype("<i4", copy=False).view(np.uint8)
    return np.unpackbits(little, axis=1, count=vocab_size, bitorder="little").view(np.bool_)


def _make_tokenizer(vocabulary: Vocabulary, num_bits: int, eos_ids: list[int]) -> LLTokenizer:
    """A tokenizer for the text that a grammar forces.

    It is the model's own if llguidance reads tokenizer.json correctly, else one that takes the longest tokens first.
    """
    fits = len(vocabulary.tokens) <= vocabulary.vocab_size
    if vocabulary.tokenizer_json is not None and fits:
        try:
            made = LLTokenizer(vocabulary.tokenizer_json, n_vocab=num_bits, eos_token=eos_ids)
        except ValueError:
            pass  # a kind of tokenizer that llguidance does not support
        else:
            if _spells(made, vocabulary):
                return made
    return LLTokenizer(TokenizerWrapper(_Greedy(vocabulary, num_bits, eos_ids)), n_vocab=num_bits, eos_token=eos_ids)


def _spells(made: LLTokenizer, vocabulary: Vocabulary) -> bool:
    """Whether `made` has the same bytes for every token. It marks special tokens by byte 0xFF, which no text has."""
    return all(
        token_id in vocabulary.special_ids or b"\xff" in token or made.decode_bytes([token_id]) == token
        for token_id, token in enumerate(vocabulary.tokens)
    )


class _Greedy:
    """Tokenizes text from the left, each time by the longest token."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, num_bits: int, eos_ids: list[int]) -> None:
        self.eos_token_id = eos_ids[0]
        known = list(vocabulary.tokens[:num_bits])
        self.tokens = known + [b""] * (num_bits - len(known))
        self.special_token_ids = [i for i in sorted(vocabulary.special_ids | set(eos_ids)) if i < num_bits]
        if not self.tokens[self.eos_token_id]:
            self.tokens[self.eos_token_id] = b"<|end|>"
        ordinary = [i for i in range(num_bits) if i not in self.special_token_ids]
        self._ids = {self.tokens[i]: i for i in reversed(ordinary) if self.tokens[i]}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            for end in range(min(at + self._longest, len(text)), at, -1):
                if (token_id := self._ids.get(text[at:end])) is not None:
                    ids.append(token_id)
                    at = end
                    break
            else:
                break  # no token spells this byte: the rest is not forced
        return ids

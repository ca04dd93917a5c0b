"""Sampling parameters of a request, checked.

`kernels/layout/sampling_fields.py` says what each field means, and its range. Names and meanings are vLLM's.
Checks that need the model, such as the vocabulary size, are in `request_limits.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from ..kernels.layout import sampling_fields
from ..kernels.layout.sampling_fields import FIELDS, RANGED, Kind
from .errors import ErrorText, Refused, error_text, field_text
from .structured_outputs import StructuredOutputs

MAX_N = sampling_fields.MAX_N
MAX_LOGPROBS = sampling_fields.MAX_LOGPROBS
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 16_384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 64

# field -> (least, most); the OpenAPI schema documents the same ranges
COUNTS: Mapping[str, tuple[int, int]] = {
    field.name: (int(field.least), int(field.most)) for field in RANGED if field.kind is Kind.WHOLE
}
NUMBERS: Mapping[str, tuple[float, float]] = {
    field.name: (field.least, field.most) for field in RANGED if field.kind is Kind.NUMBER
}
MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    Raises `Refused` on construction for an invalid field; the error names the field, its value and the range.

    The sampler applies, in this order: penalties, logit_bias, min_tokens, allowed_token_ids, bad_words,
    structured_outputs, temperature, then the cuts in the order of `sampling_fields.CUTS`.
    """

    most_logprobs: ClassVar[int] = MAX_LOGPROBS

    n: int = 1
    max_tokens: int | None = 16  # None: up to the end of the context; 0: only compute the prompt
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy and ignores the cuts
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: drawn per request
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> number added to its logit, -100 to 100
    logprobs: int | None = None  # report the chosen token's log-probability and the k likeliest; None: off
    prompt_logprobs: int | None = None  # the same for each prompt token except the first; None: off
    allowed_token_ids: tuple[int, ...] | None = None  # choose only among these; None: all
    bad_words: tuple[str, ...] = ()  # words the answer must not contain, with or without a space before
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # as token sequences; tokenize adds those of bad_words
    truncate_prompt_tokens: int | None = None  # prompt tokens to keep; -1: as many as leave room for the answer
    truncation_side: Literal["left", "right"] = "left"  # the side that is cut off
    extra_args: Mapping[str, Any] = field(default_factory=dict)  # for a `LogitsProcessor`; the engine ignores it
    return_progress: bool = False  # report prefill progress while the prompt is computed
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # no effect, as with every fast tokenizer of transformers
    structured_outputs: StructuredOutputs | None = None  # the format that the answer must have
    thinking_budget: ThinkingBudget | None = None  # limit on thinking tokens; then the end marker is forced

    def __post_init__(self) -> None:
        for name, (least, most) in COUNTS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                _whole(name, value, least, self.most_logprobs if name.endswith("logprobs") else most)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            right = ErrorText(("at most ", "max_tokens", f", which is {self.max_tokens}"))
            _refuse("min_tokens", self.min_tokens, right)
        self._check_numbers()
        self._check_stops()
        self._check_bias()
        self._check_limits()
        form = self.structured_outputs
        if self.thinking_budget is not None and form is not None and form.after is None:
            problem = "must not be set with structured_outputs that have no thoughts before; leave one out"
            raise Refused(field_text("thinking_budget", problem))
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens != -1:
            _whole("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31 - 1)
        if self.truncation_side not in ("left", "right"):
            _refuse("truncation_side", self.truncation_side, '"left" or "right"')

    def _check_numbers(self) -> None:
        for name, (least, most) in NUMBERS.items():
            _number(name, getattr(self, name), least, most)
        for name, (least, most) in _ABOVE.items():
            if getattr(self, name) == least:
                _refuse(name, getattr(self, name), f"above {least:g} and at most {most:g}")

    def _check_stops(self) -> None:
        if len(self.stop) > MAX_STOPS:
            _refuse("stop", f"{len(self.stop)} strings", f"at most {MAX_STOPS} strings")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
                _refuse("stop", text, f"strings of 1 to {MAX_STOP_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            _refuse("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0, 2**31 - 1)

    def _check_bias(self) -> None:
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            _refuse("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS} entries")
        for token_id, bias in self.logit_bias.items():
            _whole("logit_bias", token_id, 0, 2**31 - 1)
            _number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)

    def _check_limits(self) -> None:
        allowed = self.allowed_token_ids
        if allowed is not None and not 1 <= len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
            _refuse("allowed_token_ids", f"{len(allowed)} ids", f"1 to {MAX_ALLOWED_TOKEN_IDS} ids")
        for token_id in allowed or ():
            _whole("allowed_token_ids", token_id, 0, 2**31 - 1)
        if len(self.bad_words) > MAX_BAD_WORDS:
            _refuse("bad_words", f"{len(self.bad_words)} words", f"at most {MAX_BAD_WORDS} words")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
                _refuse("bad_words", word, f"strings of 1 to {MAX_BAD_WORD_CHARS} characters that are not only spaces")
        if not all(self.bad_words_token_ids):
            _refuse("bad_words_token_ids", (), "lists of at least one token id")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature == 0.0


_MAY_BE_NONE = frozenset(field.name for field in FIELDS if field.may_be_none)
_ABOVE = {field.name: (field.least, field.most) for field in FIELDS if field.excludes_least}


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        _refuse(name, value, f"a whole number from {least} to {most}")


def _number(name: str, value: Any, least: float, most: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        _refuse(name, value, f"a number from {least:g} to {most:g}")


def _refuse(name: str, value: Any, right: str | ErrorText) -> None:
    shown = repr(value)
    shown = shown if len(shown) <= 64 else shown[:61] + "..."
    first, *others = error_text(right).pieces
    raise Refused(field_text(name, ErrorText((f"must be {first}", *others)), shown))


MAX_MARKER_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """At most `num_tokens` tokens between `start_ids` and `end_ids`; then `end_ids` are forced.

    Only the first thinking section of an answer has a budget. The first id of a marker must occur in it only once.
    """

    num_tokens: int
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    is_open: bool = False  # the answer starts inside the thinking section

    def __post_init__(self) -> None:
        if isinstance(self.num_tokens, bool) or not isinstance(self.num_tokens, int) or self.num_tokens < 0:
            _refuse_budget(f"{self.num_tokens!r} tokens: must be a whole number of at least 0")
        for ids in (self.start_ids, self.end_ids):
            if not 1 <= len(ids) <= MAX_MARKER_TOKENS:
                _refuse_budget(f"a marker has {len(ids)} tokens: must have 1 to {MAX_MARKER_TOKENS}")
            if min(ids) < 0:
                _refuse_budget(f"a marker has token {min(ids)}: ids go from 0")


def _refuse_budget(problem: str) -> None:
    raise Refused(field_text("thinking_budget", problem))


def choice_seed(seed: int, choice: int) -> int:
    """The seed of a choice: hash(seed, choice), 63 bits, the same in every process."""
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def has_plain_choice(params: SamplingParams) -> bool:
    """Whether a token depends only on logits, seed and position: not on tokens, a grammar, or a logits processor."""
    return not params.extra_args and all(getattr(params, name) == off for name, off in _NOT_PLAIN)


_NOT_PLAIN = tuple((field.name, field.default) for field in FIELDS if not field.is_plain)

"""What a client may ask of the sampler, and the ranges in which that makes sense.

Field names and meanings are vLLM's. Knows numbers; refuses to know models (what depends on one, such as the vocabulary,
is checked at intake).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from .errors import Refused

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 128

# field -> least and most. The bodies of requests are documented with the same.
COUNTS: Mapping[str, tuple[int, int]] = {
    "n": (1, MAX_N),
    "max_tokens": (0, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (0, MAX_LOGPROBS),
}
NUMBERS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),  # but not 0
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
}
MAX_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens, and when to stop. Checked when made: `Refused` names the field, its value and the range.

    Applied in this order: penalties, logit_bias, temperature, top_k, top_p, min_p.
    """

    most_logprobs: ClassVar[int] = MAX_LOGPROBS

    n: int = 1  # choices a prompt
    max_tokens: int | None = 16  # None: as many as the context has room for
    min_tokens: int = 0  # before these, no EOS and no stop token id
    temperature: float = 1.0  # 0 is greedy, and ignores top_k, top_p and min_p
    top_p: float = 1.0  # smallest set of tokens with this share of the probability; 1 is off
    top_k: int = 0  # only the k likeliest; 0 or -1 is off
    min_p: float = 0.0  # only tokens at least this share as likely as the likeliest; 0 is off
    presence_penalty: float = 0.0  # taken off the logit of each token generated before
    frequency_penalty: float = 0.0  # the same, times how often
    repetition_penalty: float = 1.0  # divides (or multiplies, below 0) logits of tokens in prompt or answer
    seed: int | None = None  # None: drawn for each request
    stop: tuple[str, ...] = ()  # text that ends the answer
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit, -100..100
    logprobs: int | None = None  # log-probabilities of the chosen token and of the k likeliest; None: not asked
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name, (least, most) in COUNTS.items():
            value = getattr(self, name)
            if value is not None or name not in _MAY_BE_NONE:
                _whole(name, value, least, self.most_logprobs if name == "logprobs" else most)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens, which is {self.max_tokens}")
        self._check_numbers()
        self._check_stops()
        self._check_bias()

    def _check_numbers(self) -> None:
        for name, (least, most) in NUMBERS.items():
            _number(name, getattr(self, name), least, most)
        if self.top_p == 0.0:
            _refuse("top_p", self.top_p, "above 0 and at most 1")

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

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0


_MAY_BE_NONE = frozenset({"max_tokens", "seed", "logprobs"})


def _whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        _refuse(name, value, f"a whole number from {least} to {most}")


def _number(name: str, value: Any, least: float, most: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        _refuse(name, value, f"a number from {least:g} to {most:g}")


def _refuse(name: str, value: Any, right: str) -> None:
    shown = repr(value)
    shown = shown if len(shown) <= 64 else shown[:61] + "..."
    raise Refused(f"{name} = {shown}: must be {right}", param=name)

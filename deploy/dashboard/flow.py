"""The flow between the stages in the last seconds: messages and tokens on each channel, and how long it was full."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

WINDOW_S = 5.0
MIN_S = 0.2  # between two readings
STEPS_TO = ("allocate", "execute", "sample")  # stages whose channel carries steps, with the tokens that they compute
TEXT_TO = ("detokenize", "merge", "exit")  # stages whose channel carries generated tokens
PROMPTS_TO = ("schedule", "dispatch")  # stages whose channel carries tokenized prompts, if it comes from TOKENIZE
TOKENIZE = "tokenize"


class CountsMessages(Protocol):
    """The counters of a channel."""

    @property
    def num_sent(self) -> int:
        """Messages so far."""

    @property
    def seconds_full(self) -> float:
        """Seconds in which its sender waited, or would have."""


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens so far."""

    num_prompt: int = 0
    num_generated: int = 0
    num_computed: int = 0  # in steps: of prompts and of answers


@dataclass(frozen=True, slots=True)
class _FlowReading:
    time_s: float
    channels: dict[str, tuple[int, float]]  # messages sent, seconds full
    tokens: TokenCounts


class FlowRates:
    """Readings of the counters of all channels. Call `note` a few times a second."""

    def __init__(self) -> None:
        self._readings: deque[_FlowReading] = deque()

    def note(self, now_s: float, channels: Mapping[str, CountsMessages], tokens: TokenCounts) -> None:
        """Reads the counters, at most every `MIN_S` seconds."""
        last = self._readings[-1] if self._readings else None
        if last is not None and now_s - last.time_s < MIN_S:
            return
        counts = {name: (one.num_sent, one.seconds_full) for name, one in channels.items()}
        if last is not None and (now_s - last.time_s > 2 * WINDOW_S or _has_gone_back(last, counts, tokens)):
            self._readings.clear()  # nothing was read for long, or the engine process was replaced
        self._readings.append(_FlowReading(now_s, counts, tokens))
        while len(self._readings) > 2 and self._readings[1].time_s <= now_s - WINDOW_S:
            self._readings.popleft()

    def of(self, name: str, source: str, target: str) -> dict[str, Any]:
        """Messages and tokens per second on one channel, and the share of time in which it was full.

        {} until it has been read twice; without `tokens_per_s` where messages have no tokens.
        """
        if len(self._readings) < 2:
            return {}
        first, last = self._readings[0], self._readings[-1]
        span_s = last.time_s - first.time_s
        num_sent, full_s = last.channels[name]
        sent_before, full_before_s = first.channels.get(name, (num_sent, full_s))
        found = {
            "per_s": _rounded((num_sent - sent_before) / span_s),
            "full": round(min(1.0, (full_s - full_before_s) / span_s), 3),
        }
        counter = _counter(source, target)
        if counter is None:
            return found
        passed = getattr(last.tokens, counter) - getattr(first.tokens, counter)
        return found | {"tokens_per_s": _rounded(max(0, passed) / span_s)}


def _counter(source: str, target: str) -> str | None:
    if target in PROMPTS_TO and source == TOKENIZE or source == "dispatch":
        return "num_prompt"
    if target in STEPS_TO and source != "sample":
        return "num_computed"
    return "num_generated" if target in TEXT_TO else None


def _has_gone_back(last: _FlowReading, counts: Mapping[str, tuple[int, float]], tokens: TokenCounts) -> bool:
    return any(sent < last.channels.get(name, (0, 0.0))[0] for name, (sent, _) in counts.items()) or (
        tokens.num_computed < last.tokens.num_computed
    )


def _rounded(rate: float) -> float:
    """Three digits, so that an update does not tell noise."""
    return float(f"{rate:.3g}")

"""Shares of requests by labels of engines: `--split version=v2:5` and `--shadow version=v2:1`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ..errors import ConfigError
from .compared_answers import Result
from .labels import Labels, is_label
from .split_counts import SplitCounts

Group = Literal["rest", "labelled", "shadow"]
GROUPS: Sequence[Group] = ("rest", "labelled", "shadow")

_PERCENT = re.compile(r"\d{1,3}(\.\d{1,4})?")
_WHOLE = 1 << 64


class Traffic(Protocol):
    """What an engine offers of this to its observers, and to those who change it."""

    @property
    def rules(self) -> TrafficRules:
        """What it does now."""

    @property
    def counts(self) -> SplitCounts:
        """What became of the requests of both sides of a split."""

    def problem(self, rules: TrafficRules) -> str | None:
        """Why these rules do not fit the engines that serve; None if they do."""

    def num_engines(self, rules: TrafficRules) -> Mapping[Group, int]:
        """How many engines that serve would be in each group of these rules."""

    def change(self, rules: TrafficRules) -> None:
        """Follows other rules from now on. A split of another label is counted anew."""

    @property
    def copy_results(self) -> Mapping[Result, int]:
        """What became of the copies, since the shadow has its label."""

    def log_texts(self, num_chars: int) -> None:
        """From now on a difference between an answer and its copy is logged with so many characters of both."""

    def to_json(self) -> dict[str, Any]:
        """Rules and counts, as pages show them."""


@dataclass(frozen=True, slots=True)
class TrafficShare:
    """A share of the requests, for the engines with a label."""

    name: str
    value: str
    percent: float  # of the requests, 0 to 100

    @classmethod
    def parse(cls, flag: str, text: str) -> TrafficShare:
        """The share of NAME=VALUE:PERCENT. Raises `ConfigError`."""
        label, _, percent = text.rpartition(":")
        name, _, value = label.partition("=")
        if not is_label(name, value) or not _PERCENT.fullmatch(percent) or float(percent) > 100.0:
            raise ConfigError(
                f"{flag} {text}: must be NAME=VALUE:PERCENT, a label as of `millrace engine --label` and a number from "
                "0 to 100, such as version=v2:5"
            )
        return cls(name, value, float(percent))

    def __str__(self) -> str:
        return f"{self.label}:{self.percent:g}"

    @property
    def label(self) -> str:
        """As a flag has it."""
        return f"{self.name}={self.value}"

    def selects(self, labels: Labels) -> bool:
        """Whether an engine with these labels is one of those that the share is for."""
        return labels.get(self.name) == self.value

    def takes(self, key: bytes) -> bool:
        """Whether the requests with this key are in the share: a hash says so, the same at all fronts.

        A larger share of the same label has the keys of a smaller one, and others. Shares of two labels are drawn
        independently.
        """
        drawn = hashlib.blake2b(f"{self.label}:".encode() + key, digest_size=8).digest()
        return int.from_bytes(drawn, "little") * 100 < self.percent * _WHOLE


@dataclass(frozen=True, slots=True)
class TrafficRules:
    """What a front does by labels. `shadow` engines serve copies alone, so that no client's request is there."""

    split: TrafficShare | None = None
    shadow: TrafficShare | None = None

    def __post_init__(self) -> None:
        if self.split is not None and self.shadow is not None and self.split.label == self.shadow.label:
            raise ConfigError(
                f"split {self.split} and shadow {self.shadow}: engines with a shadow's label serve copies alone; end "
                "the shadow, then split"
            )

    @classmethod
    def parse(cls, split: str | None, shadow: str | None) -> TrafficRules:
        """The rules of two flags. Raises `ConfigError`."""
        return cls(
            None if split is None else TrafficShare.parse("--split", split),
            None if shadow is None else TrafficShare.parse("--shadow", shadow),
        )

    @property
    def shares(self) -> tuple[TrafficShare | None, TrafficShare | None]:
        """Split and shadow."""
        return self.split, self.shadow

    def serves_clients(self, labels: Labels) -> bool:
        """Whether an engine with these labels gets requests of clients."""
        return self.shadow is None or not self.shadow.selects(labels)

    def group_of(self, labels: Labels) -> Group:
        """What an engine with these labels is for: engines of one group are alike in all, others in their text."""
        if not self.serves_clients(labels):
            return "shadow"
        return "labelled" if self.split is not None and self.split.selects(labels) else "rest"

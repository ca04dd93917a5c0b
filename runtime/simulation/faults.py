"""Fault points of one simulated run: which of them are on, and when they strike."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ..env.env import seeded_stream


class FaultPoints:
    """The fault points, drawn from the run's seed at first use, each from its own stream.

    `SimEnv` has details.
    """

    def __init__(self, seed: int, probability: float, names: Collection[str] | None) -> None:
        self.seen: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()
        self._seed = seed
        self._probability = probability
        self._names = names
        self._points: dict[str, _FaultPoint] = {}

    def strikes(self, name: str, probability: float | None = None) -> bool:
        """Whether the point strikes now, with `probability`, or with that drawn for the point."""
        point = self._points.get(name)
        if point is None:
            point = self._points[name] = self._draw(name)
        self.seen[name] += 1
        if not point.is_on:
            return False
        if point.stream.random() >= (point.probability if probability is None else probability):
            return False
        self.fired[name] += 1
        return True

    def _draw(self, name: str) -> _FaultPoint:
        stream = seeded_stream(self._seed, f"fault/{name}")
        is_on = stream.random() < 0.5 and self._probability > 0
        probability = self._probability * stream.random()
        if self._names is not None:
            is_on = name in self._names
            if isinstance(self._names, Mapping):
                probability = self._names.get(name, 0.0)
        return _FaultPoint(is_on, probability, stream)


@dataclass(slots=True)
class _FaultPoint:
    is_on: bool
    probability: float
    stream: random.Random

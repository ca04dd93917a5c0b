"""Rules by which a router chooses an engine: ours, and those it is measured against."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from .engine_load import EngineView
from .score import RequestFacts, scores_s

ANSWER_TOKENS = 256  # counted as the work of an answer, whose length is unknown, unless its request allows less
DECODE_COST = 4  # of one of them, in tokens of a prompt: a prompt's are computed many at once
CLOSE = 1.05  # scores that differ by less than this factor, or by less than the next, are equal
CLOSE_S = 0.005
STICKY = 1.25  # the engine of a sticky key is kept while its score is at most this times the best, and the next
STICKY_S = 0.05


class RoutingPolicy(Protocol):
    """Chooses one of the engines."""

    asks_prefixes: bool  # whether it asks what is cached
    scores: Mapping[int, float]  # of the last choice, in seconds by engine; empty for a rule without scores

    def choose(self, facts: RequestFacts, views: Sequence[EngineView], cached: Mapping[int, int]) -> int:
        """The number of an engine among `views`, at least one. `cached`: tokens of the prompt that each has."""
        ...


class SoonestAnswer:
    """The engine with the least score. Among equal ones a hash of the sticky key decides: all routers decide alike."""

    asks_prefixes = True
    scores: Mapping[int, float] = MappingProxyType({})

    def choose(self, facts: RequestFacts, views: Sequence[EngineView], cached: Mapping[int, int]) -> int:
        self.scores = scores = scores_s(views, facts, cached)
        best_s = min(scores.values())
        if facts.sticky_key:
            home = max(views, key=lambda view: _weight(facts.sticky_key, view)).engine
            times_s = scores_s(views, facts, cached, lost=0.0)  # a session stays, though its first prompt be a copy
            if times_s[home] <= STICKY * min(times_s.values()) + STICKY_S:
                return home
        close_s = max(CLOSE * best_s, best_s + CLOSE_S)
        close = [engine for engine, score in scores.items() if score <= close_s]
        if len(close) == 1:
            return close[0]
        return min(close, key=lambda engine: (-cached.get(engine, 0), scores[engine], engine))


class LeastWork:
    """The engine with the fewest tokens, of prompts and answers, in its requests: what is cached is not asked."""

    asks_prefixes = False
    scores: Mapping[int, float] = MappingProxyType({})

    def choose(self, facts: RequestFacts, views: Sequence[EngineView], cached: Mapping[int, int]) -> int:
        return min(views, key=lambda view: (view.work, view.num_requests, view.engine)).engine


class RoundRobin:
    """One engine after the other."""

    asks_prefixes = False
    scores: Mapping[int, float] = MappingProxyType({})

    def __init__(self) -> None:
        self._last = -1

    def choose(self, facts: RequestFacts, views: Sequence[EngineView], cached: Mapping[int, int]) -> int:
        engines = sorted(view.engine for view in views)
        self._last = next((engine for engine in engines if engine > self._last), engines[0])
        return self._last


class PrefixOnly:
    """The engine with most of the prompt in its cache, whatever its load; of equals that with the fewest requests."""

    asks_prefixes = True
    scores: Mapping[int, float] = MappingProxyType({})

    def choose(self, facts: RequestFacts, views: Sequence[EngineView], cached: Mapping[int, int]) -> int:
        def rank(view: EngineView) -> tuple[int, int, int]:
            running = 0 if view.load is None else view.load.num_rows + view.load.num_waiting
            return -cached.get(view.engine, 0), running + view.rows_since, view.engine

        return min(views, key=rank).engine


POLICIES: Mapping[str, Callable[[], RoutingPolicy]] = {
    "soonest": SoonestAnswer,
    "least-work": LeastWork,
    "round-robin": RoundRobin,
    "prefix-only": PrefixOnly,
}


def _weight(key: bytes, view: EngineView) -> bytes:
    """Rendezvous hashing: of all engines the one of the largest weight is the key's home."""
    return hashlib.blake2b(key, digest_size=8, key=view.hash_key).digest()

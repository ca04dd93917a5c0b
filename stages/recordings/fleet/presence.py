"""Which of the simulated engines take requests: some are lost, and a rule may let others start and end."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...routing.scaling import EngineWork, ScalingRule


class Death(NamedTuple):
    """An engine is lost, and starts again empty."""

    at_s: float
    engine: int
    restart_s: float = 30.0  # until it takes requests again


@dataclass(frozen=True, slots=True)
class Scaling:
    """How the number of engines follows the load."""

    rule: ScalingRule
    least: int = 1  # engines; there are so many at the beginning
    start_s: float = 60.0  # from the decision until an engine takes requests


class EnginePresence:
    """Which of the engines are there.

    An engine that is to end gets no new requests, and is gone once it has none. The last that began ends first.
    """

    def __init__(self, engines: Sequence[int], deaths: Sequence[Death] = (), scaling: Scaling | None = None) -> None:
        self._deaths = deque(sorted(deaths))
        self._engines = engines
        self._scaling = scaling
        self._next_s = 0.0  # when the rule is asked next
        here = engines if scaling is None else engines[: scaling.least]
        self._ready_s = dict.fromkeys(here, 0.0)  # when each that is there takes requests
        self._ending: set[int] = set()
        self._began_s = dict.fromkeys(here, 0.0)
        self._engine_s = 0.0  # of those that have ended
        self.most = len(here)  # there were at the same time

    @property
    def next_s(self) -> float:
        """When something changes by itself, at the earliest."""
        moments = [self._deaths[0].at_s] if self._deaths else []
        if self._scaling is not None:
            moments.append(self._next_s)
        return min(moments, default=float("inf"))

    def taking(self, now_s: float) -> Sequence[int]:
        """Those that take requests now; if there are none, those that will."""
        here = [engine for engine in self._ready_s if engine not in self._ending]
        return [engine for engine in here if self._ready_s[engine] <= now_s] or here

    def ready_s(self, engine: int) -> float:
        """When an engine that is there takes requests."""
        return self._ready_s[engine]

    def lose(self, now_s: float) -> Sequence[int]:
        """The engines that are lost now, of those that are there."""
        lost = []
        while self._deaths and self._deaths[0].at_s <= now_s:
            death = self._deaths.popleft()
            if death.engine in self._ready_s:
                self._ready_s[death.engine] = now_s + death.restart_s
                lost.append(death.engine)
        return lost

    def ask(self, works: Sequence[EngineWork], now_s: float) -> None:
        """Lets engines start, and others begin to end, as the rule wants it. `works`: of those that take requests."""
        if self._scaling is None or now_s < self._next_s:
            return
        rule, least = self._scaling.rule, self._scaling.least
        self._next_s = now_s + rule.every_s
        num_now = len(self._ready_s) - len(self._ending)
        wanted = min(max(rule.wanted(works, num_now, now_s), least), len(self._engines))
        absent = [engine for engine in self._engines if engine not in self._ready_s]
        for engine in absent[: max(0, wanted - num_now)]:
            self._ready_s[engine] = now_s + self._scaling.start_s
            self._began_s[engine] = now_s
        for engine in list(reversed(self._ready_s)):
            if num_now <= wanted:
                break
            if engine not in self._ending:
                self._ending.add(engine)
                num_now -= 1
        self.most = max(self.most, len(self._ready_s))

    def end(self, busy: Collection[int], now_s: float) -> Sequence[int]:
        """Those that were to end and have no requests are gone now. `busy`: engines that have some."""
        gone = [engine for engine in self._ending if engine not in busy]
        for engine in gone:
            self._ending.discard(engine)
            del self._ready_s[engine]
            self._engine_s += now_s - self._began_s.pop(engine)
        return gone

    def engine_s(self, now_s: float) -> float:
        """Seconds that all engines together were there, starting and ending included."""
        return self._engine_s + sum(now_s - began_s for began_s in self._began_s.values())

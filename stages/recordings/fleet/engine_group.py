"""Simulated engines that one process advances, and what they tell of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from ...allocate.key_changes import KeyDelta
from ...routing.engine_load import EngineLoad
from ..cost_model import CostModel
from ..recorded_engine import RecordedEngine
from ..simulated_engine import AdmissionLimits, SimulatedEngine
from ..simulation_result import RequestOutcome, SimulationResult
from ..workloads import WorkloadRequest

Sent = tuple[int, int, WorkloadRequest]  # (engine, the request's number, the request)


class EngineReport(NamedTuple):
    """What an engine tells at the end of an interval."""

    load: EngineLoad
    keys: KeyDelta
    ended: Sequence[tuple[int, int]]  # (number, tokens of its answer) of requests


class IntervalReport(NamedTuple):
    """What the engines of a group tell."""

    engines: Sequence[tuple[int, EngineReport]]  # those to which anything happened, or that have just started
    next_event_s: float  # when something happens next in any of them


class EngineResult(NamedTuple):
    """What one engine has served, and the outcome of each request by number."""

    engine: int
    result: SimulationResult
    outcomes: Mapping[int, RequestOutcome]


class EngineGroup(Protocol):
    """Engines that work interval by interval. Several groups may work at the same time."""

    def begin(self, sent: Sequence[Sent], until_s: float) -> None:
        """Lets the engines work until then, with these new requests in the order of their arrival."""
        ...

    def finish(self) -> IntervalReport:
        """Waits for the end of the interval."""
        ...

    def kill(self, engine: int) -> Sequence[tuple[int, int]]:
        """An engine is lost, and an empty one is in its place. Returns (number, tokens so far) of its requests."""
        ...

    def results(self) -> Sequence[EngineResult]:
        """What each engine has served, lost ones included."""
        ...


class EnginesHere:
    """A group in this process."""

    def __init__(
        self,
        numbers: Sequence[int],
        engine: RecordedEngine,
        model: CostModel,
        admission: AdmissionLimits | None = None,
    ) -> None:
        self._made_of = engine, model, admission
        self._engines = {number: self._make() for number in numbers}
        self._lost: list[EngineResult] = []
        self._have_told: set[int] = set()  # engines that have reported since they started
        self._report = IntervalReport((), 0.0)

    def _make(self) -> SimulatedEngine:
        engine = SimulatedEngine(*self._made_of)
        engine.watch_keys()
        return engine

    def begin(self, sent: Sequence[Sent], until_s: float) -> None:
        for engine, number, request in sent:
            self._engines[engine].expect(number, request)
        reports = []
        for engine, one in self._engines.items():
            if one.next_event_s < until_s or engine not in self._have_told:
                self._have_told.add(engine)
                one.advance(until_s)
                ended = [(number, one.outcomes[number].num_tokens) for number in one.take_ended()]
                reports.append((engine, EngineReport(one.load(), one.take_keys(), ended)))
        self._report = IntervalReport(reports, min(one.next_event_s for one in self._engines.values()))

    def finish(self) -> IntervalReport:
        return self._report

    def kill(self, engine: int) -> Sequence[tuple[int, int]]:
        lost = self._engines[engine]
        self._lost.append(EngineResult(engine, lost.result(), lost.outcomes))
        self._engines[engine] = self._make()
        self._have_told.discard(engine)
        return lost.unfinished()

    def results(self) -> Sequence[EngineResult]:
        here = [EngineResult(engine, one.result(), one.outcomes) for engine, one in self._engines.items()]
        return [*self._lost, *here]

"""Simulation of several engines behind one router, in virtual time.

The router's rule, its index of cached prefixes and its view of each engine are the ones that serve; each engine is a
`SimulatedEngine`. As in serving, an engine reports at intervals, and the router counts itself what it has sent since.
Between two reports the engines do not depend on each other, so several processes can advance them (`EngineGroup`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..allocate.key_changes import KeyDelta
from ..allocate.prefix_cache import PrefixCache
from ..routing.engine_load import EngineLoad, EngineView
from ..routing.policies import LeastWork, RoutingPolicy
from ..routing.prefix_index import PrefixIndex
from ..routing.score import NO_COSTS, RequestFacts, prompt_s
from .cost_model import CostModel
from .format import RecordedEngine
from .simulated_engine import AdmissionLimits, SimulatedEngine
from .simulation_result import SimulationResult, merged
from .workloads import Workload, WorkloadRequest

REPORT_S = 0.1  # between two reports of an engine
EXPECTED_S = 30.0  # for how long the blocks of a prompt are expected at the engine it was sent to
FIRST_ANSWER = 256.0  # tokens expected of an answer before any has ended
MEMORY = 0.99  # of the mean length of answers: the weight of those before


class EngineReport(NamedTuple):
    """What an engine tells at the end of an interval."""

    load: EngineLoad
    keys: KeyDelta
    ended: Sequence[tuple[int, int]]  # (number, tokens of its answer) of requests


class EngineGroup:
    """Engines that one process advances."""

    def __init__(
        self,
        numbers: Sequence[int],
        engine: RecordedEngine,
        model: CostModel,
        admission: AdmissionLimits | None = None,
    ) -> None:
        self._engines = {number: SimulatedEngine(engine, model, admission) for number in numbers}
        for one in self._engines.values():
            one.watch_keys()

    def advance(
        self, sent: Iterable[tuple[int, int, WorkloadRequest]], until_s: float
    ) -> list[tuple[int, EngineReport]]:
        """Gives (engine, number, request) to the engines, and lets them work until then.

        Returns the reports of those to which anything happened.
        """
        for engine, number, request in sent:
            self._engines[engine].expect(number, request)
        reports = []
        for engine, one in self._engines.items():
            if one.next_event_s < until_s:
                one.advance(until_s)
                ended = [(number, one.outcomes[number].num_tokens) for number in one.take_ended()]
                reports.append((engine, EngineReport(one.load(), one.take_keys(), ended)))
        return reports

    def results(self) -> list[tuple[int, dict[int, int], SimulationResult]]:
        """(engine, place in the result's outcomes by request, result) of each engine."""
        return [
            (engine, {number: place for place, number in enumerate(one.outcomes)}, one.result())
            for engine, one in self._engines.items()
        ]

    @property
    def next_event_s(self) -> float:
        """When something happens next in any of them."""
        return min(one.next_event_s for one in self._engines.values())


@dataclass(slots=True)
class FleetResult:
    """The result of a simulation of several engines."""

    whole: SimulationResult  # of all of them
    engines: list[SimulationResult]
    most_waiting: int = 0  # in any engine
    chosen: list[int] = field(default_factory=list)  # the engine of each request

    def summary(self) -> dict[str, float | int | None]:
        """The figures of one engine's table, and how even the load was."""
        busy_s = np.array([engine.busy_s for engine in self.engines])
        figures = self.whole.summary()
        figures["device_busy"] = (figures["device_busy"] or 0.0) / len(self.engines)
        return figures | {
            "engines": len(self.engines),
            "cached_tokens": self.whole.num_hits,
            "imbalance": float(busy_s.max() / max(busy_s.mean(), 1e-9)),  # busiest engine by the mean
        }


class FleetSimulation:
    """One run of a trace over `num_engines` equal engines. `run` it once."""

    def __init__(
        self,
        num_engines: int,
        engine: RecordedEngine,
        model: CostModel,
        policy: RoutingPolicy,
        admission: AdmissionLimits | None = None,
    ) -> None:
        self._engine, self._policy = engine, policy
        self._groups = [EngineGroup(range(num_engines), engine, model, admission)]
        self._views = [EngineView(number) for number in range(num_engines)]
        self._index = PrefixIndex()
        self._keys = PrefixCache(engine.block_size)  # of prompts, as the engines make them
        self._answer = FIRST_ANSWER  # mean tokens of answers
        self._in_flight: dict[int, tuple[int, float]] = {}  # request -> (engine, its work)
        self._chosen: list[int] = []

    def run(self, trace: Workload) -> FleetResult:
        """Serves every request of the trace, until the last has ended."""
        requests, place, until_s = trace.requests, 0, REPORT_S
        while True:
            sent = []
            while place < len(requests) and requests[place].arrival_s < until_s:
                sent.append((self._route(place, requests[place]), place, requests[place]))
                place += 1
            for group in self._groups:
                for engine, report in group.advance(sent, until_s):
                    self._note(engine, report)
            next_s = min(group.next_event_s for group in self._groups)
            if place < len(requests):
                next_s = min(next_s, requests[place].arrival_s)
            if next_s == np.inf:
                return self._close()
            until_s += REPORT_S * max(1, int((next_s - until_s) / REPORT_S))  # an interval in which nothing happens

    def _route(self, number: int, request: WorkloadRequest) -> int:
        """Chooses the engine of a request as it arrives."""
        keys: list[bytes] = []
        if self._engine.enable_prefix_caching and (request.hash_ids or request.token_ids is not None):
            keys = self._keys.keys_of(request.tokens(number), request.cache_salt, adapter=request.adapter)
        now_s, size = request.arrival_s, self._engine.block_size
        runs = self._index.runs(keys, range(len(self._views)), now_s)
        cached = {engine: run * size for engine, run in runs.items()}
        facts = RequestFacts(request.num_prompt, self._answer)
        engine = self._policy.choose(facts, self._views, cached)
        self._index.expect(engine, keys, now_s, now_s + EXPECTED_S)
        view = self._views[engine]
        costs = NO_COSTS if view.load is None else view.load.costs
        budget = self._engine.max_num_batched_tokens
        view.note_sent(prompt_s(costs, request.num_prompt, cached[engine], budget), request.num_prompt)
        work = 0.0
        if isinstance(self._policy, LeastWork):
            work = self._policy.work_of(facts)
            self._policy.work[engine] = self._policy.work.get(engine, 0.0) + work
        self._in_flight[number] = engine, work
        self._chosen.append(engine)
        return engine

    def _note(self, engine: int, report: EngineReport) -> None:
        self._views[engine].note_load(report.load)
        self._index.add(engine, report.keys.added)
        self._index.remove(engine, report.keys.removed)
        for number, num_tokens in report.ended:
            _, work = self._in_flight.pop(number)
            if isinstance(self._policy, LeastWork):
                self._policy.work[engine] -= work
            if num_tokens:
                self._answer = MEMORY * self._answer + (1 - MEMORY) * num_tokens

    def _close(self) -> FleetResult:
        results = sorted((one for group in self._groups for one in group.results()), key=lambda one: one[0])
        whole = merged([result for _, _, result in results])
        whole.outcomes = [
            results[engine][2].outcomes[results[engine][1][number]] for number, engine in enumerate(self._chosen)
        ]
        return FleetResult(whole, [result for _, _, result in results], chosen=self._chosen)

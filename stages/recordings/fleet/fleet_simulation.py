"""Simulation of several engines behind one router, in virtual time.

The router's rule, its index of cached prefixes and its view of each engine are the ones that serve; each engine is a
`SimulatedEngine`. As in serving, an engine reports at intervals, and the router counts what it has sent since. Between
two reports the engines do not depend on each other, so several groups of them can work at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...allocate.prefix_cache import PrefixCache
from ...routing.policies import ANSWER_TOKENS, DECODE_COST, RoutingPolicy
from ...routing.router import RoutedRequest, Router
from ...routing.scaling import EngineWork
from ..recorded_engine import RecordedEngine
from ..simulation_result import RequestOutcome, SimulationResult, merged
from ..workloads import Workload, WorkloadRequest
from .engine_group import EngineGroup, EngineReport, EngineResult, Sent
from .presence import Death, EnginePresence, Scaling

REPORT_S = 0.1  # between two reports of an engine


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The result of a simulation of several engines."""

    whole: SimulationResult  # of all of them
    engines: Sequence[SimulationResult]
    chosen: Sequence[int]  # the engine to which each request was sent first
    num_resumed: int  # requests sent to another engine, as theirs was lost
    engine_s: float  # seconds that the engines were there, together
    most_engines: int  # at the same time

    def summary(self) -> dict[str, float | int | None]:
        """The figures of one engine's table, and how even the load was."""
        busy_s = np.array([engine.busy_s for engine in self.engines])
        figures = self.whole.summary()
        figures["device_busy"] = self.whole.busy_s / max(self.engine_s, 1e-9)
        return figures | {
            "engines": self.most_engines,
            "engine_hours": self.engine_s / 3600,
            "cached_tokens": self.whole.num_hits,
            "imbalance": float(busy_s.max() / max(busy_s.mean(), 1e-9)),  # the busiest engine, by the mean
            "resumed": self.num_resumed,
        }


class FleetSimulation:
    """One run of a trace over the engines of `groups`, numbered from 0. `run` it once."""

    def __init__(
        self,
        groups: Mapping[int, EngineGroup],
        engine: RecordedEngine,
        policy: RoutingPolicy,
        deaths: Sequence[Death] = (),
        scaling: Scaling | None = None,
    ) -> None:
        """groups: the group of each engine. engine: what all of them are. scaling: None for always all of them."""
        self._engine = engine
        self._router = Router(policy, engine.block_size)
        self._group_of = groups
        self._groups = list({id(group): group for group in groups.values()}.values())
        self._presence = EnginePresence(sorted(groups), deaths, scaling)
        self._keys = PrefixCache(engine.block_size)  # of prompts, as the engines make them
        self._in_flight: dict[int, tuple[int, int]] = {}  # request -> (engine, its work)
        self._chosen: dict[int, int] = {}
        self._num_resumed = 0

    def run(self, trace: Workload) -> FleetResult:
        """Serves every request of the trace, until the last has ended."""
        requests, place, until_s = trace.requests, 0, 0.0  # in the first interval the engines only report
        sent: dict[int, list[Sent]] = {}
        while True:
            while place < len(requests) and requests[place].arrival_s < until_s:
                self._route(place, requests[place], requests[place].arrival_s, sent)
                place += 1
            for group in self._groups:
                group.begin(sent.pop(id(group), ()), until_s)
            next_s = requests[place].arrival_s if place < len(requests) else np.inf
            for group in self._groups:
                report = group.finish()
                next_s = min(next_s, report.next_event_s)
                for engine, told in report.engines:
                    self._note(engine, told)
            self._resume(self._presence.lose(until_s), until_s, requests, sent)
            self._scale(until_s)
            if sent:
                next_s = until_s
            if next_s == np.inf:
                return self._result(until_s)
            next_s = min(next_s, self._presence.next_s)
            until_s += REPORT_S * max(1, int((next_s - until_s) / REPORT_S))  # past intervals in which nothing happens

    def _route(self, number: int, request: WorkloadRequest, now_s: float, sent: dict[int, list[Sent]]) -> None:
        """Sends a request to an engine as it arrives."""
        keys: list[bytes] = []
        if self._engine.enable_prefix_caching and (request.hash_ids or request.token_ids is not None):
            keys = self._keys.keys_of(request.tokens(number), request.cache_salt, adapter=request.adapter)
        routed = RoutedRequest(request.num_prompt, keys)
        engine = self._router.choose(routed, self._presence.taking(now_s), now_s)
        self._router.note_sent(engine, routed, now_s)
        work, view = request.num_prompt + DECODE_COST * ANSWER_TOKENS, self._router.view(engine)
        view.work += work
        view.num_requests += 1
        self._in_flight[number] = engine, work
        self._chosen.setdefault(number, engine)
        if (ready_s := self._presence.ready_s(engine)) > now_s:
            request = replace(request, sent_s=ready_s)
        sent.setdefault(id(self._group_of[engine]), []).append((engine, number, request))

    def _note(self, engine: int, report: EngineReport) -> None:
        self._router.note_load(engine, report.load)
        self._router.note_keys(engine, report.keys.added, report.keys.removed)
        for number, num_tokens in report.ended:
            self._forget(number)
            if num_tokens:
                self._router.note_answer(num_tokens)

    def _forget(self, number: int) -> None:
        engine, work = self._in_flight.pop(number)
        view = self._router.view(engine)
        view.work -= work
        view.num_requests -= 1

    def _resume(
        self, engines: Sequence[int], now_s: float, requests: Sequence[WorkloadRequest], sent: dict[int, list[Sent]]
    ) -> None:
        """These are lost: their requests go on elsewhere, with what they have of their answers."""
        lost = [one for engine in engines for one in self._group_of[engine].kill(engine)]
        for number, _ in lost:
            self._forget(number)
        for engine in engines:
            self._router.drop(engine)
        for number, num_done in lost:
            self._num_resumed += 1
            self._route(number, replace(requests[number], num_done=num_done, sent_s=now_s), now_s, sent)

    def _scale(self, now_s: float) -> None:
        """Lets engines start and end."""
        loads = [self._router.view(engine) for engine in self._presence.taking(now_s)]
        works = [
            EngineWork(view.load.prompt_s + view.prompt_s_since, view.load.num_rows, view.load.max_rows)
            for view in loads
            if view.load is not None
        ]
        self._presence.ask(works, now_s)
        for engine in self._presence.end({engine for engine, _ in self._in_flight.values()}, now_s):
            self._group_of[engine].kill(engine)  # an empty one is there if it starts again
            self._router.drop(engine)

    def _result(self, now_s: float) -> FleetResult:
        results = sorted((one for group in self._groups for one in group.results()), key=lambda one: one.engine)
        whole = merged([one.result for one in results])
        whole.outcomes = _joined(results)
        engines = {one.engine: [other.result for other in results if other.engine == one.engine] for one in results}
        return FleetResult(
            whole,
            [merged(lives) for lives in engines.values()],
            [self._chosen[number] for number in sorted(self._chosen)],
            self._num_resumed,
            self._presence.engine_s(now_s),
            self._presence.most,
        )


def _joined(results: Sequence[EngineResult]) -> list[RequestOutcome]:
    """The outcome of each request, by number: of one that was resumed, its first token and its end."""
    found: dict[int, RequestOutcome] = {}
    for one in results:
        for number, outcome in one.outcomes.items():
            other = found.setdefault(number, outcome)
            if other is not outcome:
                last, first = (outcome, other) if other.end_s is None else (other, outcome)
                firsts = [each.first_token_s for each in (first, last) if each.first_token_s is not None]
                found[number] = replace(last, first_token_s=min(firsts, default=None))
    return [found[number] for number in sorted(found)]

"""How long requests of a hundred adapters wait for four device slots: under our rule, and under one without a bound.

The real schedule and allocate run in virtual time, and a cost model stands for the device. Without a bound, a waiting
request whose adapter has no slot is passed by any number of others, and a slot is loaded once no row uses it.

    python -m tests.bench.adapter_waits [--requests 4000] [--adapters 100] [--rates 6 12 20 30]
"""

from __future__ import annotations

import argparse
import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from millrace.stages.messages import TokenRequest
from millrace.stages.recordings.cost_model import CostModel
from millrace.stages.recordings.recorded_engine import RecordedEngine
from millrace.stages.recordings.simulated_engine import AdmissionLimits
from millrace.stages.recordings.simulation import Simulation
from millrace.stages.recordings.simulation_result import SimulationResult
from millrace.stages.recordings.workloads import Workload, WorkloadRequest
from millrace.stages.schedule.adapter_lines import MAX_PASSES
from millrace.stages.schedule.scheduler import Scheduler
from millrace.stages.schedule.sequence import Sequence as ScheduledSequence

ENGINE = RecordedEngine(
    num_blocks=4096,
    num_host_blocks=0,
    block_size=4,
    max_model_len=64,
    max_num_seqs=16,
    max_num_batched_tokens=64,
    steps_in_flight=2,
    enable_chunked_prefill=True,
    enable_prefix_caching=False,
    max_waiting=10**6,
    scheduler="priority",
    priority_ageing_s=None,
    max_loras=4,
)
COSTS = CostModel(step_s=0.01, decode_row_s=0.002)
UNLIMITED = AdmissionLimits(max_admitted_requests=10**6, max_waiting_requests=10**6)


def zipf(num_requests: int, num_adapters: int, rate: float) -> list[WorkloadRequest]:
    """Poisson arrivals at `rate` a second; adapter k has a share in proportion to 1/k."""
    dice = np.random.default_rng(3)
    weights = 1 / np.arange(1, num_adapters + 1)
    chosen = dice.choice(num_adapters, num_requests, p=weights / weights.sum())
    arrivals = np.cumsum(dice.exponential(1 / rate, num_requests))
    answers = dice.integers(2, 24, num_requests)
    return [
        WorkloadRequest(float(at), 8, int(num), adapter=f"digest-{adapter}")
        for at, num, adapter in zip(arrivals, answers, chosen, strict=True)
    ]


class PassWatch:
    """Counts who passes whom, from the arrivals and starts of a scheduler whose requests have one priority.

    A waiting request is *served* while a device slot holds or loads its adapter, or drains for it.
    """

    def __init__(self, scheduler: Scheduler, num_requests: int) -> None:
        assert scheduler.adapters is not None
        self.num_passes = np.zeros(num_requests, int)  # [R] later requests that began earlier
        self.num_unserved = np.zeros(num_requests, int)  # [R] of those, the ones that began while it was not served
        self.num_drains = np.zeros(num_requests, int)  # [R] times it was served in which it was passed beyond the bound
        self._lines = scheduler.adapters
        self._waiting: list[int] = []  # sequences that have not begun, in the order of arrival
        self._adapters: dict[int, str] = {}
        self._served: dict[str, int] = {}  # adapters that are served now: since which count of their beginnings
        self._num_begun = 0
        self._passed_in: dict[int, int] = {}  # sequence -> beginning of the service in which it was passed last
        self._add, self._end, self._join = scheduler.add, scheduler.end, self._lines.join
        self._advance = self._lines.advance
        scheduler.add = self._added  # type: ignore[method-assign]
        scheduler.end = self._ended  # type: ignore[method-assign]
        self._lines.join = self._joined  # type: ignore[method-assign]
        self._lines.advance = self._advanced  # type: ignore[method-assign]

    def _added(self, request: TokenRequest) -> None:
        self._waiting.append(request.first_sequence_id)
        self._adapters[request.first_sequence_id] = "" if request.adapter is None else request.adapter.digest
        self._add(request)

    def _ended(self, sequence_id: int) -> None:
        if sequence_id in self._waiting:
            self._waiting.remove(sequence_id)
        self._end(sequence_id)

    def _joined(self, sequence: ScheduledSequence, rank: tuple[Any, ...]) -> None:
        place = bisect.bisect_left(self._waiting, sequence.sequence_id)
        if self._waiting[place : place + 1] == [sequence.sequence_id]:  # else it began before, and was preempted
            del self._waiting[place]
            passed = self._waiting[:place]
            self.num_passes[passed] += 1
            self._note_served()
            for each in passed:
                began = self._served.get(self._adapters[each])
                self.num_unserved[each] += began is None
                if began is not None and self.num_passes[each] > MAX_PASSES and self._passed_in.get(each) != began:
                    self._passed_in[each] = began
                    self.num_drains[each] += 1
        self._join(sequence, rank)

    def _advanced(self, done: int, granted: int, num_left: Callable[[], Mapping[int, int]]) -> list[str]:
        ready = self._advance(done, granted, num_left)
        self._note_served()
        return ready

    def _note_served(self) -> None:
        for adapter in {self._adapters[each] for each in self._waiting}:
            if not self._lines.is_served(adapter):
                self._served.pop(adapter, None)
            elif adapter not in self._served:
                self._num_begun += 1
                self._served[adapter] = self._num_begun


@dataclass(frozen=True, slots=True)
class AdapterWaits:
    """What a simulation shows."""

    result: SimulationResult
    watch: PassWatch


def simulate(requests: Sequence[WorkloadRequest], max_passes: float = MAX_PASSES, **sizes: Any) -> AdapterWaits:
    """Runs requests to their ends, with a bound on passes."""
    simulation = Simulation(replace(ENGINE, **sizes), COSTS, UNLIMITED)
    scheduler = simulation.core.schedule.scheduler
    assert scheduler.adapters is not None
    scheduler.adapters.max_passes = max_passes
    watch = PassWatch(scheduler, len(requests))
    return AdapterWaits(simulation.run(Workload(requests, False)), watch)


def main() -> None:
    """Prints a row for each rate and rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument("--rates", type=float, nargs="+", default=[6, 12, 20, 30], help="arrivals a second")
    options = parser.parse_args()
    print(f"{'req/s':>6}  {'rule':9}  passes  unserved  drains  TTFT p50 s   p99 s   max s  tokens/s")
    for rate in options.rates:
        for rule, most in (("bound", MAX_PASSES), ("no bound", math.inf)):
            waits = simulate(zipf(options.requests, options.adapters, rate), most)
            watch, figures = waits.watch, waits.result.summary()
            ttft_s = np.array([each.ttft_s for each in waits.result.outcomes])
            counts = (watch.num_passes.max(), watch.num_unserved.max(), watch.num_drains.max())
            p50_s, p99_s = np.percentile(ttft_s, (50, 99))
            print(
                f"{rate:6g}  {rule:9}  {counts[0]:6}  {counts[1]:8}  {counts[2]:6}  {p50_s:10.3f}  {p99_s:6.2f}  "
                f"{ttft_s.max():6.2f}  {figures['output_tokens_per_s']:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

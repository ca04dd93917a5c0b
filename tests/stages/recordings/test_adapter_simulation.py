"""Requests with adapters through the real schedule and allocate, in simulated time and in random histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from millrace.stages.messages import StepGrant
from millrace.stages.recordings.cost_model import CostModel
from millrace.stages.recordings.simulated_device import SimulatedDevice
from millrace.stages.recordings.simulation import Simulation
from millrace.stages.recordings.workloads import Workload, WorkloadRequest
from millrace.stages.schedule.adapter_lines import MAX_PASSES
from tests.bench.adapter_waits import simulate as simulate_waits
from tests.bench.adapter_waits import zipf
from tests.counts import count, first_seed
from tests.stages.recorded_runs import ENGINE


class Watch:
    """Checks each grant as it reaches the device, and notes in which order sequences begin."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.begun: list[int] = []
        self.num_loads = 0
        self._device, self._launch = device, device.launch
        self._digests: dict[int, str] = {}  # by adapter slot
        self._rows: dict[int, tuple[int, str]] = {}  # by slot: (adapter slot, digest)
        self._flying: dict[int, set[int]] = {}  # by step: adapter slots that its rows read
        device.launch = self.launch  # type: ignore[method-assign]

    def launch(self, grant: StepGrant, now_s: float) -> None:
        in_flight = {flight.done.step for flight in self._device.flights}
        for number, digest in grant.adapter_loads:
            assert not any(number in read for step, read in self._flying.items() if step in in_flight)
            self._digests[number] = digest
            self.num_loads += 1
        for started in grant.started:
            self._rows[started.slot] = (started.adapter_slot, started.adapter)
            if started.sequence_id not in self.begun:
                self.begun.append(started.sequence_id)
        rows = [self._rows[slot] for slot in grant.slots.tolist()]
        loading = {number for number, _ in grant.adapter_loads}
        for number, digest in rows:
            assert self._digests.get(number, "") == digest, "a row of another adapter, or of the base model"
            assert number not in loading, "a row in the step that loads its adapter"
        self._flying[grant.step] = {number for number, _ in rows}
        self._launch(grant, now_s)


def simulate(requests: Sequence[WorkloadRequest], model: CostModel, **sizes: object) -> tuple[Simulation, Watch]:
    simulation = Simulation(replace(ENGINE, **sizes), model)  # type: ignore[arg-type]
    watch = Watch(simulation.engine.device)
    in_order = sorted(requests, key=lambda each: each.arrival_s)
    result = simulation.run(Workload(in_order, False))
    for request, outcome in zip(in_order, result.outcomes, strict=True):
        assert outcome.how == "finished" or (outcome.how == "left" and request.leaves_s is not None)
    simulation.core.schedule.scheduler.check()
    simulation.core.allocate.allocator.check()
    return simulation, watch


def test_random_requests_of_base_and_adapters_all_run_on_their_own_adapter():
    first = first_seed()
    for seed in range(first, first + count(8, 3000)):
        dice = Random(seed)
        adapters = ["", *(f"digest-{i}" for i in range(dice.randint(1, 6)))]
        requests = [
            WorkloadRequest(
                dice.uniform(0, 20),
                dice.randint(1, 12),
                dice.randint(1, 12),
                priority=dice.choice([0, 0, 1]),
                adapter=dice.choice(adapters),
                leaves_s=dice.choice([None, None, None, dice.uniform(0, 9)]),
            )
            for _ in range(dice.randint(5, 40))
        ]
        simulate(
            requests,
            CostModel(step_s=0.3),
            max_loras=dice.randint(1, 3),
            steps_in_flight=dice.randint(1, 3),
            num_blocks=dice.choice([16, 24, 64]),
            num_host_blocks=dice.choice([0, 8]),
            enable_prefix_caching=dice.random() < 0.5,
        )


def test_adapters_with_one_prompt_share_no_block_and_one_adapter_does():
    def requests(*adapters: str) -> list[WorkloadRequest]:
        tokens = np.arange(20, dtype=np.int32)
        return [WorkloadRequest(9.0 * i, 20, 2, token_ids=tokens, adapter=each) for i, each in enumerate(adapters)]

    def hits(*adapters: str) -> int:
        sizes = {"max_loras": 2, "enable_prefix_caching": True}
        simulation, _ = simulate(requests(*adapters), CostModel(step_s=1.0), **sizes)
        cache = simulation.core.allocate.allocator.cache
        assert cache is not None
        return cache.num_hits

    assert hits("", "a", "b") == 0
    assert hits("a", "a") == hits("", "") > 0


def test_a_load_takes_a_step_of_its_own_only_if_nothing_runs():
    alone, _ = simulate([WorkloadRequest(0.0, 4, 3, adapter="a")], CostModel(step_s=1.0), max_loras=1)
    assert alone.engine.outcomes[0].end_s == 4.0
    requests = [WorkloadRequest(0.0, 4, 9), WorkloadRequest(0.5, 4, 3, adapter="a")]
    beside, watch = simulate(requests, CostModel(step_s=1.0), max_loras=1)
    assert beside.engine.outcomes[1].end_s == 5.0 and watch.num_loads == 1, "planned at 1, runs from 2 on"


def test_a_better_request_preempts_the_rows_of_an_adapter_at_once():
    requests = [
        *[WorkloadRequest(0.0, 2, 40, priority=5, adapter="a") for _ in range(2)],
        WorkloadRequest(5.0, 2, 2, adapter="b"),
    ]
    simulation, _ = simulate(requests, CostModel(step_s=1.0), max_loras=1)
    scheduler = simulation.core.schedule.scheduler
    assert scheduler.preemptions["recompute", "adapter"] == 2
    end_s = simulation.engine.outcomes[2].end_s
    assert end_s is not None and end_s < 12


@pytest.mark.slow
def test_past_no_request_begin_more_than_fifty_and_those_of_its_one_drain():
    waits = simulate_waits(zipf(count(250, 4000), 100, rate=40.0))
    passes, unserved, drains = waits.watch.num_passes, waits.watch.num_unserved, waits.watch.num_drains
    assert passes.max() >= MAX_PASSES and unserved.max() == MAX_PASSES, "the bound is reached, and kept"
    assert drains.max() == 1


def test_random_arrivals_of_one_priority_keep_the_bound():
    first = first_seed()
    for seed in range(first, first + count(3, 2000)):
        dice = Random(seed)
        num_adapters, rate = dice.randint(2, 60), dice.choice([20.0, 80.0, 1e6])
        requests = [
            replace(
                request,
                adapter=dice.choice(["", request.adapter, request.adapter]),
                num_answer=dice.choice([1, 2, 9, 40]),
                leaves_s=dice.choice([None, None, None, dice.uniform(0, 3)]),
            )
            for request in zipf(dice.randint(60, 160), num_adapters, rate)
        ]
        sizes = {"max_loras": dice.randint(1, 5), "max_num_seqs": dice.randint(1, 16)}
        watch = simulate_waits(requests, steps_in_flight=dice.randint(1, 3), **sizes).watch
        assert watch.num_unserved.max() <= MAX_PASSES, f"seed {seed}"
        assert watch.num_drains.max() <= 1, f"seed {seed}"

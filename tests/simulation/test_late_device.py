"""The whole pipeline on an asynchronous device: every seed passes with any number of steps in flight, and missing waits
are found.

In full: `python -m tests.simulation.run --seeds 2000 --late 1 2 4`.
"""

from __future__ import annotations

import pytest

from tests.counts import FULL
from tests.simulation import background
from tests.simulation.background import (
    FOUND_LATE_BY,
    MAX_SEEDS_TO_FIND,
    NUM_LATE_SEEDS,
    Totals,
    find_device_bug,
    run_late_seeds,
    tell_if_late,
)
from tests.simulation.device_bugs import DEVICE_BUGS
from tests.simulation.setups import SETTLE_FAULT, on_streams
from tests.simulation.world import run_seed

pytestmark = [pytest.mark.simulation, pytest.mark.slow]

SOMETIMES = (
    "found",
    "forked",
    "shared",
    "preempted",
    "swapped out",
    "swapped in",
    "quarantined",
    "chunk",
    "mixed step",
    "replayed",
    "eager",
    "guided",
    "ready",
)


@pytest.fixture(scope="module")
def totals() -> Totals:
    """The results of the seeds, computed once for all tests of this file."""
    return background.result(run_late_seeds, NUM_LATE_SEEDS)


def test_every_seed_keeps_the_invariants_with_1_2_and_4_steps_in_flight(totals: Totals) -> None:
    assert not totals.failures, f"{len(totals.failures)} runs failed, the first:\n{totals.failures[0]}"


def test_what_makes_a_late_device_hard_happens_in_those_runs(totals: Totals) -> None:
    missing = [name for name in SOMETIMES if totals.states[name] < max(1, NUM_LATE_SEEDS // 50)]
    faults = ("device.forward", "device.sample", "device.out_of_memory", "device.copy", "device.nan_row", SETTLE_FAULT)
    struck = [name for name in faults if totals.faults_fired[name]]
    missing += [name for name in faults if name not in struck] if FULL else ["any fault"] * (len(struck) < 3)
    assert not missing, f"{missing} in {dict(totals.states)}, {dict(totals.faults_fired)}"


@pytest.mark.parametrize("name", DEVICE_BUGS)
def test_a_planted_bug_of_the_device_is_found(name: str) -> None:
    found = background.result(find_device_bug, name)
    assert found is not None, f"{name} stayed hidden for {MAX_SEEDS_TO_FIND} seeds"
    tell_if_late(name, found[0], found, FOUND_LATE_BY.get(name, ()))


def test_a_seed_is_the_same_run_each_time() -> None:
    hashes = {run_seed(17, change=lambda setup: on_streams(setup, 2)).trace_hash for _ in range(2)}
    assert len(hashes) == 1

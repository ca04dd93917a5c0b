"""The whole pipeline under simulation: every seed passes, seeds repeat, every fault strikes, planted bugs are found."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.script import Script
from tests.counts import FULL
from tests.simulation import background
from tests.simulation.background import (
    FOUND_BY,
    MAX_SEEDS_TO_FIND,
    NUM_SEEDS,
    Totals,
    find_bug,
    run_seeds,
    tell_if_late,
)
from tests.simulation.bugs import BUGS
from tests.simulation.lane_bugs import LANE_BUGS
from tests.simulation.right_answers import right_answer
from tests.simulation.setups import FAULTS, in_lanes
from tests.simulation.world import run_seed

pytestmark = [pytest.mark.simulation, pytest.mark.slow]

SOMETIMES = (
    "found",
    "forked",
    "shared",
    "evicted",
    "preempted",
    "made long",
    "swapped out",
    "swapped in",
    "swap given up",
    "swap full",
    "found on the host",
    "parked",
    "parked on the host",
    "stalled out",
    "copies alone",
    "void plan",
    "quarantined",
    "chunk",
    "mixed step",
    "drafted",
    "drafts accepted",
    "drafts left out",
    "not started",
    "ready",
    "dead",
    "draining",
    "stopped",
)
OUTCOMES = ("finished", "left", "Busy", "Overloaded", "TimedOut", "Failed", "Unavailable", "NotServing")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def totals() -> Totals:
    """The results of the seeds, computed once for all tests of this file."""
    return background.result(run_seeds, NUM_SEEDS)


def test_every_seed_keeps_the_invariants(totals: Totals) -> None:
    assert not totals.failures, f"{len(totals.failures)} seeds failed, the first:\n{totals.failures[0]}"


def test_every_fault_point_is_known_and_strikes(totals: Totals) -> None:
    unknown = set(totals.faults_seen) - set(FAULTS)
    assert not unknown, f"fault points that the simulation never turns on: {sorted(unknown)}; add them to FAULTS"
    spared = [name for name in FAULTS if totals.faults_fired[name] < NUM_SEEDS // 100]
    assert not spared, f"fault points that hardly ever strike: {spared}"


def test_every_sometimes_state_and_outcome_is_reached(totals: Totals) -> None:
    missing = [name for name in SOMETIMES if totals.states[name] < NUM_SEEDS // 50]
    missing += [name for name in OUTCOMES if totals.outcomes[name] < NUM_SEEDS // 50]
    assert not missing, f"{missing} in {dict(totals.states)}, {dict(totals.outcomes)}"


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    seed = background.result(find_bug, name)
    assert seed is not None, f"{name} stayed hidden for {MAX_SEEDS_TO_FIND} seeds"
    tell_if_late(name, seed, seed, FOUND_BY.get(name, ()))


def test_a_seed_is_the_same_run_in_processes_of_other_hash_seeds() -> None:
    code = (
        "from tests.simulation.world import run_seed\nfor seed in (0, 1, 2, 17, 33): print(run_seed(seed).trace_hash)"
    )
    hashes = [
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for hash_seed in ("1", "31337")
    ]
    assert hashes[0] == hashes[1] and len(set(hashes[0])) == 5


@pytest.mark.parametrize("num_lanes", [2, 3, 4])
def test_lanes_of_decoding_rows_keep_the_invariants(num_lanes: int) -> None:
    """No channel holds more than its capacity, and no row is in two steps in flight that choose its token."""
    seeds = range(300) if FULL else range(43 * num_lanes, 43 * num_lanes + 5)
    for seed in seeds:
        run_seed(seed, change=partial(in_lanes, num_lanes=num_lanes))


@pytest.mark.parametrize("name", LANE_BUGS)
def test_a_planted_bug_of_lanes_is_found(name: str) -> None:
    with LANE_BUGS[name](), pytest.raises(AssertionError, match="whose tokens step [0-9]+ in flight chooses"):
        for seed in range(12):
            run_seed(seed, change=partial(in_lanes, num_lanes=2))


# -- the oracle itself, on answers one can read


def spelled(text: str) -> Script:
    return Script(answer=lambda prompt, seed: text.encode())


@pytest.mark.parametrize(
    ("answer", "params", "expected"),
    [
        ("hello", SamplingParams(max_tokens=9), ("hello", "stop", None, 6)),
        ("hello", SamplingParams(max_tokens=3), ("hel", "length", None, 3)),
        ("hello", SamplingParams(max_tokens=9, stop=("ll",)), ("he", "stop", "ll", 4)),
        (
            "hello",
            SamplingParams(max_tokens=9, stop=("ll",), include_stop_str_in_output=True),
            ("hell", "stop", "ll", 4),
        ),
        ("hello", SamplingParams(max_tokens=9, stop=("lo", "ello")), ("h", "stop", "ello", 5)),
        ("hello", SamplingParams(max_tokens=9, stop_token_ids=(ord("l"),)), ("he", "stop", ord("l"), 3)),
        ("grü", SamplingParams(max_tokens=3), ("gr\ufffd", "length", None, 3)),
    ],
)
def test_the_right_answer_is_what_a_reader_would_say(
    answer: str, params: SamplingParams, expected: tuple[str, str, str | int | None, int]
) -> None:
    right = right_answer(spelled(answer), [1], params, 0, room=20)
    assert (right.text, right.finish_reason, right.stop_reason, len(right.token_ids)) == expected

"""A fleet of engine processes under simulation: seeds keep the invariants and repeat, planted bugs are found.

More with MILLRACE_FULL=1; `python -m tests.simulation.run --fleet` runs as many seeds as one likes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.counts import count
from tests.simulation.fleet import POISON, STRIKES, run_fleet_seed
from tests.simulation.fleet_bugs import FLEET_BUGS, MACHINE_BUGS, TRAFFIC_BUGS, find_fleet_bug
from tests.simulation.machines import run_machines_seed
from tests.simulation.traffic import run_traffic_seed

pytestmark = [pytest.mark.simulation, pytest.mark.slow]

IS_FULL = bool(os.environ.get("MILLRACE_FULL"))
NUM_SEEDS = count(5, 500)
NUM_MACHINE_SEEDS = count(3, 500)
NUM_TRAFFIC_SEEDS = count(1, 500)
FIRST_TRAFFIC_SEED = 11  # which sends copies, and has two models
MAX_SEEDS_TO_FIND = 1_000
FOUND_BY = {  # seeds that found the bug at the last search, tried first
    "resumed_from_the_start": (1,),
    "late_frame_taken": (1,),
    "link_open_while_requests_move": (6,),
    "silent_link_left_open": (2,),
    "all_suspects_at_once": (9,),
    "noted_when_merged": (21,),
    "merged_by_core": (80,),
    "searches_not_pinned": (5,),
}
IN_CI = ("resumed_from_the_start", "slots_not_shifted", "searches_not_pinned")
ROOT = Path(__file__).parents[2]


def test_every_seed_of_a_fleet_keeps_the_invariants() -> None:
    states = Counter[str]()
    for seed in range(NUM_SEEDS):
        states += run_fleet_seed(seed).value.states
    if IS_FULL:
        spared = [name for name in (*STRIKES, POISON, "guilty") if states[name] < NUM_SEEDS // 100]
        assert not spared, f"what hardly ever strikes: {spared} in {dict(states)}"


def test_every_seed_of_engines_on_machines_of_their_own_keeps_the_invariants() -> None:
    states = Counter[str]()
    for seed in range(NUM_MACHINE_SEEDS):
        states += run_machines_seed(seed).value.states
    if IS_FULL:
        spared = [name for name in (*STRIKES, POISON, "silent") if states[name] < NUM_MACHINE_SEEDS // 100]
        assert not spared, f"what hardly ever strikes: {spared} in {dict(states)}"


def test_every_seed_of_a_split_and_a_shadow_keeps_the_invariants() -> None:
    states = Counter[str]()
    for seed in range(FIRST_TRAFFIC_SEED, FIRST_TRAFFIC_SEED + NUM_TRAFFIC_SEEDS):
        states += run_traffic_seed(seed).value.states
    if IS_FULL:
        assert states["copies"] > NUM_TRAFFIC_SEEDS and states["moved"] > NUM_TRAFFIC_SEEDS // 100, dict(states)


@pytest.mark.parametrize("name", [*FLEET_BUGS, *MACHINE_BUGS, *TRAFFIC_BUGS] if IS_FULL else IN_CI)
def test_a_bug_planted_into_a_fleet_is_found(name: str) -> None:
    found = find_fleet_bug(name, (*FOUND_BY.get(name, ()), *range(MAX_SEEDS_TO_FIND)))
    assert found is not None, f"{name} stayed hidden for {MAX_SEEDS_TO_FIND} seeds"


@pytest.mark.skipif(not IS_FULL, reason="needs MILLRACE_FULL=1: two more processes")
def test_a_seed_of_a_fleet_is_the_same_run_in_processes_of_other_hash_seeds() -> None:
    code = "from tests.simulation.fleet import run_fleet_seed\n"
    code += "for seed in (0, 1, 2, 17, 33): print(run_fleet_seed(seed).trace_hash)"
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

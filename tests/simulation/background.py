"""The long part of the simulation's tests, in a process of its own, beside the other tests: it needs one core.

`tests/simulation/conftest.py` starts it when all tests are run; else it is run when a test needs its results.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, TypeVar

from tests.counts import count
from tests.simulation.bugs import BUGS
from tests.simulation.device_bugs import DEVICE_BUGS
from tests.simulation.setups import Setup, on_streams
from tests.simulation.world import run_seed

R = TypeVar("R")

NUM_SEEDS = count(50, 500)  # `python -m tests.simulation.run` runs as many as one likes
MAX_SEEDS_TO_FIND = 300  # a planted bug
LATE_SEED = 10  # above this, a seed should be listed
# Seeds that found the bug at the last search, tried first: from 0 on it may be the hundredth. Changes to the pipeline
# change what a seed finds, so they go stale: then the test warns (`tell_if_late`).
FOUND_BY = {
    "missed_wake_up": (41,),
    "half_a_block_forgotten": (21,),
    "trusted_digest": (27,),
    "forked_one_token_too_many": (7,),
    "lost_free_on_abort": (10,),
    "kept_despite_void": (42,),
    "shared_too_early": (42,),
    "tail_found_too_early": (42,),
    "fork_source_not_held": (42,),
    "fork_source_reused_while_copied": (42,),
    "swap_kept_despite_void": (98,),
    "moved_despite_void": (98,),
    "drafting_rows_run_ahead": (21,),
    "host_reused_early": (58,),
}
NUM_LATE_SEEDS = count(9, 2000)  # on a device that runs on streams, each with every number of steps in flight
STEPS_IN_FLIGHT = (1, 2, 4)
FOUND_LATE_BY = {  # (seed, steps in flight), as above
    "fence_dropped": ((0, 2),),
    "told_when_submitted": ((0, 1),),
    "told_before_its_swaps": ((60, 1),),
    "void_told_at_once": ((202, 2), (884, 1)),
    "results_not_behind_done": ((0, 1),),
    "result_overwritten": ((0, 4),),
    "diff_buffer_taken_too_soon": ((11, 2),),
    "swap_in_not_waited_for": ((19, 2),),
    "swap_out_not_behind_its_writers": ((101, 2),),
    "line_not_entered": ((0, 1),),
    "stream_not_used": ((0, 1),),
    "finished_row_written_again": ((2, 4),),
    "attended_beside_others": ((4, 4),),
    "guide_without_its_tokens": ((1, 4),),
    "guide_read_before_it_is_there": ((0, 1),),
    "guide_overwritten": ((130, 4),),
    "wrong_drafts_kept": ((3, 1),),
    "drafts_trusted": ((3, 1),),
}

_pool: ProcessPoolExecutor | None = None
_futures: dict[tuple[Any, ...], Future[Any]] = {}  # by function and arguments


@dataclass
class Totals:
    """The results of all seeds together."""

    failures: list[str] = field(default_factory=list)
    faults_seen: Counter[str] = field(default_factory=Counter)
    faults_fired: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)


def run_seeds(count: int) -> Totals:
    """Runs the seeds from 0 on."""
    found = Totals()
    for seed in range(count):
        _run_into(found, seed)
    return found


def run_late_seeds(count: int) -> Totals:
    """Runs them on a device that runs on streams, with each number of steps in flight."""
    found = Totals()
    for seed, steps in product(range(count), STEPS_IN_FLIGHT):
        _run_into(found, seed, partial(on_streams, steps_in_flight=steps))
    return found


def _run_into(found: Totals, seed: int, change: Callable[[Setup], Setup] | None = None) -> None:
    try:
        result = run_seed(seed, change=change)
    except Exception as error:
        found.failures.append(f"{type(error).__name__}: {error}\n{'; '.join(error.__notes__)}")
        return
    found.faults_seen += result.faults_seen
    found.faults_fired += result.faults_fired
    found.states += result.value.states
    found.states[result.value.health] += 1
    found.outcomes += result.value.outcomes


def find_bug(name: str) -> int | None:
    """The seed that finds the planted bug, or None."""
    with BUGS[name]():
        for seed in (*FOUND_BY.get(name, ()), *range(MAX_SEEDS_TO_FIND)):
            try:
                run_seed(seed)
            except Exception as error:
                assert not isinstance(error, (AttributeError, TypeError, NameError)), "the bug itself is broken"
                assert f"again: python -m tests.simulation.run --seed {seed} --trace" in error.__notes__
                return seed
    return None


def find_device_bug(name: str) -> tuple[int, int] | None:
    """The seed and the steps in flight that find the planted bug of an asynchronous device, or None."""
    with DEVICE_BUGS[name]():
        for seed, steps in (*FOUND_LATE_BY.get(name, ()), *product(range(MAX_SEEDS_TO_FIND), STEPS_IN_FLIGHT)):
            try:
                run_seed(seed, change=partial(on_streams, steps_in_flight=steps))
            except Exception as error:
                assert not isinstance(error, (AttributeError, TypeError, NameError)), "the bug itself is broken"
                again = f"again: python -m tests.simulation.run --seed {seed} --trace --late {steps}"
                assert again in error.__notes__
                return seed, steps
    return None


def tell_if_late(name: str, seed: int, found: Any, listed: Collection[Any]) -> None:
    """Warns if a bug was found by a seed that is not listed and took a search."""
    if seed >= LATE_SEED and found not in listed:
        warnings.warn(f"{name} is found by {found}: list it in background.py, or each run searches anew", stacklevel=2)


def start() -> None:
    """Starts all of it."""
    global _pool
    _pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=os.nice, initargs=(5,))
    _futures[run_seeds, NUM_SEEDS] = _pool.submit(run_seeds, NUM_SEEDS)
    _futures.update(((find_bug, name), _pool.submit(find_bug, name)) for name in BUGS)
    _futures[run_late_seeds, NUM_LATE_SEEDS] = _pool.submit(run_late_seeds, NUM_LATE_SEEDS)
    _futures.update(((find_device_bug, name), _pool.submit(find_device_bug, name)) for name in DEVICE_BUGS)


def stop() -> None:
    """Cancels results that no test has requested."""
    if _pool is not None:
        _pool.shutdown(cancel_futures=True)


def result(run: Callable[..., R], *args: Any) -> R:
    """The result of `run(*args)`, from the background process or computed here."""
    future: Future[R] | None = _futures.get((run, *args))
    return run(*args) if future is None else future.result()

"""`python -m tests.simulation.run --seeds 10000`, and `--seed 17 --trace` to repeat one run.

The first failing seed is minimised: the clients and faults that are left are printed, with the command for them.

With `--lanes 2 3 4` each seed with decoding rows dealt over these numbers of lanes, as by ranks of layers.
With `--late 1 2 4` on an asynchronous device, each seed with each of these numbers of steps in flight. With `--fleet` a
fleet of engine processes (`fleet.py`), without minimising; `--fleet --bugs` plants bugs and says which seeds find them.
With `--fleet --machines` a front whose engines are on machines of their own (`machines.py`), with `--fleet --traffic`
the same with labels, a split and a shadow (`traffic.py`).
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product

from millrace.runtime.simulation.run import SimResult
from tests.simulation.fleet import run_fleet_seed
from tests.simulation.fleet_bugs import FLEET_BUGS, MACHINE_BUGS, TRAFFIC_BUGS, find_fleet_bug
from tests.simulation.machines import run_machines_seed
from tests.simulation.minimise import Part, minimise
from tests.simulation.setups import FAULTS, SETTLE_FAULT, Setup, draw_setup, in_lanes, on_streams
from tests.simulation.traffic import run_traffic_seed
from tests.simulation.world import Report, run_seed

Change = Callable[[Setup], Setup]


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate the whole pipeline under seeded orders, delays and faults.")
    parser.add_argument("--seeds", type=int, default=500, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="print the set-up and the trace of --seed")
    parser.add_argument("--late", type=int, nargs="+", choices=(1, 2, 3, 4), help="steps in flight on a late device")
    parser.add_argument("--lanes", type=int, nargs="+", help="of decoding rows, each in one step in flight")
    parser.add_argument("--clients", type=int, nargs="+", metavar="PLACE", help="of --seed, these clients only")
    parser.add_argument("--faults", nargs="+", metavar="NAME", help="of --seed, these faults only; none: none")
    parser.add_argument("--max-failures", type=int, default=5)
    parser.add_argument("--fleet", action="store_true", help="several engine processes behind one front")
    parser.add_argument(
        "--machines", action="store_true", help="with --fleet: the engines are on machines of their own"
    )
    parser.add_argument("--traffic", action="store_true", help="with --fleet: the same, with a split and a shadow")
    parser.add_argument("--bugs", nargs="*", metavar="NAME", help="with --fleet: plant these, or all, and find them")
    options = parser.parse_args()
    if options.fleet:
        first, count = (options.first, options.seeds) if options.seed is None else (options.seed, 1)
        seeds = range(first, first + count)
        if options.bugs is not None:
            every = TRAFFIC_BUGS if options.traffic else MACHINE_BUGS if options.machines else FLEET_BUGS
            return find_fleet_bugs(options.bugs or list(every), seeds)
        run_one_fleet = run_machines_seed if options.machines else run_fleet_seed
        run_one_fleet = run_traffic_seed if options.traffic else run_one_fleet
        return run_fleets(seeds, options.max_failures, run_one_fleet, is_traced=options.trace)

    changes: list[Change] = [partial(on_streams, steps_in_flight=count) for count in options.late or ()]
    changes += [partial(in_lanes, num_lanes=count) for count in options.lanes or ()]
    changes = changes or [_as_drawn]
    if options.seed is not None:
        changes = [partial(_part, change=change, clients=options.clients, faults=options.faults) for change in changes]
        return max(run_one(options.seed, options.trace, change) for change in changes)
    return run_many(range(options.first, options.first + options.seeds), changes, options.max_failures)


def _as_drawn(setup: Setup) -> Setup:
    return setup


def _part(setup: Setup, *, change: Change, clients: Sequence[int] | None, faults: Sequence[str] | None) -> Setup:
    """The set-up with some of its clients and faults; all of them where nothing is named."""
    setup = change(setup)
    whole = Part.whole(setup)
    named = tuple(name for name in faults or () if name != "none")
    part = Part(whole.clients if clients is None else tuple(clients), whole.faults if faults is None else named)
    return part.of(setup)


def run_one(seed: int, is_traced: bool, change: Change) -> int:
    """Prints the result of one seed."""
    if is_traced:
        for name, value in asdict(change(draw_setup(seed))).items():
            for line in [value] if name != "clients" else value:
                print(f"{name}: {line}")
    try:
        result = run_seed(seed, keep_trace=is_traced, change=change)
    except BaseException:
        traceback.print_exc()
        return 1
    if is_traced:
        print("\n".join(line for line in result.trace if line.startswith("(")))
    print(f"seed {seed}: {result.trace_hash}")
    print(f"{result.num_callbacks} callbacks, {result.virtual_s:.3f} s of virtual time: {result.value}")
    return 0


def run_many(seeds: range, changes: Sequence[Change], max_failures: int) -> int:
    """Prints totals, and each failing seed with the command that repeats it."""
    began, failures = time.perf_counter(), 0
    fired: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    states: Counter[str] = Counter()
    num_steps = num_callbacks = num_done = 0
    for seed, change in product(seeds, changes):
        try:
            result = run_seed(seed, change=change)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failures += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0]}")
            print(f"    {'; '.join(error.__notes__)}")
            if failures == 1:
                print(f"    smallest part: {_smallest(seed, change)}")
            if failures == max_failures:
                break
            continue
        num_done += 1
        fired += result.faults_fired
        outcomes += result.value.outcomes
        states += result.value.states
        states[result.value.health] += 1
        num_steps += result.value.num_steps
        num_callbacks += result.num_callbacks
    passed_s, cpu_s = time.perf_counter() - began, time.process_time()
    print(f"{num_done} runs passed and {failures} failed in {passed_s:.1f} s, {cpu_s:.1f} s of processor time")
    print(f"{num_steps} steps, {num_callbacks} callbacks")
    print(f"outcomes: {dict(sorted(outcomes.items()))}")
    print(f"states: {dict(sorted(states.items()))}")
    print(f"faults: {dict((name, fired[name]) for name in (*FAULTS, SETTLE_FAULT))}")
    return 1 if failures else 0


def run_fleets(
    seeds: range, max_failures: int, run_seed: Callable[..., SimResult[Report]], *, is_traced: bool = False
) -> int:
    """Prints totals of fleets, and each failing seed with the command that repeats it."""
    failures, num_done = 0, 0
    states, outcomes = Counter[str](), Counter[str]()
    for seed in seeds:
        try:
            result = run_seed(seed, keep_trace=is_traced)
        except Exception as error:
            failures += 1
            print(
                f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0]}\n    {'; '.join(error.__notes__)}"
            )
            if failures == max_failures:
                break
            continue
        num_done += 1
        states += result.value.states
        outcomes += result.value.outcomes
        if len(seeds) == 1:
            print("\n".join([*result.trace, f"seed {seed}: {result.trace_hash}"]))
    print(f"{num_done} runs passed and {failures} failed in {time.process_time():.1f} s of processor time")
    print(f"outcomes: {dict(sorted(outcomes.items()))}\nstates: {dict(sorted(states.items()))}")
    return 1 if failures else 0


def find_fleet_bugs(names: Sequence[str], seeds: range) -> int:
    """Prints the first seed that finds each bug. 1 if one stays hidden."""
    num_hidden = 0
    for name in names:
        found = find_fleet_bug(name, seeds)
        num_hidden += found is None
        print(f"{name}: {'stays hidden' if found is None else f'seed {found[0]}: {found[1]}'}", flush=True)
    return 1 if num_hidden else 0


def _smallest(seed: int, change: Change) -> str:
    part = minimise(draw_setup(seed), change)
    how = ""
    if isinstance(change, partial):
        ((name, value),) = change.keywords.items()
        how = f" --{'late' if name == 'steps_in_flight' else 'lanes'} {value}"
    return f"python -m tests.simulation.run --seed {seed} --trace{how} {part.flags}"


if __name__ == "__main__":
    sys.exit(main())

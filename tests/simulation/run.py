"""`python -m tests.simulation.run --seeds 10000`, and `--seed 17 --trace` to have one run again."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict

from tests.simulation.world import FAULTS, draw_setup, run_seed


def main() -> int:
    parser = argparse.ArgumentParser(description="Simulate the whole pipeline under seeded orders, delays and faults.")
    parser.add_argument("--seeds", type=int, default=500, help="how many, from --first on")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="print the set-up and the trace of --seed")
    parser.add_argument("--max-failures", type=int, default=5)
    options = parser.parse_args()

    if options.seed is not None:
        return run_one(options.seed, options.trace)
    return run_many(range(options.first, options.first + options.seeds), options.max_failures)


def run_one(seed: int, is_traced: bool) -> int:
    """Prints what became of one seed."""
    if is_traced:
        for name, value in asdict(draw_setup(seed)).items():
            for line in [value] if name != "clients" else value:
                print(f"{name}: {line}")
    try:
        result = run_seed(seed, keep_trace=is_traced)
    except BaseException:
        traceback.print_exc()
        return 1
    if is_traced:
        print("\n".join(line for line in result.trace if line.startswith("(")))
    print(f"seed {seed}: {result.trace_hash}")
    print(f"{result.num_callbacks} callbacks, {result.virtual_s:.3f} s of virtual time: {result.value}")
    return 0


def run_many(seeds: range, max_failures: int) -> int:
    """Prints totals, and each failing seed with the command that repeats it."""
    began, failures = time.perf_counter(), 0
    fired: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    states: Counter[str] = Counter()
    num_steps = num_callbacks = num_done = 0
    for seed in seeds:
        try:
            result = run_seed(seed)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            failures += 1
            print(f"seed {seed}: {type(error).__name__}: {str(error).splitlines()[0]}")
            print(f"    again: python -m tests.simulation.run --seed {seed} --trace")
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
    print(f"{num_done} seeds passed and {failures} failed in {passed_s:.1f} s, {cpu_s:.1f} s of processor time")
    print(f"{num_steps} steps, {num_callbacks} callbacks")
    print(f"outcomes: {dict(sorted(outcomes.items()))}")
    print(f"states: {dict(sorted(states.items()))}")
    print(f"faults: {dict((name, fired[name]) for name in FAULTS)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

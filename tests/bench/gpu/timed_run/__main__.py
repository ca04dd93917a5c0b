"""Measures this engine on the GPU of this machine, within a budget of seconds, and writes what it finds row by row.

    python -m tests.bench.gpu.timed_run --out DIR [--budget-s 540] [--part NAME]... [--only CASE]... [--seed N]
    python -m tests.bench.gpu.timed_run --out DIR --dry         # on the CPU, with tiny shapes
    python -m tests.bench.gpu.timed_run --summary DIR [--json tests/bench/results/gpu-NAME.json]
    python -m tests.bench.gpu.timed_run --list

DIR gets rows.jsonl, a line for each finding, on the disk at once; tilings.json, the best launch options; log.txt, what
the processes print. A summary is printed at the end, and after SIGTERM. Exit status 0; 1 with something wrong or a part
that failed; 2 without a GPU; 143 after SIGTERM.

A dry run's figures are no GPU's, and what it found is not written into tests/bench/results.
"""

from __future__ import annotations

import ctypes
import json
import signal
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from random import randrange

from tests.bench.gpu.timed_run.conductor import ROOT, Conductor
from tests.bench.gpu.timed_run.parts import BUDGET_S, DRY_PARTS, PARTS, WARM, Part
from tests.bench.gpu.timed_run.rows import read_rows
from tests.bench.gpu.timed_run.summary import RESULTS, is_well, predictions, table, told

MODULE = "tests.bench.gpu.timed_run"
STOPPED = 128 + signal.SIGTERM


class Terminated(BaseException):
    """Someone ends the run."""


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    if options.list:
        for part in PARTS:
            print(f"{part.name:14} {part.limit_s:4g} s, with {part.least_s:g} left  {part.about}")
        return 0
    if options.summary is not None:
        return _summary(options.summary, options.json)
    if options.out is None:
        print(f"{MODULE}: give --out DIR, where rows are written, or --summary DIR", file=sys.stderr)
        return 2
    if not options.dry and not _has_gpu():
        print(
            f"{MODULE}: torch sees no CUDA device here, so nothing was measured; --dry shows that it would run",
            file=sys.stderr,
        )
        return 2
    parts = DRY_PARTS if options.dry else PARTS
    return run([part for part in parts if not options.part or part.name in options.part], options, WARM)


def run(parts: Sequence[Part], options: Namespace, warm: Sequence[str]) -> int:
    """Runs these parts; the exit status."""

    def terminate(number: int, frame: object) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise Terminated

    options.out.mkdir(parents=True, exist_ok=True)
    before = {number: signal.signal(number, terminate) for number in (signal.SIGTERM, signal.SIGINT)}
    is_stopped = False
    try:
        conductor = Conductor(parts, options, options.budget_s, warm)
        began = {"measured_on": date.today().isoformat(), "commit": _commit(), "seed": options.seed}
        conductor.rows.write("run", "run", began | {"budget_s": options.budget_s, "is_dry": options.dry})
        conductor.run()
    except Terminated:
        is_stopped = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    status = _summary(options.out, options.json)
    return STOPPED if is_stopped else status


def _summary(folder: Path, results: Path | None) -> int:
    """Prints the table of a run, and writes its results; 1 if something is wrong."""
    found = told(read_rows(folder))
    for line in table(found, predictions()):
        print(line)
    sys.stdout.flush()
    if results is not None:
        if found.get("is_dry", True) and RESULTS in results.resolve().parents:
            print(f"{MODULE}: a dry run measures nothing, so {results} is not written", file=sys.stderr)
            return 2
        results.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if is_well(found) else 1


def _options(argv: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(prog=MODULE, description="Measure this engine on a GPU.")
    parser.add_argument("--out", type=Path, help="a folder for what is found; a later run adds to it")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS], help="default: all")
    parser.add_argument("--only", action="append", default=[], help="cases whose name has this in it")
    parser.add_argument("--seed", type=int, default=randrange(1 << 31), help="of fresh inputs")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--list", action="store_true", help="say what the parts are, and run none")
    parser.add_argument("--summary", type=Path, metavar="DIR", help="print the table of that run, and run nothing")
    parser.add_argument("--json", type=Path, help="a file for the results as one object")
    return parser.parse_args(argv)


def _commit() -> str | None:
    """None where the files are no checkout."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _has_gpu() -> bool:
    """Asked of the driver: importing torch takes seconds of the run."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


if __name__ == "__main__":
    sys.exit(main())

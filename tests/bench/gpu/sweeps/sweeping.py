"""What sweeps share: a command line, the time they have, and one file with what they have found so far.

A sweep has cases, and tries candidates in each. They are compiled first (`compiling.py`), then timed one by one. One
that does not work is named and left out; one that is wrong is complained of.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from millrace.kernels.triton import launch as triton_launch
from tests.bench.gpu.one import versions
from tests.bench.gpu.place import Place
from tests.bench.gpu.sweeps.compiling import compile_all, is_device_lost, why
from tests.bench.gpu.trials.timing import Clock, DeviceClock, HostClock

COMPILING_SHARE = 0.6  # of the time that is left
DRY_WORKERS = 1


class Candidate(Protocol):
    """Is named by `str`."""

    @property
    def compiled_as(self) -> object:
        """Candidates with the same are the same to the compiler."""


Case = TypeVar("Case")
Job = TypeVar("Job", bound=Candidate)
Item = TypeVar("Item")


def command_line(module: str, description: str) -> ArgumentParser:
    """What every sweep can be told."""
    parser = ArgumentParser(prog=module, description=description)
    parser.add_argument("--limit-s", type=float, default=100.0, help="what has not begun by then is left")
    parser.add_argument("--json", type=Path, help="a file for what is found; it is written after each case")
    parser.add_argument("--only", action="append", help="cases whose name has this in it")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="on the CPU, in Triton's interpreter, with tiny shapes")
    return parser


def run(parser: ArgumentParser, argv: Sequence[str] | None, sweep: Callable[[Sweeping], None]) -> int:
    """The exit status: 1 with a candidate that is wrong, 2 without a GPU. A dry run goes to another process, if need
    be, as only one that had Triton's interpreter from its start has it."""
    options = parser.parse_args(argv)
    if options.dry and not triton_launch.IS_INTERPRETED:
        again = [sys.executable, "-m", parser.prog, *(sys.argv[1:] if argv is None else argv)]
        return subprocess.call(again, env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})
    if not (options.dry or torch.cuda.is_available()):
        print(f"{parser.prog}: torch sees no CUDA device here; --dry shows that it would run", file=sys.stderr)
        return 2
    sweeping = Sweeping(options)
    print(f"# device: {sweeping.place.name}", flush=True)
    try:
        sweep(sweeping)
    except BaseException as error:
        sweeping.told["failed"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        sweeping.write()
    return 1 if sweeping.told["wrong"] else 0


class Sweeping:
    """One run of a sweep."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.end_s = time.monotonic() + options.limit_s
        device = torch.device("cpu") if options.dry else torch.device("cuda", 0)
        self.told: dict[str, Any] = {
            "measured_on": date.today().isoformat(),
            "seed": options.seed,
            "versions": versions(device),
            "is_cut_short": False,
            "left_out": {},  # why, by the candidate's name
            "wrong": [],
            "cases": [],
        }
        self.place = Place(device, options.seed, self.tell, self.complain)
        self.told["device"] = self.place.name
        self.clock: Clock = HostClock() if options.dry else DeviceClock(device)

    def is_chosen(self, name: str) -> bool:
        return not self.options.only or any(part in name for part in self.options.only)

    def tell(self, case: dict[str, Any]) -> None:
        self.told["cases"].append(case)
        self.write()

    def complain(self, sentence: str) -> None:
        print(f"  WRONG: {sentence}", flush=True)
        self.told["wrong"].append(sentence)

    def leave_out(self, job: Candidate, reason: str) -> None:
        print(f"# left out: {job}: {reason}", flush=True)
        self.told["left_out"][str(job)] = reason

    @contextmanager
    def trying(self, job: Candidate) -> Iterator[None]:
        """Leaves a candidate out that raises; if that took the device along, nothing more can be tried."""
        try:
            yield
        except Exception as error:
            self.leave_out(job, why(error))
            if is_device_lost():
                raise

    def in_time(self, items: Iterable[Item]) -> Iterator[Item]:
        """As many of them as there is time to begin with."""
        for item in items:
            if time.monotonic() > self.end_s:
                if not self.told["is_cut_short"]:
                    print(f"# {item} and what follows: no time left", flush=True)
                self.told["is_cut_short"] = True
                return
            yield item

    def compiled(
        self, cases: Mapping[Case, Sequence[Job]], compile_one: Callable[[Job], object]
    ) -> dict[Case, list[Job]]:
        """The candidates of each case but those that do not work. What there was no time for is compiled when timed."""
        needed: dict[object, Job] = {}
        for job in (job for jobs in cases.values() for job in jobs):
            needed.setdefault(job.compiled_as, job)
        began_s = time.monotonic()
        num_workers = DRY_WORKERS if self.place.is_dry else self.options.workers
        said = compile_all(needed, compile_one, num_workers, began_s + COMPILING_SHARE * (self.end_s - began_s))
        wrong = {key: reason for key, reason in said.items() if reason}
        for key, reason in wrong.items():
            self.leave_out(needed[key], reason)
        took_s = time.monotonic() - began_s
        print(f"# {len(said) - len(wrong)} of {len(needed)} compiled in {took_s:.1f} s", flush=True)
        self.write()
        return {case: [job for job in jobs if job.compiled_as not in wrong] for case, jobs in cases.items()}

    def write(self) -> None:
        """What is known so far; there is no moment without a whole file."""
        path: Path | None = self.options.json
        if path is not None:
            part = path.with_name(f"{path.name}.part")
            part.write_text(json.dumps(self.told, indent=1) + "\n")
            part.replace(path)

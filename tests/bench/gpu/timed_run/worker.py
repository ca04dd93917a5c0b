"""A process that runs parts: one after the other, as they are given.

    python -m tests.bench.gpu.timed_run.worker --out DIR [--warm torch]... [--dry]          # jobs on stdin
    python -m tests.bench.gpu.timed_run.worker --out DIR --once PART FUNCTION [--tiny]      # one part, by hand

A job is a line of JSON on stdin, its answer a line on stdout. Whatever parts print goes to stderr. The process ends,
with all that it has started, when stdin does.
"""

from __future__ import annotations

import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.bench.gpu.floors import card_of
from tests.bench.gpu.place import DRY, Place, free_memory, is_device_lost, kind_of, why
from tests.bench.gpu.timed_run.rows import RowFile, read_rows

PARTS = "tests.bench.gpu.parts"
QUICK = "tests.kernels.quick_interpreter"  # for dry runs


def main() -> int:
    parser = ArgumentParser(description="Run parts of the GPU's benchmark in this process.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--began", type=float, default=time.monotonic(), help="of the run, on the monotonic clock")
    parser.add_argument("--warm", action="append", default=[], help="a module to import before there is a job")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--once", nargs=2, metavar=("PART", "FUNCTION"))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    work = Work(options)
    if options.once:
        work.run({"part": options.once[0], "function": options.once[1], "end_s": float("inf")})
        return 1 if work.num_wrong else 0
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_jobs, args=(jobs,), daemon=True).start()
    for module in (*options.warm, *([QUICK] if options.dry else [])):
        import_module(module)
    while True:
        answers.write(json.dumps({"goes_on": work.run(jobs.get())}) + "\n")
        answers.flush()


def _read_jobs(jobs: queue.SimpleQueue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        jobs.put(json.loads(line))
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


class Work:
    """The parts of one process."""

    def __init__(self, options: Namespace) -> None:
        self.options = options
        self.rows = RowFile(options.out, options.began)
        self.num_wrong = 0  # complaints, and parts that failed
        self._shared: dict[str, Any] = {}
        self._has_told_versions = False

    def run(self, job: dict[str, Any]) -> bool:
        """Whether the process can take another job."""
        part = job["part"]
        write = partial(self.rows.write, part)
        module, _, name = job["function"].partition(":")
        try:
            run = getattr(import_module(module if "." in module else f"{PARTS}.{module}"), name)
            if job.get("has_place", True):
                run(self._place(job))
            else:
                run(write, job | {"is_dry": self.options.dry})
        except BaseException as error:  # a part that fails does not stop the others
            traceback.print_exc()
            write(kind_of(error, "failed"), why(error))
            self.num_wrong += 1
            self._shared.clear()
        write("packages", loaded_packages())
        free_memory()
        return not is_device_lost()

    def _place(self, job: dict[str, Any]) -> Place:
        import torch

        part, options = job["part"], self.options
        write, before = partial(self.rows.write, part), read_rows(options.out)
        use_what_holds(part, before)
        device = torch.device("cpu") if options.dry else torch.device("cuda", 0)
        name = DRY if options.dry else torch.cuda.get_device_name(device)

        def complain(sentence: str) -> None:
            self.num_wrong += 1
            write("wrong", sentence)

        place = Place(
            device,
            options.seed,
            partial(write, "row"),
            complain,
            options.tiny,
            note=write,
            tell_all=partial(self.rows.write_all, part, "row"),
            end_s=job["end_s"],
            only=tuple(options.only),
            out=options.out,
            card=card_of(name, before),
            shared=self._shared,
        )
        if not self._has_told_versions:
            self._has_told_versions = True
            write("device", name)
            write("versions", versions(device.type == "cuda"))
        return place


def use_what_holds(part: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Launches of this process are early, and its graphs have branches, if that has held here: see `capture`."""
    from tests.bench.gpu.parts import capture

    switches = capture.held(rows)
    if part != capture.PART and switches is not None:
        capture.use(switches)


def versions(has_gpu: bool) -> dict[str, str | None]:
    """Of all that figures depend on."""
    import torch

    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    found["driver"] = _driver() if has_gpu else None
    return found


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.split("\n")[0].strip() or None


def loaded_packages() -> list[str]:
    """Installed packages that were imported, by their top-level names."""
    names = {name.partition(".")[0] for name in sys.modules}
    files = {name: getattr(sys.modules.get(name), "__file__", None) or "" for name in names}
    return sorted(name for name, file in files.items() if "site-packages" in file)


if __name__ == "__main__":
    sys.exit(main())

"""Checkpoint folders that are broken or hostile. Each start refuses its folder at once, in one line, in little memory.

    python -m tests.generators.hostile_folders --cases 300

A case is a copy of the bundled model with one file damaged. The command serves each folder in a process of its own and
holds it to `SECONDS` of processor time and to `MEBIBYTES` of memory beyond the start of the model itself.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from millrace.model.demo import WEIGHTS
from tests.generators.hostile_damages import DAMAGES, Damage

SECONDS = 5.0
MEBIBYTES = 300
REFUSED = 3  # exit code


def cases(count: int, seed: int) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Names of `count` cases and what makes the folder of each; every kind of damage in turn."""
    kinds = list(DAMAGES)
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        damage = kinds[number % len(kinds)]

        def make(root: Path, damage: Damage = damage, rng: random.Random = rng) -> None:
            shutil.copytree(WEIGHTS, root)
            (root / "damage.txt").write_text(f"{damage.__name__}: {damage(rng, root)}")

        yield f"seed {seed}, case {number}, {damage.__name__}", make


# -- each in a process of its own


def serve(root: Path, folder: Path) -> tuple[int, str, float, float]:
    """Serves a folder. Returns the exit code, stderr, processor seconds and peak MiB; ends a server that is ready."""
    command = [
        sys.executable,
        "-m",
        "millrace",
        "serve",
        str(root),
        "--device",
        "cpu",
        "--port",
        "0",
        "--log-level",
        "error",
    ]
    with (folder / "stderr").open("w+") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
        assert process.stdout is not None
        if process.stdout.readline():  # the ready line
            process.send_signal(signal.SIGTERM)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        stderr.seek(0)
        return process.returncode, stderr.read(), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def problem(code: int, stderr: str, seconds: float, mebibytes: float, own_mebibytes: float) -> str:
    """What is wrong with the end of a start; empty if nothing is."""
    if code != REFUSED or "Traceback" in stderr:
        return f"exit code {code}, stderr {stderr[-2000:]}"
    if len(stderr.splitlines()) != 1 or not stderr.isprintable() and not stderr[:-1].isprintable():
        return f"not one line: {stderr[:2000]!r}"
    if seconds > SECONDS or mebibytes > own_mebibytes + MEBIBYTES:
        return f"{seconds:.1f} s, {mebibytes:.0f} MiB; the start itself takes {own_mebibytes:.0f} MiB"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    failures, slowest, largest = 0, (0.0, ""), (0.0, "")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _, _, _, own = serve(WEIGHTS, folder)
        for name, make in cases(options.cases, options.seed):
            root = folder / "model"
            make(root)
            code, stderr, seconds, mebibytes = serve(root, folder)
            slowest, largest = max(slowest, (seconds, name)), max(largest, (mebibytes - own, name))
            if found := problem(code, stderr, seconds, mebibytes, own):
                failures += 1
                print(f"{name}, {(root / 'damage.txt').read_text()[:200]}: {found}", flush=True)
            shutil.rmtree(root)
    print(f"{options.cases} folders, {failures} failures; the start itself takes {own:.0f} MiB")
    print(f"at most {slowest[0]:.1f} s ({slowest[1]}) and {largest[0]:+.0f} MiB ({largest[1]})")
    return min(1, failures)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.exit(main())

"""How long a server takes from its command to its ready line, what that costs, and what it costs once it idles.

    python -m tests.bench.cpu.starts [--shape smollm2-135m | --bundled] [--starts 20] [--quiet-s 6] [--json FILE]

Each start is a process of its own, after so many seconds in which nothing runs: a virtual machine's host takes back
unused memory, and hands it out again at 5 ms for 2 MiB, so that one start right behind another is 0.3 s
faster than a start from rest. Files are in the system's cache, the native library is built and Python's bytecode
is written, whatever PYTHONDONTWRITEBYTECODE says here: one start goes before those that count. Besides, what `--help`
takes, and the share of a core that the last server takes while no request lives.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from millrace.runtime.env.cpus import Cpus
from tests.bench.cpu.figures import machine, spread, tell
from tests.bench.shapes import SHAPES, make_checkpoint

MILLRACE = (sys.executable, "-m", "millrace.deploy")
PORT = "8137"
NUM_HELPS = 5
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
IDLE_S = 20.0  # watched, after as long in which what a start leaves to do is done


@contextmanager
def started(model: list[str]) -> Iterator[tuple[int, float]]:
    """A server that is ready: its process, and after how long it was. Raises RuntimeError if it ends before."""
    command = [*MILLRACE, "serve", *model, "--port", PORT, "--device", "cpu"]
    began_s = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=ENVIRONMENT) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            ready_s = time.perf_counter() - began_s
            if not line or orjson.loads(line)["event"] != "ready":
                raise RuntimeError(f"no server: {' '.join(command)} said {line!r}; run it to see why")
            yield process.pid, ready_s
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def cpu_s(pid: int) -> tuple[float, float]:
    """Seconds that the process computed so far, itself and in the system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / ticks, int(fields[12]) / ticks


def idle_share(pid: int) -> float:
    """Of a core."""
    time.sleep(IDLE_S)
    before, began_s = sum(cpu_s(pid)), time.perf_counter()
    time.sleep(IDLE_S)
    return (sum(cpu_s(pid)) - before) / (time.perf_counter() - began_s)


def help_s() -> float:
    began_s = time.perf_counter()
    subprocess.run([*MILLRACE, "serve", "--help"], check=True, capture_output=True, env=ENVIRONMENT)
    return time.perf_counter() - began_s


def measure(model: list[str], num_starts: int, quiet_s: float) -> dict[str, Any]:
    """All figures, of so many starts behind one that does not count."""
    rows: list[tuple[float, float, float]] = []
    for number in range(num_starts + 1):
        time.sleep(quiet_s if number else 0.0)
        with started(model) as (pid, seconds):
            user, system = cpu_s(pid)
            print(f"start {number}: {seconds:.2f} s, {user:.2f} user, {system:.2f} system", file=sys.stderr, flush=True)
            if number:
                rows.append((seconds, user, system))
            idle = idle_share(pid) if number == num_starts else 0.0
    help_s()
    ready_s, user_s, system_s = zip(*rows, strict=True)
    return {
        "ready_s": spread(ready_s),
        "each_ready_s": [round(seconds, 3) for seconds in ready_s],
        "user_s": spread(user_s),
        "system_s": spread(system_s),
        "help_s": spread([help_s() for _ in range(NUM_HELPS)]),
        "idle_share_of_a_core": round(idle, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--model", type=Path, help="a checkpoint of that shape")
    parser.add_argument("--bundled", action="store_true", help="the bundled model instead")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--quiet-s", type=float, default=6.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = [] if options.bundled else [str(options.model or make_checkpoint(options.shape, Path(folder)))]
        found = measure(model, options.starts, options.quiet_s)
    results = {
        "shape": "bundled" if options.bundled else options.shape,
        "starts": options.starts,
        "quiet_s": options.quiet_s,
        "measured_on": datetime.date.today().isoformat(),
        **machine(len(Cpus.of_this_process().cores)),
        **found,
    }
    tell(results, options.json)


if __name__ == "__main__":
    main()

"""Checks and times the kernels, steps and workloads of this engine on the GPU of this machine; writes one JSON file.

    python -m tests.bench.gpu [--part NAME]... [--seed N] [--json results.json] [--list] [--dry]

Runs in at most 15 minutes, each part in a process of its own and in at most 4; a part that fails, or takes longer, does
not stop the others. Exit status 0; 1 with a kernel or an answer that is wrong, or a part that failed; 2 without a GPU.

The parts checks, kernels, steps and where need no more than torch, triton and numpy, and transformers its own; the
others need what the engine needs. Nothing has to be installed of this repository itself:

    mkdir -p build/link && ln -sfn "$PWD" build/link/millrace && export PYTHONPATH=build/link

`--dry` runs all parts on the CPU with tiny shapes, to see that the code runs. Its figures are no GPU's, it says so, and
what it found is not written into tests/bench/results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from tests.bench.gpu.part_table import PARTS, Part

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "tests" / "bench" / "results"
DRY_LIMIT_S = 600  # of all parts of a dry run, on however slow a machine


def main() -> int:
    parser = argparse.ArgumentParser(description="Check and time kernels, steps and workloads on a GPU.")
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS], help="default: all")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="of what kernels are checked with")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--list", action="store_true", help="say what the parts are, and run none")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny shapes")
    options = parser.parse_args()
    if options.list:
        for part in PARTS:
            print(f"{part.name:14} {part.limit_s:4} s  {part.about}")
        return 0
    chosen = [part for part in PARTS if options.part is None or part.name in options.part]
    if options.dry:
        if options.json is not None and RESULTS in options.json.resolve().parents:
            print(f"tests.bench.gpu: a dry run measures nothing, so {options.json} is not written", file=sys.stderr)
            return 2
    elif not _has_gpu():
        print(
            "tests.bench.gpu: torch sees no CUDA device here, so nothing was measured; --dry shows that it would run",
            file=sys.stderr,
        )
        return 2
    told = run(chosen, options.seed, is_dry=options.dry)
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if all(_is_well(part) for part in told["parts"].values()) else 1


def run(parts: list[Part], seed: int, *, is_dry: bool) -> dict[str, Any]:
    """What the parts found, as it is written. A dry run takes one process for them all."""
    told: dict[str, Any] = {"measured_on": date.today().isoformat(), "seed": seed}
    told["parts"] = {part.name: {"rows": [], "wrong": []} for part in parts}
    for group in [parts] if is_dry else [[part] for part in parts]:
        limit_s = DRY_LIMIT_S if is_dry else sum(part.limit_s for part in group)
        began = time.monotonic()
        lines, trouble = _run_apart([part.name for part in group], seed, limit_s, is_dry=is_dry)
        for line in lines:
            _take(told, line)
        for part in group:
            entry = told["parts"][part.name]
            if not entry.pop("ended", False) and "failed" not in entry:
                entry["failed"] = trouble or "not run"
            if len(group) == 1:
                entry["seconds"] = round(time.monotonic() - began, 1)
            _show(part, entry, told.get("device", ""))
    _compare(told)
    return told


def _run_apart(names: list[str], seed: int, limit_s: float, *, is_dry: bool) -> tuple[list[dict[str, Any]], str]:
    """The lines of a process that runs these parts, and what became of it if it did not end by itself."""
    environment = dict(os.environ)
    if is_dry:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.jsonl"
        command = [sys.executable, "-m", "tests.bench.gpu.one", *names, "--out", str(out), "--seed", str(seed)]
        process = subprocess.Popen(
            command + ["--dry"] * is_dry, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            trouble = f"its process ended with status {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            trouble = f"stopped after {limit_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        lines = out.read_text().splitlines() if out.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")], trouble


def _take(told: dict[str, Any], line: dict[str, Any]) -> None:
    entry = told["parts"][line.pop("part")]
    for kind, value in line.items():
        if kind == "row":
            entry["rows"].append(value)
        elif kind == "wrong":
            entry["wrong"].append(value)
        elif kind in ("device", "versions"):
            told[kind] = value
        else:
            entry[kind] = value


def _show(part: Part, entry: dict[str, Any], device: str) -> None:
    took = f", {entry['seconds']} s" if "seconds" in entry else ""
    print(f"# {part.name}{took} (device: {device})")
    for row in entry["rows"]:
        print("  " + "  ".join(f"{name} {_short(value)}" for name, value in row.items()))
    for sentence in entry["wrong"]:
        print(f"  WRONG: {sentence}")
    if "failed" in entry:
        print(f"  FAILED: {entry['failed']}")
    sys.stdout.flush()


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _compare(told: dict[str, Any]) -> None:
    """This engine's rate over that of transformers, where both ran the workload."""
    rates = [
        row["tokens_per_s"]
        for name in ("workload", "transformers")
        for row in told["parts"].get(name, {"rows": []})["rows"]
        if "tokens_per_s" in row
    ]
    if len(rates) == 2:
        told["workload_ratio"] = rates[0] / rates[1]
        print(f"# the workload, over transformers' rate: {told['workload_ratio']:.3g} (device: {told['device']})")


def _is_well(entry: dict[str, Any]) -> bool:
    return not entry["wrong"] and "failed" not in entry


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())

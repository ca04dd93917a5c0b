"""What a process of its own for the step loop brings or costs, over HTTP: `--mode split` against `--mode inline`.

    python -m tests.bench.split_mode [--model FOLDER ...] [--rounds 5] [--output results.json]
    python -m tests.bench.split_mode --modes split fleet

The second one compares `--mode split` with a fleet of one engine process, which has the stages dispatch and merge.

Both servers are up at once and take turns, the one that is not asked stopped (SIGSTOP), so drifts of the machine fall
on both. Each round asks W2 (32 requests at once) and W4 (16 in flight of 32) of `workloads.py`, and "many": 64 streams
of 128 tokens at once, where texts and sockets weigh most. Told are output tokens a second, ITL p99 and median, TTFT
median and p99, and microseconds of CPU a token of all the server's processes; medians over the rounds, and of each
round's ratio split / inline the median with its least and most. Without `--model` it is the bundled one, whose steps
are so short that HTTP is most of the work; give it a checkpoint of a real shape, too (`shapes.py` makes some).

Run it on a machine at rest: what `deploy/cli/serve.py` decides rests on it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.bench import workloads
from tests.bench.cpu.contenders import Figures, Running, Served, start
from tests.bench.workloads import Asked

MODES = ("inline", "split", "fleet")
FLEET_OF_ONE = """
import sys
from millrace.deploy.cli import serve
from millrace.deploy.cli.main import main
from millrace.stages.fleet.fleet_engine import FleetEngine
serve._make_engine = lambda mode, config: FleetEngine(config)
sys.exit(main())
"""
NUM_STREAMS, NUM_ANSWER = 64, 128
FIGURES = ("output_tok_s", "p99_itl_ms", "median_itl_ms", "median_ttft_ms", "p99_ttft_ms", "cpu_us_a_token")
LONGEST = 512  # tokens of prompt and answer in any of the loads
VOCABULARY = 512  # ids that are drawn for the bundled model, which has few


def many(run: int) -> list[Asked]:
    """64 short prompts at once."""
    draw = random.Random(f"many-{run}")
    return [([draw.randrange(300, 500) for _ in range(16)], NUM_ANSWER) for _ in range(NUM_STREAMS)]


LOADS = {"w2": workloads.w2, "w4": workloads.w4, "many": many}


def contender(mode: str, model: str | None, options: list[str]) -> Served:
    """A server in that mode."""
    program = ["-c", FLEET_OF_ONE] if mode == "fleet" else ["-m", "millrace.deploy"]
    command = [sys.executable, *program, "serve", *([] if model is None else [model])]
    served_mode = "inline" if mode == "inline" else "split"
    command += ["--port", "{port}", "--mode", served_mode, "--max-num-seqs", str(NUM_STREAMS), "--log-level", "warning"]
    return Served(mode, [*command, "--max-model-len", str(LONGEST), *options])


async def ask(running: Running, load: str, run: int, is_bundled: bool) -> Figures:
    """One load, once. Prompts of a run are the same for both modes, and found in no prefix cache."""
    asked = LOADS[load](run)
    if is_bundled:
        asked = [([token_id % VOCABULARY for token_id in ids], num_answer) for ids, num_answer in asked]
    with running.awake():
        began_s = running.cpu_s()
        figures = await running.answer("w4" if load == "w4" else "w2", asked)
        figures["cpu_us_a_token"] = 1e6 * (running.cpu_s() - began_s) / sum(num_answer for _, num_answer in asked)
    return {name: round(figures[name], 3) for name in FIGURES}


async def measure(model: str | None, rounds: int, options: list[str], modes: list[str]) -> dict[str, Any]:
    """load -> mode -> figure -> one value a round."""
    told: dict[str, Any] = {load: {mode: {name: [] for name in FIGURES} for mode in modes} for load in LOADS}
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        running: dict[str, Running] = {}
        try:
            for mode in modes:
                running[mode] = await start(contender(mode, model, options), logs / mode)
            for run in range(-1, rounds):  # the first one warms up
                for load in LOADS:
                    order = modes if run % 2 else modes[::-1]
                    for mode in order:
                        figures = await ask(running[mode], load, run, model is None)
                        if run >= 0:
                            for name in FIGURES:
                                told[load][mode][name].append(figures[name])
        finally:
            for one in running.values():
                await one.stop()
    return told


def summary(told: dict[str, Any]) -> dict[str, Any]:
    """Medians of both modes, and of each round's ratio second / first the median, the least and the most."""
    rows: dict[str, Any] = {}
    for load, modes in told.items():
        rows[load] = {}
        for name in FIGURES:
            (first, here), (second, there) = ((mode, figures[name]) for mode, figures in modes.items())
            ratios = sorted(b / a for a, b in zip(here, there, strict=True))
            rows[load][name] = {
                first: round(statistics.median(here), 3),
                second: round(statistics.median(there), 3),
                "ratio": [round(value, 3) for value in (statistics.median(ratios), ratios[0], ratios[-1])],
            }
    return rows


def show(model: str, rows: dict[str, Any]) -> None:
    first, second = [name for name in next(iter(rows["w2"].values())) if name != "ratio"]
    ratio_of = f"{second} / {first}"
    print(f"{model}\n{'load':6}{'':18}{first:>12}{second:>12}{ratio_of:>16}{'least':>8}{'most':>8}")
    for load, figures in rows.items():
        for name, row in figures.items():
            ratio, least, most = row["ratio"]
            print(f"{load:6}{name:18}{row[first]:12.2f}{row[second]:12.2f}{ratio:16.3f}{least:8.3f}{most:8.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description="The step loop in a process of its own, against one process.")
    parser.add_argument("--model", action="append", help="folder of a checkpoint; none: the bundled model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--option", action="append", default=[], help="of serve, for both, such as --option=--threads=2"
    )
    parser.add_argument("--modes", nargs=2, choices=MODES, default=["inline", "split"])
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "machine": {"python": platform.python_version(), "processor": platform.machine(), "cpus": os.cpu_count()}
    }
    for model in options.model or [None]:
        told = asyncio.run(measure(model, options.rounds, options.option, options.modes))
        name = "bundled" if model is None else Path(model).name
        found[name] = {"rounds": told, "summary": summary(told)}
        show(name, found[name]["summary"])
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

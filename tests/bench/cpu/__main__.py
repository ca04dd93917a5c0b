"""W1 to W4 on a CPU, this engine beside every other one that is installed.

    python -m tests.bench.cpu [--shape smollm2-135m] [--rounds 3] [--json results.json] [--chart chart.svg]
        [--peer vllm=PYTHON] [--peer openvino-genai=PYTHON,MODEL] ...

All engines are started first and stopped (SIGSTOP) but for the one that is measured. A round takes each workload in
turn, and in it each engine in turn, with readings of the memory bandwidth before and after each: a shared machine
drifts, so quote ratios of one run. In process: W1 decode rate, W2 tokens/s, W3 seconds, of ours also with int8
weights. Over HTTP with server-sent events: these and W4, 16 in flight. Besides: where a step of ours spends its time
(`parts.py`). How peers are named is in `peers.py`; those that are not there are left out, with a line. `python -m
tests.bench.cpu.report` writes what is in tests/bench/results into README.md and its page.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.bench.cpu.chart import draw
from tests.bench.cpu.contenders import Contender, Figures, Running, start
from tests.bench.cpu.figures import machine, spread, summary, table
from tests.bench.cpu.peers import OUR_INT8, contenders_of, distribution_version, find_peers, our_contenders
from tests.bench.shapes import SHAPES, make_checkpoint
from tests.bench.throughput import read_bandwidth_gb_s
from tests.bench.workloads import WORKLOADS, Asked, num_tokens

Results = dict[str, dict[str, list[Figures]]]  # workload -> label -> a round each


SETTLE_S = 2.0  # that an engine is idle before it is asked
ALONE_S = 4.0  # that it is idle once it is ready, before the next one is started


async def compare(
    chosen: Sequence[Contender], workloads: Sequence[str], rounds: int, logs: Path, weights_bytes: int
) -> dict[str, Any]:
    """Runs the rounds; the first one of all is a warm-up."""
    engines: dict[str, Running] = {}
    results: Results = {name: {} for name in workloads}
    bandwidths: list[float] = []
    asks = {contender.label: set(workloads) - contender.leaves_out for contender in chosen}
    try:
        for contender in chosen:
            try:
                engine = await start(contender, logs / f"{contender.label}.log")
            except RuntimeError as error:
                _say(f"{contender.label} is left out: {error}")
                continue
            engines[contender.label] = engine
            _say(f"{contender.label} {contender.version}: ready after {engine.ready_s:.1f} s")
            with engine.awake():  # what it does then, as ours takes memory, it does where others have taken none yet
                await asyncio.sleep(ALONE_S)
        for number, name in itertools.product(range(rounds + 1), workloads):
            asked = WORKLOADS[name](number)
            for label in [label for label in engines if name in asks[label]]:
                try:
                    figures = await _measure(engines[label], name, asked, weights_bytes)
                except RuntimeError as error:
                    _say(f"{label} is left out of {name}: {error}")
                    asks[label].discard(name)
                    results[name].pop(label, None)
                    continue
                bandwidths.append(figures["read_bandwidth_gb_s"])
                if number:
                    results[name].setdefault(label, []).append(figures)
                    _say(f"round {number} {name} {label}: {_shown(figures)}")
        return {
            "read_bandwidth_gb_s": spread(bandwidths),
            "versions": {contender.label: contender.version for contender in chosen if contender.label in engines},
            "ready_s": {label: round(engine.ready_s, 2) for label, engine in engines.items()},
            "peak_mib": {label: round(engine.peak_mib()) for label, engine in engines.items()},
            "tokens": {name: num_tokens(WORKLOADS[name](0)) for name in workloads if results[name]},
            "workloads": {name: summary(name, results[name]) for name in workloads if results[name]},
        }
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines.values()))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def _measure(engine: Running, workload: str, asked: list[Asked], weights_bytes: int) -> Figures:
    """What an engine comes to, and the memory bandwidth, the mean of readings just before and just after. Before that
    it was idle for a moment, as between requests of users: engines do some of their work there, as ours takes memory
    for its cache."""
    with engine.awake():
        await asyncio.sleep(SETTLE_S)
        bandwidth = read_bandwidth_gb_s()
        figures = await engine.answer(workload, asked)
    bandwidth = (bandwidth + read_bandwidth_gb_s()) / 2
    if "decode_tok_s" in figures and engine.label != OUR_INT8:  # which has fewer bytes of them than the file
        figures["share_of_bandwidth"] = figures["decode_tok_s"] * weights_bytes / bandwidth / 1e9
    return figures | {"read_bandwidth_gb_s": bandwidth}


def _shown(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def main() -> None:
    """Measures, prints a table, and writes JSON and a chart where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python -m tests.bench.cpu"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--model", type=Path, help="a checkpoint of that shape; made there if it is not there yet")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=sorted(WORKLOADS))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON[,MODEL]", help="see peers.py")
    parser.add_argument("--only", nargs="+", help="labels of the engines to run, all of which stay loaded")
    parser.add_argument("--no-parts", action="store_true", help="do not look into our own step")
    parser.add_argument("--note", help="what else is to be known of this run; it goes into the JSON and its page")
    parser.add_argument("--logs", type=Path, help="a folder for what the engines print")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path, help="an SVG file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the engines are stopped, too
    peers, missing = find_peers(options.peer, os.environ)
    for line in missing:
        _say(line)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or Path(folder) / "model"
        if not (model / "config.json").exists():
            make_checkpoint(options.shape, model)
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        chosen = our_contenders(str(model), options.threads, distribution_version(sys.executable, "millrace"))
        for peer in peers:
            chosen += contenders_of(peer, str(model), options.threads)
        labels = {each.label for each in chosen}
        if unknown := set(options.only or ()) - labels:
            parser.error(f"--only {sorted(unknown)[0]!r}: there is no such engine here; there are {sorted(labels)}")
        chosen = [each for each in chosen if options.only is None or each.label in options.only]
        weights_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        parts = [] if options.no_parts else _parts(model, options.threads)
        found = asyncio.run(compare(chosen, options.workloads, options.rounds, logs, weights_bytes))
    results = {
        "shape": options.shape,
        "dtype": "bfloat16",
        "rounds": options.rounds,
        "measured_on": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "note": options.note,
        **machine(options.threads),
    } | found
    results["parts"] = parts
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.chart:
        options.chart.write_text(draw(results))


def _parts(model: Path, threads: int) -> list[dict[str, float]]:
    """In a process of its own, which is gone when the others begin."""
    command = [sys.executable, "-m", "tests.bench.cpu.parts", str(model), "--threads", str(threads)]
    rows: list[dict[str, float]] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return rows


if __name__ == "__main__":
    main()

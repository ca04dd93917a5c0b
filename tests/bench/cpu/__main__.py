"""W1 to W4 on a CPU, this engine beside every other one that is installed.

    python -m tests.bench.cpu [--shape smollm2-135m] [--rounds 3] [--json results.json] [--chart chart.svg]
        [--vllm PYTHON] [--openvino PYTHON MODEL] [--llama-cpp PYTHON GGUF] [--llama-server BINARY GGUF]

All engines are started first and stopped (SIGSTOP) but for the one that is measured. A round takes each workload in
turn, and in it each engine in turn, with a reading of the memory bandwidth before them: a shared machine drifts, so
quote ratios of one run. PYTHON is that of a virtual environment with the engine; transformers is in this one.
In process: W1 decode rate, W2 tokens/s, W3 seconds. Over HTTP with server-sent events: these and W4, 16 in flight.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..shapes import SHAPES, make_checkpoint
from ..throughput import read_bandwidth_gb_s
from ..workloads import WORKLOADS
from .chart import draw
from .contenders import Contender, Figures, InProcess, Running, Served, start

OURS = "millrace"
HEADLINE = {  # workload -> figure it is compared by, and whether more of it is better
    "w1": ("decode_tok_s", True),
    "w2": ("output_tok_s", True),
    "w3": ("wall_s", False),
    "w4": ("output_tok_s", True),
}
SKIPPED = {"llama.cpp": {"w2", "w3"}}  # its binding has no batches; llama-server has

Results = dict[str, dict[str, list[Figures]]]  # workload -> label -> a round each


def contenders(options: argparse.Namespace, model: str) -> list[Contender]:
    """Ours and the peers that were named."""
    python, threads = sys.executable, options.threads
    serve = [python, "-m", "millrace", "serve", model, "--port", "{port}", "--device", "cpu", "--max-num-seqs", "64"]
    serve += ["--speculation", "off"]  # random weights repeat themselves
    found: list[Contender] = [
        InProcess(OURS, "millrace", python, model, threads),
        InProcess("transformers", "transformers", python, model, threads),
        Served(f"{OURS} server", [*serve, "--max-model-len", "2048"]),
    ]
    if options.vllm:
        found.append(InProcess("vLLM", "vllm", options.vllm, model, threads))
        module = [options.vllm, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--dtype", "bfloat16"]
        found.append(Served("vLLM server", [*module, "--port", "{port}", "--max-model-len", "2048"]))
    if options.openvino:
        peer, converted = options.openvino
        found.append(InProcess("OpenVINO", "openvino", peer, converted, threads))
    if options.llama_cpp:
        peer, gguf = options.llama_cpp
        found.append(InProcess("llama.cpp", "llama.cpp", peer, gguf, threads))
    if options.llama_server:
        binary, gguf = options.llama_server
        sizes = ["-c", "32768", "-np", "32", "-t", str(threads), "-tb", str(threads)]
        found.append(Served("llama.cpp server", [binary, "-m", gguf, "--port", "{port}", *sizes]))
    return [each for each in found if options.only is None or each.label in options.only]


async def compare(chosen: Sequence[Contender], workloads: Sequence[str], rounds: int, logs: Path) -> dict[str, Any]:
    """Runs the rounds; the first one of all is a warm-up."""
    engines = [await start(each, logs / f"{each.label}.log") for each in chosen]
    results: Results = {name: {} for name in workloads}
    bandwidths: list[float] = []
    try:
        for number in range(rounds + 1):
            for name in workloads:
                bandwidths.append(read_bandwidth_gb_s())
                asked = WORKLOADS[name](number)
                for contender, engine in zip(chosen, engines, strict=True):
                    if not _takes(contender, name):
                        continue
                    with engine.awake():
                        figures = await engine.answer(name, asked)
                    if number:
                        results[name].setdefault(engine.label, []).append(figures)
                        print(f"round {number} {name} {engine.label}: {_shown(figures)}", file=sys.stderr, flush=True)
        return {
            "read_bandwidth_gb_s": spread(bandwidths),
            "ready_s": {engine.label: round(engine.ready_s, 2) for engine in engines},
            "peak_mib": {engine.label: round(engine.peak_mib()) for engine in engines},
            "workloads": {name: summary(results[name], *HEADLINE[name]) for name in workloads},
        }
    finally:
        await _stop(engines)


def _takes(contender: Contender, workload: str) -> bool:
    return isinstance(contender, Served) or (workload != "w4" and workload not in SKIPPED.get(contender.label, ()))


def summary(by_label: dict[str, list[Figures]], figure: str, more_is_better: bool) -> dict[str, Any]:
    """Each engine's figures as median, least and greatest of the rounds, and how many times as good as each peer of
    its kind (in process, server) ours is by the one that counts: the median of the rounds' own ratios."""
    found: dict[str, Any] = {"compared_by": figure, "engines": {}, "ours_to_theirs": {}}
    for label, rounds in by_label.items():
        found["engines"][label] = {name: spread([each[name] for each in rounds]) for name in rounds[0]}
        ours = by_label.get(f"{OURS} server" if label.endswith(" server") else OURS)
        if ours is None or label.startswith(OURS) or figure not in rounds[0]:
            continue
        pairs = zip(ours, rounds, strict=True)
        ratios = [a[figure] / b[figure] if more_is_better else b[figure] / a[figure] for a, b in pairs]
        found["ours_to_theirs"][label] = spread(ratios)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    names = {"median": statistics.median(values), "least": min(values), "greatest": max(values)}
    return {name: round(value, 4) for name, value in names.items()}


async def _stop(engines: Sequence[Running]) -> None:
    await asyncio.gather(*(engine.stop() for engine in engines))


def _shown(figures: Figures) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def table(results: dict[str, Any]) -> str:
    """What was found, a line an engine and workload."""
    lines = [f"read bandwidth {results['read_bandwidth_gb_s']['median']:.1f} GB/s"]
    for name, found in results["workloads"].items():
        lines.append(f"{name}, by {found['compared_by']}:")
        for label, figures in found["engines"].items():
            shown = ", ".join(f"{key} {value['median']:.4g}" for key, value in figures.items())
            ratio = found["ours_to_theirs"].get(label)
            beside = "" if ratio is None else f"   ours is {ratio['median']:.2f} times as good"
            lines.append(f"  {label:<18} {shown}{beside}")
    return "\n".join(lines)


def main() -> None:
    """Measures, prints a table, and writes JSON and a chart where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python -m tests.bench.cpu"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--model", type=Path, help="a checkpoint of that shape that is there already")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=sorted(WORKLOADS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", help="labels of the engines to run, for instance millrace transformers")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--openvino", nargs=2, metavar=("PYTHON", "MODEL"))
    parser.add_argument("--llama-cpp", nargs=2, metavar=("PYTHON", "GGUF"))
    parser.add_argument("--llama-server", nargs=2, metavar=("BINARY", "GGUF"))
    parser.add_argument("--logs", type=Path, help="a folder for what the engines print")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--chart", type=Path, help="SVG or PNG; needs matplotlib")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_checkpoint(options.shape, Path(folder) / "model")
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        chosen = contenders(options, str(model))
        found = asyncio.run(compare(chosen, options.workloads, options.rounds, logs))
    results = {
        "shape": options.shape,
        "dtype": "bfloat16",
        "rounds": options.rounds,
        **machine(options.threads),
    } | found
    print(table(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.chart:
        draw(results, options.chart)


def machine(num_threads: int) -> dict[str, Any]:
    """What it was measured on."""
    import torch
    import transformers

    cpuinfo = Path("/proc/cpuinfo")
    names = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] if cpuinfo.exists() else []
    )
    return {
        "cpu": names[0].partition(":")[2].strip() if names else platform.processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": num_threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()

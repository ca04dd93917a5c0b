"""One stream of a packed file, beside llama.cpp on the same file in the same run.

    python -m tests.bench.gguf_speed FILE [--llama PYTHON] [--rounds 7] [--threads 2] [--json results.json]

A prompt of 128 tokens and an answer of 128. In a round each engine answers in turn, the other one stopped (SIGSTOP),
and the memory bandwidth is read before and after: a shared machine drifts, so quote the ratios. `floor_share` is the
time in which the file's weights could be read once a token, at the bandwidth of the same round, over the time that a
token took. PYTHON has llama-cpp-python installed; this one, if nothing is said.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from millrace.model.gguf.reader import open_files
from tests.bench.cpu.contenders import InProcess, start
from tests.bench.throughput import read_bandwidth_gb_s
from tests.bench.workloads import w1

OURS, THEIRS = "millrace", "llama.cpp"


def weight_bytes(file: Path) -> int:
    """Bytes of all tensors: what one token reads of a model whose embedding is its head too."""
    return sum(tensor.num_bytes for part in open_files(file) for tensor in part.tensors.values())


async def measure(options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """All rounds; the medians."""
    file, threads = str(options.file), options.threads
    contenders = [InProcess(OURS, OURS, sys.executable, file, threads)]
    contenders.append(InProcess(THEIRS, THEIRS, options.llama, file, threads))
    running = [await start(contender, logs / contender.label) for contender in contenders]
    rates: dict[str, list[float]] = {each.label: [] for each in running}
    first_ms: dict[str, list[float]] = {each.label: [] for each in running}
    bandwidths, num_bytes = [], weight_bytes(options.file)
    for round_ in range(options.rounds + 1):
        before = read_bandwidth_gb_s()
        for each in running if round_ % 2 else running[::-1]:
            with each.awake():
                figures = await each.answer("w1", w1(round_))
            if round_ > 0:  # the first is a warm-up
                rates[each.label].append(figures["decode_tok_s"])
                first_ms[each.label].append(figures["ttft_ms"])
        if round_ > 0:
            bandwidths.append((before + read_bandwidth_gb_s()) / 2)
        print({name: [round(rate, 1) for rate in taken[-1:]] for name, taken in rates.items()}, flush=True)
    for each in running:
        await each.stop()
    floors = [1e9 * bandwidth / num_bytes for bandwidth in bandwidths]
    ratios = [ours / theirs for ours, theirs in zip(rates[OURS], rates[THEIRS], strict=True)]
    shares = [ours / floor for ours, floor in zip(rates[OURS], floors, strict=True)]
    return {
        "file": options.file.name,
        "weight_bytes": num_bytes,
        "decode_tok_s": {name: round(statistics.median(taken), 1) for name, taken in rates.items()},
        "first_token_ms": {name: round(statistics.median(taken), 1) for name, taken in first_ms.items()},
        "read_gb_s": round(statistics.median(bandwidths), 1),
        "ratio": [round(value, 3) for value in sorted(ratios)],
        "median_ratio": round(statistics.median(ratios), 3),
        "floor_share": round(statistics.median(shares), 3),
    }


def main() -> None:
    """Measures, prints the medians, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--llama", default=sys.executable, help="the Python that has llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as logs:
        results = asyncio.run(measure(options, Path(logs)))
    print(json.dumps(results))
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Measures decode steps on the GPU of this machine, and writes one JSON file.

    python -m tests.bench.gpu [--shape qwen3-0.6b] [--json results.json]

Without a GPU nothing is measured, and the exit status is 2. So far it measures steps alone, against their floors:
kernels one by one, whole workloads and transformers' batching on the same requests are still to be added.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch

from .floors import GPU_SHAPES
from .steps import NUM_TIMED, NUM_WARM, Row, Subject, as_json, measure

LOADS = ((1, 1024), (64, 1024), (256, 1024), (64, 8192))  # rows, tokens of context
BLOCK_SIZE = 16


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure decode steps on a GPU.")
    parser.add_argument("--shape", choices=sorted(GPU_SHAPES), default="qwen3-0.6b")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("tests.bench.gpu: torch sees no CUDA device here, so nothing was measured", file=sys.stderr)
        return 2
    from millrace.stages.stepping.cuda_streams import CudaStreams

    device = torch.device("cuda", 0)
    sizes = [(num_rows, context + NUM_WARM + NUM_TIMED) for num_rows, context in LOADS]
    subject = Subject(GPU_SHAPES[options.shape], device, sizes, BLOCK_SIZE)
    rows: list[Row] = []
    for is_eager in (True, False):
        line = subject.line(CudaStreams(device), time.perf_counter, is_eager=is_eager)
        rows += [measure(subject, line, *load, time.perf_counter) for load in LOADS]
    for row in as_json(rows):
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    if options.json is not None:
        told = {
            "shape": options.shape,
            "device": torch.cuda.get_device_name(device),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
            "steps": as_json(rows),
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

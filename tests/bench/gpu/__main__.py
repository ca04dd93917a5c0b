"""Checks kernels and measures decode steps on the GPU of this machine, and writes one JSON file.

    python -m tests.bench.gpu [--shape qwen3-0.6b] [--seed 0] [--json results.json]

Without a GPU nothing is measured, and the exit status is 2; with a kernel that is wrong it is 1. So far it checks the
kernels of a step's state, and measures steps against their floors: the other kernels, whole workloads and transformers'
batching on the same requests are still to be added.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch

from .checks import check_step_state
from .floors import GPU_SHAPES
from .steps import NUM_TIMED, NUM_WARM, Row, Subject, as_json, measure

LOADS = ((1, 1024), (64, 1024), (256, 1024), (64, 8192))  # rows, tokens of context
BLOCK_SIZE = 16


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure decode steps on a GPU.")
    parser.add_argument("--shape", choices=sorted(GPU_SHAPES), default="qwen3-0.6b")
    parser.add_argument("--seed", type=int, default=0, help="of the inputs that kernels are checked with")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("tests.bench.gpu: torch sees no CUDA device here, so nothing was measured", file=sys.stderr)
        return 2
    from millrace.kernels import triton_step
    from millrace.stages.stepping.cuda_streams import CudaStreams

    device = torch.device("cuda", 0)
    wrong = list(check_step_state(triton_step, device, options.seed))
    for complaint in wrong:
        print(complaint)
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
            "wrong": wrong,
            "steps": as_json(rows),
        }
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Decode and batch throughput on a CPU or a GPU, beside transformers' `generate` on the same weights in the same run.

    python -m tests.bench.throughput --shape smollm2-135m --json results.json

W1: one request, 128 tokens in, 128 out: decode tokens/s. W2: 32 requests at once, prompts uniform 32..256, outputs
uniform 32..128: output tokens/s. The engines take turns, A B A B, and each figure is a median of the runs with its
least and greatest: on a shared machine quote the ratio, not the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from tests.bench.cpu.worker import FirstToken, first_token
from tests.bench.shapes import SHAPES, make_checkpoint
from tests.bench.workloads import Asked, w1, w2

Prompts = list[Asked]


class Subject(Protocol):
    """An engine under measurement."""

    def run(self, prompts: Prompts) -> list[float]:
        """Answers all prompts; seconds from the start to (the first token of the first prompt, the end)."""


class Millrace:
    """This engine, in process."""

    def __init__(self, folder: Path, device: str) -> None:
        from millrace.stages import Engine, EngineConfig

        self.loop = asyncio.new_event_loop()
        sizes = {"max_model_len": 2048, "max_num_seqs": 64}
        config = EngineConfig(model=str(folder), device=device, speculation="off", **sizes)  # random weights repeat
        self.engine = Engine(config)
        self.loop.run_until_complete(self.engine.start())

    def run(self, prompts: Prompts) -> list[float]:
        return self.loop.run_until_complete(self._run(prompts))

    async def _run(self, prompts: Prompts) -> list[float]:
        start = time.perf_counter()
        firsts = await asyncio.gather(*(first_token(self.engine, *prompt) for prompt in prompts))
        return [firsts[0] - start, time.perf_counter() - start]

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.stop())
        self.loop.close()


class Transformers:
    """`generate` on a left-padded batch, until the longest answer is done."""

    def __init__(self, folder: Path, device: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch, self.device = torch, device
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()

    def run(self, prompts: Prompts) -> list[float]:
        torch, width = self.torch, max(len(ids) for ids, _ in prompts)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in prompts], device=self.device)
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in prompts], device=self.device)
        longest = max(num_answer for _, num_answer in prompts)
        clock = FirstToken()
        start = time.perf_counter()
        with torch.inference_mode():
            self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=longest,
                min_new_tokens=longest,
                streamer=clock if len(prompts) == 1 else None,
            )
        end = time.perf_counter()
        return [(clock.at_s or end) - start, end - start]


def measure(subjects: dict[str, Subject], workload: Callable[[int], Prompts], runs: int) -> dict[str, Any]:
    """Runs the subjects in turn. For each: tokens/s as median, min and max; with one prompt, of decoding only."""
    rates: dict[str, list[float]] = {name: [] for name in subjects}
    for run in range(runs + 1):
        prompts = workload(run)
        for name, subject in subjects.items():
            first, whole = subject.run(prompts)
            num_answers = sum(num_answer for _, num_answer in prompts)
            rate = (num_answers - 1) / (whole - first) if len(prompts) == 1 else num_answers / whole
            if run > 0:  # the first is a warm-up
                rates[name].append(rate)
    return {
        name: {"median": statistics.median(values), "min": min(values), "max": max(values)}
        for name, values in rates.items()
    }


def read_bandwidth_gb_s() -> float:
    """What one pass over 1 GiB reads, GB/s, with the threads torch uses: the ceiling of decoding at batch 1."""
    data = _gibibyte()
    data.sum()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        times.append(time.perf_counter() - start)
    return data.nbytes / statistics.median(times) / 1e9


@cache
def _gibibyte() -> Any:
    import torch

    return torch.ones(2**28)


def main() -> None:
    """Measures, prints a table, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=["w1", "w2"], help="one workload alone")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    import torch
    import transformers

    results: dict[str, Any] = {
        "shape": args.shape,
        "device": args.device,
        "dtype": "bfloat16",
        "runs": args.runs,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "read_bandwidth_gb_s": read_bandwidth_gb_s(),
    }
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(args.shape, Path(folder))
        ours = Millrace(checkpoint, args.device)
        subjects: dict[str, Subject] = {"millrace": ours, "transformers": Transformers(checkpoint, args.device)}
        for name, workload in (("w1", w1), ("w2", w2)):
            if args.only in (None, name):
                results[name] = measure(subjects, workload, args.runs)
                results[name]["ratio"] = results[name]["millrace"]["median"] / results[name]["transformers"]["median"]
                print(f"{name}: {_row(results[name])}", flush=True)
        ours.close()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


def _row(result: dict[str, Any]) -> str:
    shown = [
        f"{name} {result[name]['median']:.1f} tok/s ({result[name]['min']:.1f}..{result[name]['max']:.1f})"
        for name in ("millrace", "transformers")
    ]
    return f"{', '.join(shown)}, ratio {result['ratio']:.2f}"


if __name__ == "__main__":
    main()

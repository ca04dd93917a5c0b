"""How well `millrace simulate` predicts: `python -m tests.bench.simulate_accuracy`.

A run of a model on this CPU (random weights of a real shape, or with `--shape bundled` the bundled one, whose steps are
so short that what surrounds them counts as much) is recorded and a cost model fitted to it. The same requests then run
live with other settings, and are simulated with those, as the recording tells of them: drafts, which few sequences at
once make where steps are native, turn out as right as they would have in it. A machine is faster at one time than at
another (a shared one by tens of per cent), so each live run is held against the prediction of a recording that was made
a moment before, and what counts of several such pairs is their median. Compared are output tokens per second, the
median and the 99th percentile of the time to the first token, and the order of the settings by each of them.

Requests come in a burst, so that with every setting most of them wait, and waiting times follow from how fast steps
are. Near the rate that a setting can just serve they do not: a few per cent more or less of speed there is a queue that
grows or none at all, and live runs of one setting differ among themselves by more than a prediction may be wrong
(`--request-rate` tries other loads).

The recorded run has steps of all sizes: prompts take up to 112 tokens of a step, beside 1 to 16 decoding rows. With a
smaller budget all its mixed steps would be alike, and a fit could not tell what a step costs from what a token costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from millrace.deploy.cli.simulate.sweeps import run_one
from millrace.stages.config import EngineConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.messages import Prompt, Request
from millrace.stages.params import SamplingParams
from millrace.stages.recordings.cost_model import FittedCostModel, fit
from millrace.stages.recordings.reader import Recording
from millrace.stages.recordings.workloads import Workload, WorkloadRequest, from_recording
from tests.bench.shapes import SHAPES, make_checkpoint

RECORDED = {"max_num_seqs": 16, "max_num_batched_tokens": 128}
OTHERS: tuple[dict[str, int], ...] = (
    {"max_num_seqs": 2, "max_num_batched_tokens": 256},
    {"max_num_seqs": 4, "max_num_batched_tokens": 256},
    {"max_num_seqs": 8, "max_num_batched_tokens": 256},
    {"max_num_seqs": 16, "max_num_batched_tokens": 32},
    {"max_num_seqs": 48, "max_num_batched_tokens": 256},
)
FIGURES = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms")
MAX_MODEL_LEN = 512
WITHIN = 0.10  # what a prediction is to be good to


def make_trace(num_requests: int, requests_per_s: float, seed: int) -> Workload:
    """Poisson arrivals; prompts and answers of lengths that vary as real ones do, over two orders of magnitude."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / requests_per_s, num_requests))
    prompts = np.clip(rng.lognormal(4.0, 0.8, num_requests), 4, 200).astype(int)
    answers = np.clip(rng.lognormal(3.4, 0.7, num_requests), 2, 120).astype(int)
    rows = zip((arrivals_s - arrivals_s[0]).tolist(), prompts.tolist(), answers.tolist(), strict=True)
    return Workload([WorkloadRequest(*row) for row in rows], has_prefixes=False)


async def run_live(
    model: str | None, trace: Workload, settings: dict[str, int], record: Path | None = None
) -> dict[str, float]:
    """The figures of the trace on a real engine, by the engine's own clock."""
    fixed = {"enable_prefix_caching": False, "record": None if record is None else str(record), "threads": 1}
    chosen = {} if model is None else {"model": model, "max_model_len": MAX_MODEL_LEN}
    config = EngineConfig(**fixed, **chosen, **settings)  # type: ignore[arg-type]
    async with Engine(config) as engine:
        rng, loop = np.random.default_rng(0), asyncio.get_running_loop()
        began_s = loop.time() + 0.1
        jobs = [
            asyncio.create_task(_ask(engine, f"r{number}", request, rng.integers(0, 1000, request.num_prompt), began_s))
            for number, request in enumerate(trace.requests)
        ]
        metrics = await asyncio.gather(*jobs)
        ended_s = loop.time()
    ttft_ms = [told["time_to_first_token_ms"] for told in metrics]
    num_tokens = sum(request.num_answer for request in trace.requests)
    return {
        "output_tokens_per_s": num_tokens / (ended_s - began_s),
        "ttft_p50_ms": float(np.percentile(ttft_ms, 50)),
        "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
    }


async def _ask(engine: Engine, name: str, request: WorkloadRequest, token_ids: Any, began_s: float) -> dict[str, Any]:
    await asyncio.sleep(max(0.0, began_s + request.arrival_s - asyncio.get_running_loop().time()))
    params = SamplingParams(max_tokens=request.num_answer, temperature=0.0, ignore_eos=True)
    outbox = await engine.submit(Request(name, (Prompt(token_ids=token_ids.astype(np.int32)),), params), wait=True)
    async for _ in outbox:
        pass
    told: dict[str, Any] = outbox.metrics()
    return told


def predict(trace: Workload, fitted: FittedCostModel, settings: dict[str, int]) -> dict[str, float]:
    """The same by simulation."""
    figures = run_one(trace, fitted, {"enable_prefix_caching": False, **settings})
    return {name: float(figures[name] or 0.0) for name in FIGURES}


def errors(live: dict[str, float], predicted: dict[str, float]) -> dict[str, float]:
    """How far off each prediction is, as a share of what was."""
    return {name: predicted[name] / live[name] - 1 for name in FIGURES}


def same_order(rows: list[dict[str, Any]], name: str) -> bool:
    """Whether the settings come in one order by the predicted and by the live figure, where the live ones are further
    apart than predictions are to be good to."""
    pairs = [(row["live"][name], row["predicted"][name]) for row in rows]
    return all(
        (one[0] < other[0]) == (one[1] < other[1])
        for i, one in enumerate(pairs)
        for other in pairs[i + 1 :]
        if abs(one[0] / other[0] - 1) > WITHIN
    )


def measure(model: str | None, trace: Workload, num_repeats: int, folder: Path) -> dict[str, Any]:
    """Pairs of a recorded run and a live one, in turn by setting; of each pair, what its recording predicts."""
    pairs: list[list[tuple[dict[str, float], dict[str, float]]]] = [[] for _ in OTHERS]
    fits: list[FittedCostModel] = []
    selves: list[dict[str, float]] = []
    for _ in range(num_repeats):
        for settings, found in zip(OTHERS, pairs, strict=True):
            path = folder / f"run-{len(fits)}.jsonl"
            recorded = asyncio.run(run_live(model, trace, RECORDED, path))
            live = asyncio.run(run_live(model, trace, settings))
            fitted, asked = fit(Recording(path)), from_recording(Recording(path))
            path.unlink()
            fits.append(fitted)
            selves.append(errors(recorded, predict(asked, fitted, RECORDED)))
            found.append((live, predict(asked, fitted, settings)))
            told = {name: f"{value:+.1%}" for name, value in errors(*found[-1]).items()}
            print(settings, {name: round(value, 1) for name, value in live.items()}, told, flush=True)
    rows = []
    for settings, found in zip(OTHERS, pairs, strict=True):
        off = [errors(*pair) for pair in found]
        rows.append(
            {
                "settings": settings,
                "live": _median([live for live, _ in found]),
                "predicted": _median([predicted for _, predicted in found]),
                "errors": _median(off),
                "all_errors": {name: [round(each[name], 4) for each in off] for name in FIGURES},
                "live_spread": {name: _spread([live[name] for live, _ in found]) for name in FIGURES},
            }
        )
    return {
        "machine": platform.processor() or platform.machine(),
        "recorded": RECORDED,
        "num_requests": len(trace.requests),
        "num_pairs": num_repeats,
        "cost_model": asdict(fits[-1].model),
        "fit": {"num_steps": fits[-1].num_steps, "mean_error": median(one.mean_error for one in fits)},
        "errors_of_the_recorded_setting": _median(selves),
        "rows": rows,
        "worst_error": {name: max(abs(row["errors"][name]) for row in rows) for name in FIGURES},
        "same_order": {name: same_order(rows, name) for name in FIGURES},
        "is_met": all(abs(row["errors"][name]) <= WITHIN for row in rows for name in FIGURES),
    }


def _median(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(each[name] for each in found) for name in FIGURES}


def _spread(values: list[float]) -> float:
    """From the least to the most, as a share of the least."""
    return round(max(values) / min(values) - 1, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=["bundled", *SHAPES], default="smollm2-135m")
    parser.add_argument("--num-requests", type=int, default=60)
    parser.add_argument("--request-rate", type=float, default=400.0, help="requests a second")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of each setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write the result, as JSON")
    options = parser.parse_args()
    trace = make_trace(options.num_requests, options.request_rate, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = None if options.shape == "bundled" else str(make_checkpoint(options.shape, Path(folder) / "model"))
        result = {"shape": options.shape} | measure(model, trace, options.repeats, Path(folder))
    for row in result["rows"]:
        off = ", ".join(
            f"{name} {row['live'][name]:.1f}, predicted {row['predicted'][name]:.1f} ({row['errors'][name]:+.1%})"
            for name in FIGURES
        )
        print(f"{row['settings']}: {off}")
    print(f"fit: {result['fit']}; its own setting: {result['errors_of_the_recorded_setting']}")
    print(f"worst: {result['worst_error']}\nsame order: {result['same_order']}")
    if options.save is not None:
        options.save.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

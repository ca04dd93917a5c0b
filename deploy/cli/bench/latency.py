"""`millrace bench latency`: times of repeated batches, with the engine in this process."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from ....stages.config import EngineConfig
from ...config import ServerConfig
from .measures import RequestRecord, summarize
from .offline import make_engine, make_requests, make_rng, run_request
from .report import at_least_one, check_result, print_errors, progress, publish

if TYPE_CHECKING:
    from ....stages.engine.engine import Engine

PERCENTILES = (10, 25, 50, 75, 90, 99)


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 1 if a request failed."""
    at_least_one(options, "input_len", "output_len", "batch_size", "num_iters")
    check_result(options)
    return asyncio.run(_run(options, engine_config))


async def _run(options: argparse.Namespace, config: EngineConfig) -> int:
    async with make_engine(config) as engine:
        settings = {"model_id": engine.info.model_id, "batch_size": options.batch_size}
        settings |= {"input_len": options.input_len, "output_len": options.output_len}
        latencies_s, records = await measure(engine, options, config.seed)
    publish(options, "Latency Benchmark Result", settings, _figures(latencies_s) | summarize(records, sum(latencies_s)))
    print(f"Avg latency: {np.mean(latencies_s)} seconds")
    for percentile in PERCENTILES:
        print(f"{percentile}% percentile latency: {np.percentile(latencies_s, percentile)} seconds")
    print_errors(record.error for record in records if record.error is not None)
    return 1 if any(record.error is not None for record in records) else 0


async def measure(engine: Engine, options: argparse.Namespace, seed: int) -> tuple[list[float], list[RequestRecord]]:
    """(seconds of each measured batch, records of all its requests).

    Every batch has new prompts, so that none finds a cached prefix.
    """
    rng, latencies_s, records = make_rng(seed), [], []
    with progress(options.num_iters, "batch") as bar:
        for number in range(-max(options.num_iters_warmup, 0), options.num_iters):
            requests = make_requests(engine, options, options.batch_size, rng)
            began_s = time.perf_counter()
            answers = await asyncio.gather(*(run_request(engine, request) for request in requests))
            if number >= 0:
                latencies_s.append(time.perf_counter() - began_s)
                records += answers
                bar.update()
    return latencies_s, records


def _figures(latencies_s: list[float]) -> dict[str, Any]:
    found = {str(percentile): float(np.percentile(latencies_s, percentile)) for percentile in PERCENTILES}
    return {"avg_latency": float(np.mean(latencies_s)), "latencies": latencies_s, "percentiles": found}

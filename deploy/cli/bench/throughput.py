"""`millrace bench throughput`: throughput with all requests submitted at once, in this process."""

from __future__ import annotations

import argparse
import asyncio
import time
from typing import TYPE_CHECKING, Any

from ....stages.config import EngineConfig
from ...config import ServerConfig
from .load import BenchRequest
from .measures import RequestRecord, summarize
from .offline import make_engine, make_requests, make_rng, run_request
from .report import at_least_one, check_result, print_errors, progress, publish

if TYPE_CHECKING:
    from ....stages.engine.engine import Engine


def run(options: argparse.Namespace, engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Runs the command. 1 if a request failed."""
    at_least_one(options, "input_len", "output_len", "num_prompts")
    check_result(options)
    return asyncio.run(_run(options, engine_config))


async def _run(options: argparse.Namespace, config: EngineConfig) -> int:
    async with make_engine(config) as engine:
        requests = make_requests(engine, options, options.num_prompts, make_rng(config.seed))
        settings = {"model_id": engine.info.model_id, "num_prompts": len(requests)}
        elapsed_s, records = await measure(engine, requests)
    report = summarize(records, elapsed_s)
    figures = _figures(report)
    publish(options, "Throughput Benchmark Result", settings, figures | report)
    print(
        f"Throughput: {figures['requests_per_second']:.2f} requests/s, "
        f"{figures['tokens_per_second']:.2f} total tokens/s, {report['output_throughput']:.2f} output tokens/s"
    )
    print_errors(record.error for record in records if record.error is not None)
    return 1 if report["failed"] else 0


async def measure(engine: Engine, requests: list[BenchRequest]) -> tuple[float, list[RequestRecord]]:
    """(seconds of the whole run, record of each request).

    At most `max_waiting_requests` requests are submitted at once; the times of the others begin later.
    """
    room = asyncio.Semaphore(engine.config.max_waiting_requests)

    async def one(request: BenchRequest, bar: Any) -> RequestRecord:
        async with room:
            record = await run_request(engine, request)
        bar.update()
        return record

    with progress(len(requests), "request") as bar:
        began_s = time.perf_counter()
        records = await asyncio.gather(*(one(request, bar) for request in requests))
        return time.perf_counter() - began_s, records


def _figures(report: dict[str, Any]) -> dict[str, Any]:
    """The results under the names of `vllm bench throughput`."""
    return {
        "elapsed_time": report["duration"],
        "num_requests": report["completed"],
        "total_num_tokens": report["total_input_tokens"] + report["total_output_tokens"],
        "requests_per_second": report["request_throughput"],
        "tokens_per_second": report["total_token_throughput"],
    }

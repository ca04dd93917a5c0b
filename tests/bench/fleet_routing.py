"""The rules of the router beside each other, on simulated engines with the shipped schedule and allocate code.

    python -m tests.bench.fleet_routing mooncake --trace mooncake_conversation.jsonl [--requests 2000]
    python -m tests.bench.fleet_routing hot
    python -m tests.bench.fleet_routing azure --trace azure_llm_2023_conv.csv [--engines 100] [--seconds 300]

`mooncake`: conversations with common prefixes on 8 engines, and on one with 8 times the memory, rows and speed, which
is the most that any rule could find in caches. `hot`: all prompts with one prefix, and nine in ten of them, on 8
engines. `azure`: the arrivals of as many services as engines, each some minutes of the trace that begin elsewhere;
`wall_s` is the time that the simulation takes. An engine has the steps of an 8B model on an A100 with 80 GB.
`--json FILE` saves the rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from millrace.deploy.cli.simulate.group_processes import EnginesInProcess
from millrace.stages.recordings.cost_model import CostModel
from millrace.stages.recordings.fleet.engine_group import EngineGroup, EnginesHere
from millrace.stages.recordings.fleet.fleet_simulation import FleetSimulation
from millrace.stages.recordings.recorded_engine import RecordedEngine
from millrace.stages.recordings.simulated_engine import AdmissionLimits
from millrace.stages.recordings.workloads import Workload, WorkloadRequest, read_trace
from millrace.stages.routing.policies import POLICIES

ENGINE = RecordedEngine(
    num_blocks=27_000,
    num_host_blocks=0,
    block_size=16,
    max_model_len=131_072,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    steps_in_flight=2,
    enable_chunked_prefill=True,
    enable_prefix_caching=True,
    max_waiting=4096,
    scheduler="priority",
    priority_ageing_s=None,
)
COSTS = CostModel(  # 16 GB of weights and 128 KiB of keys a token at 2 TB/s, 16 GFLOP a token at 200 TFLOP/s
    step_s=0.01,
    prefill_token_s=8e-5,
    prefill_pair_s=1.3e-9,
    decode_row_s=1e-5,
    decode_context_s=6.5e-8,
    mixed_step_s=0.001,
    started_s=2e-4,
)
UNLIMITED = AdmissionLimits(max_admitted_requests=1 << 20, max_waiting_requests=1 << 20)
LEAST_REQUESTS = 500  # for each process: fewer take less time than its start
HOT_TOKENS, HOT_RATE = 4096, 40.0  # of the common prefix; requests a second


def run(
    trace: Workload, policy: str, engines: int, engine: RecordedEngine = ENGINE, costs: CostModel = COSTS
) -> dict[str, Any]:
    """The figures of a run, on as many cores as its requests are worth."""
    engine = replace(engine, enable_prefix_caching=trace.has_prefixes)
    count = max(1, min(len(os.sched_getaffinity(0)), engines, len(trace.requests) // LEAST_REQUESTS))
    began = time.monotonic()
    with ExitStack() as stack:
        groups: dict[int, EngineGroup] = {}
        for first in range(count):
            numbers = range(first, engines, count)
            group: EngineGroup
            if count == 1:
                group = EnginesHere(numbers, engine, costs, UNLIMITED)
            else:
                group = EnginesInProcess(numbers, engine, costs, UNLIMITED)
                stack.callback(group.close)
            groups |= dict.fromkeys(numbers, group)
        found = FleetSimulation(groups, engine, POLICIES[policy]()).run(trace).summary()
    shown = ("num_requests", "finished", "cached_tokens", "ttft_p50_ms", "ttft_p99_ms", "itl_p99_ms", "imbalance")
    row = {"policy": policy, "engines": engines} | {name: found[name] for name in shown}
    row |= {"device_busy": found["device_busy"], "wall_s": round(time.monotonic() - began, 1)}
    print(
        "  ".join(
            f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
    )
    return row


# -- the workloads


def run_mooncake(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each rule on 8 engines, then one engine of eight times everything."""
    trace = read_trace(options.trace).scaled(times=options.times, most=options.requests)
    rows = [run(trace, policy, 8) for policy in options.policy.split(",")]
    large = replace(
        ENGINE,
        num_blocks=8 * ENGINE.num_blocks,
        max_num_seqs=8 * ENGINE.max_num_seqs,
        max_num_batched_tokens=8 * ENGINE.max_num_batched_tokens,
    )
    parts = ("prefill_token_s", "prefill_pair_s", "decode_row_s", "decode_context_s", "started_s")
    fast = replace(COSTS, **{name: getattr(COSTS, name) / 8 for name in parts})
    rows.append(run(trace, "soonest", 1, large, fast) | {"policy": "one engine, 8 times the memory"})
    _compare(rows)
    return rows


def _compare(rows: Sequence[dict[str, Any]]) -> None:
    by_policy = {row["policy"]: row for row in rows}
    one, soonest, least = rows[-1], by_policy.get("soonest"), by_policy.get("least-work")
    if soonest is not None:
        print(f"cached tokens by those of one engine: {soonest['cached_tokens'] / one['cached_tokens']:.3f}")
    if soonest is not None and least is not None:
        print(f"p50 TTFT by least-work's: {soonest['ttft_p50_ms'] / least['ttft_p50_ms']:.3f}")


def hot_workload(num_requests: int, share: float, seed: int = 0) -> Workload:
    """Prompts of which that share begins with one and the same prefix, the others with one of their own."""
    rng = np.random.default_rng(seed)
    arrivals_s = np.cumsum(rng.exponential(1 / HOT_RATE, num_requests))
    blocks = HOT_TOKENS // 512
    requests = []
    for number, arrival_s in enumerate(arrivals_s.tolist()):
        which = 0 if rng.random() < share else 1 + number
        hash_ids = tuple(which * blocks + block for block in range(blocks))
        length, answer = HOT_TOKENS + int(rng.integers(64, 1024)), int(rng.integers(64, 512))
        requests.append(WorkloadRequest(arrival_s, length, answer, hash_ids=hash_ids))
    return Workload(requests, has_prefixes=True)


def run_hot(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each rule on 8 engines, for each share of the hot prefix."""
    rows = []
    for share in (1.0, 0.9):
        trace = hot_workload(options.requests or 4_000, share)
        print(f"{share:.0%} of the prompts with one prefix of {HOT_TOKENS} tokens")
        rows += [run(trace, policy, 8) | {"share": share} for policy in options.policy.split(",")]
    return rows


def run_azure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each rule with the arrivals of as many services as engines, each a part of the trace that begins elsewhere."""
    whole = read_trace(options.trace).requests
    last_s = whole[-1].arrival_s
    rng, requests = np.random.default_rng(0), []
    for _ in range(options.engines):
        from_s = float(rng.uniform(0.0, max(last_s - options.seconds, 0.0)))
        some = [one for one in whole if from_s <= one.arrival_s < from_s + options.seconds]
        requests += [replace(one, arrival_s=one.arrival_s - from_s) for one in some]
    requests.sort(key=lambda request: request.arrival_s)
    trace = Workload(requests, has_prefixes=False).scaled(times=options.times, most=options.requests)
    return [run(trace, policy, options.engines) for policy in options.policy.split(",")]


WORKLOADS = {"mooncake": run_mooncake, "hot": run_hot, "azure": run_azure}
RULES = {
    "mooncake": "soonest,least-work,round-robin,prefix-only",
    "hot": "soonest,least-work,prefix-only",
    "azure": "soonest",
}


def main() -> None:
    """Runs one workload."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workload", choices=tuple(WORKLOADS))
    parser.add_argument("--trace", type=Path, help="the published trace, of mooncake and azure")
    parser.add_argument("--policy", help="rules of the router, with commas")
    parser.add_argument("--requests", type=int, help="only the first ones")
    parser.add_argument("--engines", type=int, default=100, help="of azure")
    parser.add_argument("--seconds", type=float, default=300.0, help="of azure's trace, for each engine")
    parser.add_argument("--times", type=float, default=1.0, help="factor for the time between arrivals")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    if options.workload != "hot" and options.trace is None:
        parser.error(f"{options.workload} needs --trace FILE")
    options.policy = options.policy or RULES[options.workload]
    gc.disable()  # as `millrace simulate` does
    rows = WORKLOADS[options.workload](options)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A fleet of scripted engines in virtual time whose steps take what a cost model says, and `millrace simulate` of it.

The stages, processes, links and router are those that serve; links delay what is sent by up to a millisecond. So what
the simulation of a fleet leaves out shows as a difference, on any machine alike.

`python -m tests.simulation.timed_fleet` compares more requests than CI.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from millrace.runtime.env.log import captured_logs
from millrace.runtime.simulation.env import JobBlocks
from millrace.runtime.simulation.run import SimEnv, run
from millrace.stages.config import EngineConfig
from millrace.stages.engine.engine import Engine
from millrace.stages.fleet.fleet_processes import FleetProcesses
from millrace.stages.messages import Prompt, Request
from millrace.stages.outputs import ModelInfo
from millrace.stages.params import SamplingParams
from millrace.stages.recordings.cost_model import CostModel
from millrace.stages.recordings.fleet.engine_group import EnginesHere
from millrace.stages.recordings.fleet.fleet_simulation import REPORT_S, FleetSimulation
from millrace.stages.recordings.recorded_engine import RecordedEngine
from millrace.stages.recordings.simulated_engine import AdmissionLimits
from millrace.stages.recordings.workloads import Workload, WorkloadRequest
from millrace.stages.routing.policies import POLICIES
from millrace.stages.schedule.step_timing.step_time_model import StepContents
from millrace.stages.split.remote_core import RemoteCore
from millrace.stages.testing.scripted.engine import _device, _loaded, _model, _resolved
from tests.simulation.fleet import SimHosts
from tests.simulation.memory_link import MemoryChild, in_memory

NUM_ENGINES = 4
CONFIG = EngineConfig(
    max_model_len=1024,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    num_gpu_blocks=600,
    block_size=16,
    steps_in_flight=2,
    data_parallel_size=NUM_ENGINES,
    max_admitted_requests=10_000,
)
COSTS = CostModel(step_s=0.012, prefill_token_s=2e-4, decode_row_s=5e-4, decode_context_s=1e-6)
FIGURES = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "cached_tokens")


def drawn(count: int, rate: float, num_prefixes: int, seed: int = 0) -> Workload:
    """Requests of 320 to 640 tokens, of which the first 256 are one of so many prefixes."""
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(97, 122, (num_prefixes, 256))
    requests = []
    for at_s in np.cumsum(rng.exponential(1 / rate, count)).tolist():
        own = rng.integers(97, 122, rng.integers(64, 384))
        token_ids = np.concatenate([prefixes[rng.integers(num_prefixes)], own]).astype(np.int32)
        requests.append(WorkloadRequest(at_s, len(token_ids), int(rng.integers(4, 96)), token_ids=token_ids))
    return Workload(requests, has_prefixes=True)


def simulated(trace: Workload) -> dict[str, float]:
    """The figures by the simulation of a fleet."""
    engine = RecordedEngine(
        num_blocks=CONFIG.num_gpu_blocks or 0,
        num_host_blocks=0,
        block_size=CONFIG.block_size,
        max_model_len=1024,
        max_num_seqs=CONFIG.max_num_seqs,
        max_num_batched_tokens=256,
        steps_in_flight=2,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        max_waiting=512,
        scheduler="priority",
        priority_ageing_s=CONFIG.priority_ageing_s,
    )
    group = EnginesHere(range(NUM_ENGINES), engine, COSTS, AdmissionLimits(max_admitted_requests=10_000))
    result = FleetSimulation(dict.fromkeys(range(NUM_ENGINES), group), engine, POLICIES["soonest"]()).run(trace)
    figures = result.summary()
    return {name: float(figures[name] or 0.0) for name in FIGURES}


def live(trace: Workload, seed: int = 1) -> dict[str, float]:
    """The figures of the fleet itself."""
    with captured_logs():
        delays = {"device": (0.0, 0.0), "completion": (0.0, 0.0)}
        result = run(
            partial(_live, trace),
            seed=seed,
            policy="fifo",
            thread_delay_s=(0.0, 0.001),
            worker_delay_s=delays,
            max_callbacks=50_000_000,
        )
    return result.value


class TimedChild(MemoryChild):
    """An engine process in memory whose steps take what `COSTS` says."""

    def __init__(self, *ends: Any) -> None:
        self.allocator: Any = None
        self.made.append(self)
        super().__init__(*ends)

    made: list[TimedChild]

    def _load(self, config: EngineConfig, env: Any, phases: Any) -> Any:
        model = _model(config, None, env)
        device = _device(model)
        timed, waited = device._timed_forward, set()

        def wait_and_forward(since_ns: int, grant: Any, forward: Any) -> Any:
            if grant.step not in waited:
                waited.add(grant.step)
                num_copied = sum(len(copy.sources) for copy in grant.copies)
                contents = StepContents.of(grant.starts, grant.num_certain, num_copied, len(grant.started), 0)
                raise JobBlocks(COSTS.seconds(contents))
            return timed(since_ns, grant, forward)

        device._timed_forward = wait_and_forward  # type: ignore[method-assign]
        return _loaded(config, model), device


class TimedFleet(Engine):
    """A fleet of them."""

    def __init__(self, config: EngineConfig, env: SimEnv) -> None:
        async def read_text(config: EngineConfig, phases: Any, env: Any) -> Callable[[ModelInfo], Any]:
            loaded = _loaded(config, _model(config, None, env))
            return lambda info: replace(loaded, info=info)

        processes = partial(FleetProcesses, make_hosts=SimHosts)
        core = partial(RemoteCore, make_processes=processes, read_text=read_text, warm_up=None)
        super().__init__(_resolved(config, {}), core=core, env=env)


async def _live(trace: Workload, env: SimEnv) -> dict[str, float]:
    children: list[TimedChild] = []
    kind = type("Child", (TimedChild,), {"made": children})
    with in_memory(env, lambda *_: None, kind):
        engine = TimedFleet(CONFIG, env)
        await engine.start()
        ticking = asyncio.create_task(_report(env, children))
        try:
            began_s = env.now() + 1.0
            jobs = [_ask(engine, env, f"r{at}", request, began_s) for at, request in enumerate(trace.requests)]
            told = await asyncio.gather(*jobs)
            took_s = env.now() - began_s
            caches = [child.process._loop.core.allocate.allocator.cache for child in children]
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            await engine.stop()
            await env.aclose()
    firsts, gaps = zip(*told, strict=True)
    return {
        "output_tokens_per_s": sum(request.num_answer for request in trace.requests) / took_s,
        "ttft_p50_ms": float(np.percentile(firsts, 50)),
        "ttft_p99_ms": float(np.percentile(firsts, 99)),
        "itl_p50_ms": float(np.percentile(np.concatenate(gaps), 50)),
        "cached_tokens": float(sum(cache.num_hits for cache in caches)),
    }


async def _report(env: SimEnv, children: Sequence[TimedChild]) -> None:
    """The watch of a pipeline does not tick in virtual time."""
    while True:
        await env.sleep(REPORT_S)
        for child in children:
            child.process.report_to_router()


async def _ask(engine: Engine, env: SimEnv, name: str, request: WorkloadRequest, began_s: float) -> tuple[float, Any]:
    """Milliseconds to the first token, and between tokens."""
    sent_s = began_s + request.arrival_s
    await env.sleep(sent_s - env.now())
    params = SamplingParams(max_tokens=request.num_answer, temperature=0.0, ignore_eos=True)
    outbox = await engine.submit(Request(name, (Prompt(token_ids=request.token_ids),), params), wait=True)
    moments = []
    async for outputs in outbox:
        moments += [env.now()] * sum(len(output.token_ids) for output in outputs)
    return 1e3 * (moments[0] - sent_s), 1e3 * np.diff(moments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=600)
    parser.add_argument("--request-rate", type=float, default=14.0, help="requests a second")
    parser.add_argument("--num-prefixes", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    trace = drawn(options.num_requests, options.request_rate, options.num_prefixes, options.seed)
    found, predicted = live(trace), simulated(trace)
    for name in FIGURES:
        off = predicted[name] / found[name] - 1
        print(f"{name}: live {found[name]:,.1f}, simulated {predicted[name]:,.1f} ({off:+.1%})")


if __name__ == "__main__":
    main()

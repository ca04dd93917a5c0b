"""Whether speed holds where it might not: with many sequences, drawn tokens, a long context, a busy neighbour.

    python -m tests.bench.cpu.holding [--shape smollm2-135m] [--rounds 3] [--json results.json]

This engine in process, prefix cache and drafts off. Growth: output tokens/s of 8, 32, 128 and 512 requests at once, 32
tokens in and out, and how many times as many each is as the one before it, in the same round. Drawn: W2 and W4 (16 in
flight) at temperature 1.0 and top_p 0.95 beside greedy, in turn. Long: the time of attention in decoding steps at 8k
tokens of context, beside that in which its keys and values are read once; the bandwidth for that is read before and
after, and the prefix cache is on, so that both are within a second of the steps. Neighbour: the 95th percentile of a
decoding step's time, eight sequences, with and without another process that is always busy, on each core in turn, of
which the worst counts. Memory: the most this process had, less weights and the cache as far as it was ever used.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from millrace.runtime.env.cpus import Cpus
from millrace.stages import Engine, EngineConfig, SamplingParams
from millrace.stages.engine.wiring import EngineStages
from tests.bench.cpu.figures import machine, spread, tell
from tests.bench.cpu.parts import look, native_of
from tests.bench.shapes import SHAPES, make_checkpoint
from tests.bench.workloads import IN_FLIGHT, WORKLOADS, Asked, num_tokens

CONCURRENCY = (8, 32, 128, 512)
NUM_TOKENS = 32  # in and out, of a request of the growth
CONTEXT, MAX_MODEL_LEN = 7936, 8192
NUM_LOOKS = 9  # at the long context, after one that warms up
NUM_BESIDE, NUM_STEPS = 8, 200  # sequences and steps beside a neighbour
MOST_WAITS = 10  # for the cores to be free after it, times so many steps
BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"  # on this CPU
DRAWN_IN = ("w2", "w4")
DRAWN = {"temperature": 1.0, "top_p": 0.95}
KV_BYTES = 1 << 30


async def throughput(engine: Engine, asked: Sequence[Asked], in_flight: int | None = None, **params: float) -> float:
    """Output tokens/s of all requests, so many of them at once (None: all)."""
    room = asyncio.Semaphore(in_flight or len(asked))

    async def answer(ids: list[int], num_answer: int) -> int:
        chosen = SamplingParams(**{"temperature": 0.0, **params}, max_tokens=num_answer, ignore_eos=True)
        async with room:
            async for output in engine.generate(ids, chosen):
                num_tokens = output.num_generated_tokens
        return num_tokens

    began_s = time.perf_counter()
    counts = await asyncio.gather(*(answer(*one) for one in asked))
    return sum(counts) / (time.perf_counter() - began_s)


async def growth(engine: Engine, run: int) -> dict[int, float]:
    """Tokens/s by requests at once."""
    draw = random.Random(f"growth-{run}")
    found = {}
    for number in CONCURRENCY:
        asked = [([draw.randrange(300, 15_000) for _ in range(NUM_TOKENS)], NUM_TOKENS) for _ in range(number)]
        found[number] = await throughput(engine, asked)
    return found


async def p95_step_ms(engine: Engine, run: int) -> float:
    """Of the gaps between the tokens of an answer that seven others run beside."""
    draw = random.Random(f"neighbour-{run}")
    times: list[float] = []

    async def answer(is_watched: bool) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_STEPS, ignore_eos=True)
        ids = [draw.randrange(300, 15_000) for _ in range(NUM_TOKENS)]
        gaps = [time.perf_counter() async for _ in engine.generate(ids, params)]
        if is_watched:
            times.extend(gaps)

    await asyncio.gather(*(answer(number == 0) for number in range(NUM_BESIDE)))
    return 1e3 * float(np.percentile(np.diff(times[4:]), 95))


async def beside_a_neighbour(engine: Engine, run: int) -> tuple[float, float]:
    """The same, alone, and beside a process that computes all the time: on each core in turn, of which the worst. After
    each the engine finds its cores free again, before anything else is measured."""
    alone = await p95_step_ms(engine, run)
    busy_ms = []
    for cpu in Cpus.of_this_process().cores:
        with subprocess.Popen([sys.executable, "-c", BUSY, str(cpu)]) as neighbour:
            try:
                busy_ms.append(await p95_step_ms(engine, run))
                assert neighbour.poll() is None, f"no neighbour computed on CPU {cpu}"
            finally:
                neighbour.kill()
        await compute_until_alone(engine, run)
    return alone, max(busy_ms)


async def compute_until_alone(engine: Engine, run: int) -> None:
    """Until all threads compute again: another tenant may use the machine for a while, too."""
    neighbours = native_of(engine)._thread_throttle
    for _ in range(MOST_WAITS):
        await p95_step_ms(engine, run)
        if neighbours.limit == neighbours.num_threads:
            return
    raise AssertionError(f"threads are still left out after {MOST_WAITS * NUM_STEPS} steps")


def peak_mib() -> float:
    """The most memory this process had, since it began or since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM:"))


def forget_peak() -> None:
    """Takes note of what is there now as the most there was: it is counted anew."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_mib(engine: Engine, while_loading: float) -> dict[str, float]:
    """The most this process had since it was ready, and what is neither weights nor cache: runs of blocks of which any
    was used, and memory that was taken for those that come next. Besides, the most until then: weights take more
    before they are coded."""
    assert isinstance(engine.core.stages, EngineStages)
    cache: Any = engine.core.stages.loaded.runner.cache  # type: ignore[attr-defined]
    num_used = int(np.count_nonzero(cache.data[0].any(axis=(1, 2, 3))))
    used = num_used * cache.data[:, 0].nbytes
    taken = max(used, cache.ahead.num_taken)
    peak = peak_mib() * 2**20
    weights = native_of(engine).weights.num_bytes + native_of(engine).weights.screen_bytes
    return {
        "peak": peak / 2**20,
        "peak_while_loading": while_loading,
        "weights": weights / 2**20,
        "used_cache": used / 2**20,
        "taken_cache": taken / 2**20,
        "beyond": (peak - weights - taken) / 2**20,
    }


async def at_long_context(config: EngineConfig) -> dict[str, Any]:
    """Attention of one sequence, in several looks; the first one, which computes the prompt, is a warm-up."""
    async with Engine(replace(config, enable_prefix_caching=True)) as engine:
        rows = [await look(engine, 1, CONTEXT) for _ in range(NUM_LOOKS + 1)][1:]
    to_floor = [row["attention_ms"] / row["kv_floor_ms"] for row in rows]
    _say(f"attention at {CONTEXT} tokens, to its floor: {', '.join(f'{ratio:.2f}' for ratio in to_floor)}")
    names = ("context", "attention_ms", "kv_floor_ms", "read_bandwidth_gb_s")
    return {
        "attention_at_8k": {name: spread([row[name] for row in rows]) for name in names},
        "attention_to_floor_at_8k": spread(to_floor),
    }


async def measure(model: str, rounds: int) -> dict[str, Any]:
    """All figures; the first round is a warm-up."""
    limits = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": max(CONCURRENCY), "kv_cache_bytes": KV_BYTES}
    config = EngineConfig(model=model, device="cpu", speculation="off", enable_prefix_caching=False, **limits)  # type: ignore[arg-type]
    grown: dict[int, list[float]] = {number: [] for number in CONCURRENCY}
    drawn: dict[str, list[float]] = {name: [] for name in DRAWN_IN}
    ratios: list[float] = []
    alone: list[float] = []
    async with Engine(config) as engine:
        while_loading = peak_mib()
        forget_peak()
        for run in range(rounds + 1):
            found = await growth(engine, run)
            shares = {name: await _drawn_share(engine, name, run) for name in drawn}
            quiet, busy = await beside_a_neighbour(engine, run)
            _say(f"round {run}: {found}, drawn {shares}, p95 step {quiet:.1f} ms, beside a neighbour {busy:.1f}")
            if not run:
                memory = memory_mib(engine, while_loading)
                continue
            for number, rate in found.items():
                grown[number].append(rate)
            for name, share in shares.items():
                drawn[name].append(share)
            ratios.append(busy / quiet)
            alone.append(quiet)
    long = await at_long_context(config)
    steps = itertools.pairwise(CONCURRENCY)
    growths = {(few, many): [b / a for a, b in zip(grown[few], grown[many], strict=True)] for few, many in steps}
    return {
        "output_tok_s_by_concurrency": {str(number): spread(rates) for number, rates in grown.items()},
        "growth_in_a_round": {f"{few} to {many}": spread(times) for (few, many), times in growths.items()},
        "drawn_to_greedy": {name: spread(shares) for name, shares in drawn.items()},
        **long,
        "p95_step_ms": spread(alone),
        "p95_step_beside_a_neighbour": spread(ratios),
        "memory_mib": {name: round(size, 1) for name, size in memory.items()},
    }


async def _drawn_share(engine: Engine, name: str, run: int) -> float:
    """Tokens/s of drawn tokens by those of greedy ones; who goes first changes."""
    kinds: list[dict[str, float]] = [{}, DRAWN]
    rates = {}
    for number in (0, 1) if run % 2 else (1, 0):
        asked = WORKLOADS[name](2 * run + number)
        rates[number] = await throughput(engine, asked, IN_FLIGHT[name], **kinds[number])
    return rates[1] / rates[0]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="smollm2-135m")
    parser.add_argument("--model", type=Path, help="a checkpoint of that shape")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_checkpoint(options.shape, Path(folder))
        found = asyncio.run(measure(str(model), options.rounds))
    results = {
        "shape": options.shape,
        "rounds": options.rounds,
        "num_looks": NUM_LOOKS,
        "tokens": {name: num_tokens(WORKLOADS[name](0)) for name in DRAWN_IN},
        "measured_on": datetime.date.today().isoformat(),
        **machine(len(Cpus.of_this_process().cores)),
        **found,
    }
    tell(results, options.json)


if __name__ == "__main__":
    main()

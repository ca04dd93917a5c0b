"""What it costs to schedule: python -m tests.bench.scheduling_cost [--sizes 64 256 1024 4096] [--output results.json]

Endless answers, `size` of them running, and a device that takes no time. Two readings, in microseconds a step and per
running request:

    books   the plain code: a plan, its blocks, the report, and the outcome of the step, in one loop by themselves
    stages  the time in which the event loop runs the tasks of schedule and allocate in the real pipeline: the books,
            receiving, sending, tracing and the histograms, among the work of all other stages and of `size` readers

With and without a prefix cache; the books also for the kinds of memory of Gemma 3 270M, 3 layers that keep all tokens
and 15 that keep the last 512, with answers to longer prompts. `allocate` is the share of the allocator.

All are processor time of the thread, so that other work of the machine is not in them (beside it the clock on the wall
shows two to three times as much), and medians of windows. A window of the books is 32 steps, so that it has its share
of what comes once in a while: a block is full after 16, and what was generated is written down after 32.

Asked: at most 1 us per running request at 256 and at 1,024, and a cost per request that does not grow from 64 to 4,096;
vLLM takes 8.2 at 256.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from millrace.kernels.layout.kv_layout import KVKind, KVLayout
from millrace.stages.allocate.allocator import Allocator
from millrace.stages.allocate.prefix_cache import PrefixCache
from millrace.stages.messages import StepDone, StepGrant, TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.schedule.scheduler import Scheduler, StepLimits
from tests.bench.pipeline_cost import MAX_MODEL_LEN, REFERENCE_HOP_US, host_cost, queue_hop_us

SIZES = (64, 256, 1024, 4096)
NUM_PROMPT = 10  # tokens
BLOCK_SIZE = 16
WINDOW = 512
WINDOW_STEPS = 32
WARM_UP_WINDOWS = 2
ALLOWED_US = {256: 1.0, 1024: 1.0}


def kinds_of(size: int) -> KVLayout:
    """The layout of Gemma 3 270M, with room for `size` sequences."""
    head, width = 1, 256
    layer_bytes = BLOCK_SIZE * 2 * head * width * 2  # keys and values, two bytes each
    kinds = [
        KVKind("full", tuple(range(5, 18, 6)), None, head, width, width, 3 * layer_bytes),
        KVKind("window", tuple(i for i in range(18) if i % 6 != 5), WINDOW, head, width, width, 15 * layer_bytes),
    ]
    probe = KVLayout.of(kinds, BLOCK_SIZE, 2**30)
    return KVLayout.of(kinds, BLOCK_SIZE, size * probe.slabs_of_one(MAX_MODEL_LEN) * probe.slab_bytes)


class Books:
    """A scheduler and an allocator that serve `size` endless answers, two steps in flight."""

    def __init__(self, size: int, *, has_cache: bool, has_kinds: bool = False) -> None:
        self.num_prompt = NUM_PROMPT + WINDOW * has_kinds  # so that windows are full
        limits = StepLimits(size, max(2048, self.num_prompt * size), MAX_MODEL_LEN, BLOCK_SIZE)
        self.scheduler = Scheduler(limits)
        num_blocks = size * (MAX_MODEL_LEN // BLOCK_SIZE)
        cache = PrefixCache(BLOCK_SIZE) if has_cache else None
        layout = kinds_of(size) if has_kinds else None
        self.allocator = Allocator(num_blocks, BLOCK_SIZE, size, MAX_MODEL_LEN, cache, None, layout)
        self.allocate_s = 0.0  # seconds in the allocator
        self._flights: deque[StepGrant] = deque()
        params = SamplingParams(max_tokens=MAX_MODEL_LEN - 2 * self.num_prompt, temperature=0.0, ignore_eos=True)
        for i in range(size):
            prompt = np.random.default_rng(i).integers(0, 50_000, self.num_prompt + i % BLOCK_SIZE, np.int32)
            self.scheduler.add(TokenRequest(f"r{i}", 0, prompt, params, i))

    def step(self) -> float:
        """Plans until there is no credit left, then tells of the oldest step. Seconds of that, the device's apart."""
        began, scheduler = time.thread_time(), self.scheduler
        while (plan := scheduler.plan()) is not None:
            before = time.thread_time()
            grant, report = self.allocator.serve(plan)
            self.allocate_s += time.thread_time() - before
            scheduler.on_report(report)
            if grant is not None:
                self._flights.append(grant)
        passed = time.thread_time() - began
        done = self._run(self._flights.popleft())
        began = time.thread_time()
        scheduler.on_done(done)
        return passed + time.thread_time() - began

    def _run(self, grant: StepGrant) -> StepDone:
        slots = grant.slots[grant.is_sampled]
        ends = (grant.starts + grant.num_tokens)[grant.is_sampled]
        sequence_ids = self.scheduler.slots.sequence_id[slots]
        return StepDone(
            step=grant.step,
            slots=slots,
            sequence_ids=sequence_ids,
            places=(ends - self.num_prompt - sequence_ids % BLOCK_SIZE).astype(np.intp),
            token_ids=(97 + (ends * slots & 1023)).astype(np.intp),
            is_finished=np.zeros(len(slots), np.bool_),
        )


def books_us(size: int, num_windows: int, *, has_cache: bool, has_kinds: bool = False) -> dict[str, float]:
    """Microseconds a step: the median of windows, and the least; and the median of allocate."""
    books = Books(size, has_cache=has_cache, has_kinds=has_kinds)
    windows, allocate = [], []
    for _ in range(WARM_UP_WINDOWS + num_windows):
        before = books.allocate_s
        windows.append(sum(books.step() for _ in range(WINDOW_STEPS)))
        allocate.append(books.allocate_s - before)
    spent, of_allocate = (1e6 * np.array(each[WARM_UP_WINDOWS:]) / WINDOW_STEPS for each in (windows, allocate))
    return {
        "median": round(float(np.median(spent)), 1),
        "least": round(float(spent.min()), 1),
        "allocate": round(float(np.median(of_allocate)), 1),
    }


def measure(sizes: list[int], num_windows: int, seconds: float) -> dict[str, Any]:
    """All figures, by size."""
    figures: dict[str, Any] = {}
    load, hops = os.getloadavg()[0], [asyncio.run(queue_hop_us())]
    for size in sizes:
        figures[str(size)] = each = {}
        for name, has_cache in (("plain", False), ("with_prefix_cache", True)):
            stages = asyncio.run(host_cost(size, seconds, has_cache=has_cache, clock=time.thread_time))
            medians = {stage: stages[stage]["median"] for stage in ("schedule", "allocate")}
            books = books_us(size, num_windows, has_cache=has_cache)
            each[name] = {
                "books_us": books,
                "books_of_kinds_us": books_us(size, num_windows, has_cache=has_cache, has_kinds=True),
                "stages_us": medians,
                "books_us_per_request": round(books["median"] / size, 3),
                "stages_us_per_request": round(sum(medians.values()) / size, 3),
            }
        hops.append(asyncio.run(queue_hop_us()))
    return {
        "machine": {"cpu": platform.machine(), "cores": os.cpu_count(), "load_at_start": load},
        "python": platform.python_version(),
        "queue_hop_us": {"here": round(float(np.median(hops)), 2), "reference": REFERENCE_HOP_US},
        "sizes": figures,
    }


def verdicts(figures: dict[str, Any]) -> dict[str, bool]:
    """Which targets are met, as measured on this machine."""
    by_size = {int(size): each for size, each in figures["sizes"].items()}
    met = {}
    for kind in ("books", "stages"):
        for name, words in (("plain", ""), ("with_prefix_cache", " with a prefix cache")):
            costs = {size: each[name][f"{kind}_us_per_request"] for size, each in by_size.items()}
            for size, allowed_us in ALLOWED_US.items():
                if size in costs:
                    claim = f"{kind} at {size}{words}: {costs[size]} us per request <= {allowed_us}"
                    met[claim] = costs[size] <= allowed_us
            first, last, most = min(costs), max(costs), max(costs.values())
            claim = f"{kind}{words}: {costs[first]} us per request at {first}, at most {most} up to {last}: no growth"
            met[claim] = most <= costs[first]
    return met


def show(figures: dict[str, Any]) -> None:
    print(f"{'running':>8}{'':>20}{'books, us a step':>18}{'per request':>13}{'stages':>10}{'per request':>13}")
    for size, each in figures["sizes"].items():
        for name, cost in each.items():
            stages = sum(cost["stages_us"].values())
            print(
                f"{size:>8}{name:>20}{cost['books_us']['median']:>18.1f}{cost['books_us_per_request']:>13.3f}"
                f"{stages:>10.1f}{cost['stages_us_per_request']:>13.3f}"
            )
        kinds = [(cost["books_us"]["allocate"], cost["books_of_kinds_us"]["allocate"]) for cost in each.values()]
        print(f"{size:>8} allocate, of one kind and of two: {kinds[0]}, with a prefix cache {kinds[1]} us a step")
    hop = figures["queue_hop_us"]
    print(f"\nan asyncio.Queue hop: {hop['here']} us ({hop['reference']} where the figure of vLLM was taken)\n")
    for claim, is_met in verdicts(figures).items():
        print(f"{'met   ' if is_met else 'MISSED'}  {claim}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs to schedule, by the number of running requests.")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--windows", type=int, default=16, help="of 32 steps, of each reading of the books")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each reading of the stages")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    figures = measure(options.sizes, options.windows, options.seconds)
    show(figures)
    if options.output is not None:
        options.output.write_text(json.dumps(figures | {"targets": verdicts(figures)}, indent=2) + "\n")


if __name__ == "__main__":
    main()

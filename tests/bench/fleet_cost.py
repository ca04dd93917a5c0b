"""What the stages dispatch and merge cost the front process of a fleet.

    python -m tests.bench.fleet_cost [--engines 2] [--rounds 5] [--output results.json]

Told are microseconds of processor time a request for dispatch, with 256 requests in flight, and a step of 256 rows for
merge: of the stage's own work, and added by the stage with its runner and channel, over the same loop without it.
`choose_us` is the choice by score alone, among engines that report, and `choose_by_keys_us` that for a prompt of 64
blocks of which a third of the engines have the first ones. Medians over the rounds. No engine process is needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from millrace.runtime.channel import Channel
from millrace.runtime.graph import Port
from millrace.runtime.pipeline import Pipeline
from millrace.runtime.processes.link_channels import OutboundChannel
from millrace.stages.fleet.core_set import CoreSet
from millrace.stages.fleet.fleet_requests import FleetRequests
from millrace.stages.fleet.merged_channel import MergedChannel
from millrace.stages.fleet.stage import Dispatch, Merge
from millrace.stages.messages import StepTokens, TokenRequest
from millrace.stages.params import SamplingParams
from millrace.stages.routing.engine_load import EngineLoad
from millrace.stages.routing.policies import SoonestAnswer
from millrace.stages.routing.router import RoutedRequest, Router
from millrace.stages.schedule.step_timing.step_time_model import StepTimeCosts

NUM_IN_FLIGHT, NUM_ROWS, NUM_STEPS = 256, 256, 2_000
PARAMS = SamplingParams(max_tokens=128, seed=1)


class Away:
    """The link of an engine process that takes everything."""

    def carry(self, kind: int, edge: int, message: Any = None) -> None: ...

    def wake(self) -> None: ...


class Core:
    """A core whose process takes everything, and returns credits at once."""

    is_serving, is_silent, is_draining, is_parting, model_digest = True, False, False, False, ""

    def __init__(self, table: FleetRequests, index: int) -> None:
        self.index = index
        self.requests: OutboundChannel[TokenRequest] = OutboundChannel("a", 256, on_send=self._sent)
        self.requests.bind(Away(), 0)
        self._table = table

    def _sent(self, prompt: TokenRequest) -> None:
        self._table.sent(prompt, self.index)
        self.requests.queued.clear()


def requests(first: int, count: int) -> list[TokenRequest]:
    ids = np.arange(100, dtype=np.int32)
    return [TokenRequest(f"r{number}", 0, ids, PARAMS, number) for number in range(first, first + count)]


def fleet(num_engines: int) -> tuple[CoreSet, FleetRequests]:
    table = FleetRequests(num_engines)
    return CoreSet([Core(table, index) for index in range(num_engines)], table), table  # type: ignore[misc]


def step(number: int) -> StepTokens:
    rows = np.arange(NUM_ROWS)
    return StepTokens(number, rows, rows, rows, rows, np.zeros(NUM_ROWS, np.int8))


def dispatch_us(num_engines: int) -> float:
    """A choice and its send, without the runner."""
    cores, table = fleet(num_engines)
    for request in requests(0, NUM_IN_FLIGHT):
        cores.place(request)
    waiting, took_s = requests(NUM_IN_FLIGHT, NUM_STEPS), 0.0
    for number, request in enumerate(waiting):
        table.forget(f"r{number}")
        began_s = time.process_time()
        cores.place(request)
        took_s += time.process_time() - began_s
    return 1e6 * took_s / NUM_STEPS


def choose_us(num_engines: int, num_keys: int = 0) -> float:
    """A choice among engines that report, for a prompt of `num_keys` blocks."""
    router, draw = Router(SoonestAnswer(), 16), random.Random(0)
    keys = [number.to_bytes(16, "little") for number in range(num_keys)]
    costs = StepTimeCosts(0.01, 1e-4, 1e-9, 1e-4, 1e-8)
    for engine in range(num_engines):
        running, context = draw.randrange(64), draw.randrange(90_000)
        router.note_load(engine, EngineLoad(0, draw.random(), running, 0, context, 0, 100_000, 64, 2048, costs))
        if engine % 3 == 0:
            router.note_keys(engine, keys[: draw.randrange(num_keys + 1)], ())
    took_s = 0.0
    for _ in range(NUM_STEPS // 4):
        request = RoutedRequest(1000, keys)
        began_s = time.process_time()
        engine = router.choose(request, range(num_engines), 0.0)
        took_s += time.process_time() - began_s
        router.note_sent(engine, request, 0.0)
    return 1e6 * took_s / (NUM_STEPS // 4)


async def dispatched_us(num_engines: int) -> float:
    """A request that passes the stage, without what the loop takes that sends it."""
    cores, table = fleet(num_engines)
    pipeline = Pipeline()
    pipeline.add(Dispatch(cores), "dispatch")
    pipeline.entry = Port("dispatch", "in")
    async with pipeline:
        channel = pipeline.channel("dispatch.in")
        for request in requests(0, NUM_IN_FLIGHT):
            await channel.send(request)
        return await _sent_us(channel, table) - await _sent_us(Channel("empty", 64), fleet(num_engines)[1])


async def _sent_us(channel: Channel[TokenRequest], table: FleetRequests) -> float:
    """A request that is sent in a turn of the loop of its own."""
    waiting = requests(NUM_IN_FLIGHT, NUM_STEPS)
    began_s = time.process_time()
    for number, request in enumerate(waiting):
        table.forget(f"r{number}")
        await channel.send(request)
        await asyncio.sleep(0)
        if channel.name == "empty":
            channel.recv_all()
    return 1e6 * (time.process_time() - began_s) / NUM_STEPS


def merge_us(num_engines: int) -> float:
    """A step that is moved to the slots of its engine, without the runner."""
    steps = [step(number) for number in range(NUM_STEPS)]
    began_s = time.process_time()
    for one in steps:
        Merge.shifted(one, NUM_ROWS * (num_engines - 1))
    return 1e6 * (time.process_time() - began_s) / NUM_STEPS


async def merged_us(num_engines: int) -> float:
    """A step that passes the stage, without what the loop takes that makes it arrive."""
    pipeline = Pipeline()
    pipeline.add(Merge(NUM_ROWS), "merge")
    pipeline.entry = Port("merge", "in")
    pipeline.open_ports = {Port("merge", "out")}
    merged = MergedChannel("m", 16 * num_engines, time.monotonic)
    pipeline.give_channel("merge.in", merged)
    async with pipeline:
        through = await _arrived_us(num_engines, merged, pipeline.channel("merge.out"))
    alone = MergedChannel("m", 16 * num_engines, time.monotonic)
    return through - await _arrived_us(num_engines, alone, alone)


async def _arrived_us(num_engines: int, merged: MergedChannel, out: Channel[Any]) -> float:
    """A step that arrives in a turn of the loop of its own, and is received from `out`."""
    ends = [merged.add_end(core, "e", 16, time.monotonic, _nothing) for core in range(num_engines)]
    for end in ends:
        end.bind(Away(), 0)
    steps = [(number % num_engines, step(number)) for number in range(NUM_STEPS)]
    num_left, began_s = NUM_STEPS, time.process_time()
    for core, one in steps:
        ends[core].arrive(one)
        await asyncio.sleep(0)
        ends[core].num_owed = 0
        num_left -= len(out.recv_all())
    while num_left:
        await asyncio.sleep(0)
        num_left -= len(out.recv_all())
    return 1e6 * (time.process_time() - began_s) / NUM_STEPS


def _nothing(item: StepTokens) -> None: ...


def main() -> int:
    parser = argparse.ArgumentParser(description="Dispatch and merge of a fleet.")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    names = ("dispatch", "dispatched", "merge", "merged", "choose", "choose_by_keys")
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.rounds):
        found["dispatch"].append(dispatch_us(options.engines))
        found["dispatched"].append(asyncio.run(dispatched_us(options.engines)))
        found["merge"].append(merge_us(options.engines))
        found["merged"].append(asyncio.run(merged_us(options.engines)))
        found["choose"].append(choose_us(options.engines))
        found["choose_by_keys"].append(choose_us(options.engines, 64))
    figures = {f"{name}_us": round(statistics.median(values), 2) for name, values in found.items()}
    print(json.dumps(figures))
    if options.output is not None:
        options.output.write_text(json.dumps({"engines": options.engines, **figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The cost of the pipeline itself: python -m tests.bench.pipeline_cost [--output results.json]

Real stages, channels and threads; the device is a stand-in that takes no time or a fixed one. Three questions: how much
time of the event loop's thread a step takes at 16 and at 256 decoding sequences, stage by stage; whether planning and
execution overlap at K = 2; what an idle engine costs.

Times are those in which the loop runs a stage's task: receiving, handling and delivering, so hops are inside, and what
the task waits for is not. "rest" is the readers of the answers, asyncio, and results coming back from the device's
thread. On a machine with other work the least of many short windows is the better guess.

The prefix cache is switched off, as what it costs depends on what it is asked: the digest of a block is most of it, one
for each block's worth of new tokens. `allocate` is also measured with it, at these endless answers.

The budget (250 us at 256 sequences, 100 us at 16) was written on a machine on which handing an item from one task to
another through an `asyncio.Queue` took 3.1 us. A step has seven such hops, and is interpreted code throughout, so the
same hop is measured here before and after each of some short measurements, as a shared machine's speed changes from one
second to the next, and the figures are given both as they are and in the time of that machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from millrace.runtime.stage import Outlet
from millrace.runtime.stage_runner import StageRunner
from millrace.stages.config import EngineConfig
from millrace.stages.messages import FinishReason, Prompt, Request, StepGrant, StepTokens
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.engine import ScriptedEngine, scripted_engine

T = TypeVar("T")

STAGES = ("schedule", "allocate", "execute", "sample", "detokenize", "exit")
MAX_MODEL_LEN = 8192
WINDOW_STEPS = 5
REFERENCE_HOP_US = 3.1  # of an asyncio.Queue, where the budget was written
NUM_ROUNDS = 7  # of hops, a measurement, hops


class FreeDevice:
    """A runner and sampler that take `step_s` and give every row a letter. Nothing is computed or checked."""

    def __init__(self, num_slots: int, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.num_steps = 0
        self.began: list[float] = []  # when each step began
        self._sequence_ids = np.zeros(num_slots, np.int64)
        self._num_prompt = np.zeros(num_slots, np.int32)

    def forward(self, grant: StepGrant) -> None:
        self.began.append(time.perf_counter())
        if self.step_s:
            time.sleep(self.step_s)

    def prepare(self, started: object) -> None:
        pass

    def sample(self, grant: StepGrant, logits: Any) -> StepTokens:
        for started in grant.started:
            self._sequence_ids[started.slot] = started.sequence_id
            self._num_prompt[started.slot] = started.num_prompt
        self.num_steps += 1
        slots = grant.slots[grant.is_sampled]
        ends = (grant.starts + grant.num_tokens)[grant.is_sampled]
        return StepTokens(
            step=grant.step,
            slots=slots,
            sequence_ids=self._sequence_ids[slots],
            places=(ends - self._num_prompt[slots]).astype(np.intp),
            token_ids=(97 + (ends & 15)).astype(np.intp),
            finishes=np.full(len(slots), FinishReason.NONE, np.int8),
            started=grant.started,
        )


class Timed:
    """A coroutine with the seconds that its steps took on the loop's thread, by some clock."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], clock: Callable[[], float]) -> None:
        self.coroutine = coroutine
        self.clock = clock
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.coroutine.__await__()
        value: Any = None
        error: BaseException | None = None
        while True:
            began = self.clock()
            try:
                waits_for = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value
            finally:
                self.seconds += self.clock() - began
            try:
                value, error = (yield waits_for), None
            except BaseException as thrown:  # CancelledError, into the coroutine
                value, error = None, thrown

    async def run(self) -> Any:
        return await self


def engine_with(
    device: FreeDevice, num_sequences: int, steps_in_flight: int, *, has_cache: bool = False, num_lanes: int = 1
) -> ScriptedEngine:
    """An engine on `device`, not started. Without a prefix cache, unless asked for."""
    config = EngineConfig(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=max(2048, num_sequences),
        num_gpu_blocks=num_sequences * (MAX_MODEL_LEN // 16),
        steps_in_flight=steps_in_flight,
        pipeline_parallel_size=num_lanes,
        enable_prefix_caching=has_cache,
        max_admitted_requests=2 * num_sequences + 1,
        max_waiting_requests=2 * num_sequences + 1,
    )
    engine = scripted_engine(config)
    engine.model.forward = device.forward  # type: ignore[method-assign, assignment]
    engine.model.sample = device.sample  # type: ignore[method-assign, assignment]
    engine.model.announce = lambda grant: None  # type: ignore[method-assign]
    engine.model.complete = lambda grant: None  # type: ignore[method-assign]
    return engine


async def start_timed(engine: ScriptedEngine, clock: Callable[[], float]) -> dict[str, Timed]:
    """Starts the engine with a clock around each stage's task. Returns the clocks, by stage."""
    clocks: dict[str, Timed] = {}
    run = StageRunner.run

    def timed_run(self: StageRunner, all_set_up: asyncio.Event) -> Awaitable[None]:
        clocks[self.name] = Timed(run(self, all_set_up), clock)
        return clocks[self.name].run()

    StageRunner.run = timed_run  # type: ignore[method-assign, assignment]
    try:
        await engine.start()
    finally:
        StageRunner.run = run  # type: ignore[method-assign]
    return clocks


async def decode(engine: ScriptedEngine, num_sequences: int) -> list[asyncio.Task[None]]:
    """Starts `num_sequences` endless answers, each with its own reader, and waits until all decode."""
    params = SamplingParams(max_tokens=MAX_MODEL_LEN - 16, temperature=0.0, ignore_eos=True)
    started: set[int] = set()
    all_started = asyncio.Event()

    async def read(i: int) -> None:
        outbox = await engine.submit(Request(f"r{i}", (Prompt(text="Once upon"),), params), wait=True)
        async for _ in outbox:
            if not all_started.is_set():
                started.add(i)
                if len(started) == num_sequences:
                    all_started.set()

    tasks = [asyncio.create_task(read(i)) for i in range(num_sequences)]
    await all_started.wait()
    return tasks


async def host_cost(
    num_sequences: int,
    seconds: float,
    *,
    has_cache: bool = False,
    num_lanes: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, dict[str, float]]:
    """Microseconds a step, by stage, with a device that takes no time: the median of windows of some steps each, and
    the least, which on a machine with other work is the better guess. A step has the rows of one lane."""
    windows: list[dict[str, float]] = []
    left_s = seconds
    while left_s > 0:  # a fast machine comes to the end of the answers: it begins again
        device = FreeDevice(num_sequences)
        sizes = {"steps_in_flight": 2, "num_lanes": num_lanes}
        engine = engine_with(device, num_sequences, has_cache=has_cache, **sizes)
        clocks = await start_timed(engine, clock)
        tasks = await decode(engine, num_sequences)
        await asyncio.sleep(0.2)
        began_s = time.perf_counter()
        while time.perf_counter() < began_s + left_s and device.num_steps < MAX_MODEL_LEN // 2:
            windows.append(await _window(device, clocks))
        left_s -= time.perf_counter() - began_s
        await end(engine, tasks)
    columns = {name: [window[name] for window in windows] for name in windows[0]}
    return {
        name: {"median": round(float(np.median(values)), 1), "least": round(min(values), 1)}
        for name, values in columns.items()
    }


async def queue_hop_us(num_hops: int = 20_000) -> float:
    """Microseconds to hand an item from one task to another with nothing but asyncio: how fast this machine is now."""
    there, back = asyncio.Queue[int](1), asyncio.Queue[int](1)

    async def echo() -> None:
        for _ in range(num_hops // 2):
            await back.put(await there.get())

    task = asyncio.create_task(echo())
    began = time.perf_counter()
    for i in range(num_hops // 2):
        await there.put(i)
        await back.get()
    hop_us = 1e6 * (time.perf_counter() - began) / num_hops
    await task
    return hop_us


def cost_beside_hops(
    num_sequences: int, seconds: float, *, has_cache: bool = False
) -> tuple[dict[str, dict[str, float]], list[float]]:
    """`host_cost` in rounds, and the hops around each: `median` of the rounds' medians, `least` of all, and the median
    of what each round's would be on a machine whose hop takes `REFERENCE_HOP_US`, `at_reference`."""
    rounds, hops = [], []
    for _ in range(NUM_ROUNDS):
        before_us = asyncio.run(queue_hop_us())
        rounds.append(asyncio.run(host_cost(num_sequences, seconds / NUM_ROUNDS, has_cache=has_cache)))
        hops.append((before_us + asyncio.run(queue_hop_us())) / 2)
    scales = [REFERENCE_HOP_US / hop_us for hop_us in hops]
    found = {}
    for name in rounds[0]:
        medians = [each[name]["median"] for each in rounds]
        found[name] = {
            "median": round(float(np.median(medians)), 1),
            "least": min(each[name]["least"] for each in rounds),
            "at_reference": round(float(np.median(np.multiply(medians, scales))), 1),
        }
    return found, hops


async def _window(device: FreeDevice, clocks: dict[str, Timed]) -> dict[str, float]:
    """Microseconds a step over about WINDOW_STEPS steps."""
    before = {name: clock.seconds for name, clock in clocks.items()}
    steps, thread, wall = device.num_steps, time.thread_time(), time.perf_counter()
    while device.num_steps < steps + WINDOW_STEPS:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    steps, thread, wall = device.num_steps - steps, time.thread_time() - thread, time.perf_counter() - wall
    spent = {name: clock.seconds - before[name] for name, clock in clocks.items()}
    cost = {name: spent[name] for name in STAGES}
    cost["all stages"] = sum(cost.values())
    cost["rest"] = max(0.0, thread - cost["all stages"])
    cost["loop thread, all"] = thread
    cost["step period"] = wall
    return {name: 1e6 * time_s / steps for name, time_s in cost.items()}


async def period_ms(steps_in_flight: int, device_s: float, host_s: float, num_steps: int = 200) -> float:
    """The median time between the beginnings of two steps, when allocate works for `host_s` on each."""
    device = FreeDevice(4, device_s)
    engine = engine_with(device, 4, steps_in_flight)
    await engine.start()
    allocate = engine.parts.allocate
    handle = allocate.handle

    async def slow_handle(batch: Sequence[Any], out: Outlet[Any]) -> None:
        until = time.thread_time() + host_s
        while time.thread_time() < until:
            pass
        await handle(batch, out)

    allocate.handle = slow_handle  # type: ignore[method-assign]
    tasks = await decode(engine, 4)
    while device.num_steps < num_steps:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await end(engine, tasks)
    return round(1e3 * float(np.median(np.diff(device.began[20:]))), 3)


async def idle_share(seconds: float) -> float:
    """Processor time of a started engine with nothing to do, as a share of one core."""
    engine = scripted_engine()
    async with engine:
        await asyncio.sleep(0.2)
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.sleep(seconds)
        return round((time.process_time() - cpu) / (time.perf_counter() - wall), 5)


async def end(engine: ScriptedEngine, tasks: list[asyncio.Task[None]]) -> None:
    await engine.stop()
    await asyncio.gather(*tasks)


def cost_of_lanes(seconds: float, num_rounds: int = 5) -> dict[str, dict[str, float]]:
    """Microseconds of the loop's thread a step, by stage: the least of 256 sequences in one lane and in two, and of 512
    in two, whose steps have 256 rows. In turns, as a shared machine's speed changes.
    """
    found: dict[str, dict[str, float]] = {}
    for _ in range(num_rounds):
        for num_sequences, num_lanes in ((256, 1), (256, 2), (512, 2)):
            clock = time.thread_time
            cost = asyncio.run(host_cost(num_sequences, seconds / num_rounds, num_lanes=num_lanes, clock=clock))
            least = found.setdefault(f"{num_sequences} sequences, {num_lanes} lanes", {})
            for stage in (*STAGES, "all stages", "loop thread, all"):
                least[stage] = min(least.get(stage, float("inf")), cost[stage]["least"])
    return found


def measure(seconds: float) -> dict[str, Any]:
    """All figures."""

    def run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run(make())

    machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "load_at_start": os.getloadavg()[0]}
    hops, costs = [], {}
    for n in (256, 16):
        costs[str(n)], beside = cost_beside_hops(n, seconds)
        hops += beside
    cached = {str(n): cost_beside_hops(n, seconds, has_cache=True)[0] for n in (256, 16)}
    return {
        "machine": machine,
        "python": platform.python_version(),
        "queue_hop_us": {"here": round(float(np.median(hops)), 2), "reference": REFERENCE_HOP_US},
        "host_us_per_step": costs,
        "host_us_per_step_with_prefix_cache": cached,
        "overlap_period_ms": {f"K={k}": run(lambda k=k: period_ms(k, 0.005, 0.002)) for k in (1, 2)},  # type: ignore[misc]
        "idle_share_of_a_core": run(lambda: idle_share(seconds)),
    }


def verdicts(figures: dict[str, Any]) -> dict[str, bool]:
    """Which targets are met."""
    large, small = (figures["host_us_per_step"][n] for n in ("256", "16"))
    core = ("schedule", "allocate", "execute", "sample")
    budget = {
        "256 sequences: schedule, allocate, execute, sample and hops <= 250 us": (
            [large[stage] for stage in core],
            250,
        ),
        "256 sequences: detokenize <= 350 us": ([large["detokenize"]], 350),
        "16 sequences: all stages <= 100 us": ([small["all stages"]], 100),
    }
    in_time = {}
    for target, (costs, allowed_us) in budget.items():
        for kind, whose in (("median", "as measured"), ("at_reference", "in the time of the budget's machine")):
            spent_us = sum(cost[kind] for cost in costs)
            in_time[f"{target}: {spent_us:.0f} us, {whose}"] = spent_us <= allowed_us
    return in_time | {
        "5 ms device + 2 ms host: period <= 5.5 ms at K = 2": figures["overlap_period_ms"]["K=2"] <= 5.5,
        "5 ms device + 2 ms host: period >= 7 ms at K = 1": figures["overlap_period_ms"]["K=1"] >= 7.0,
        "idle: under 1 % of a core": figures["idle_share_of_a_core"] < 0.01,
    }


def show(figures: dict[str, Any]) -> None:
    large, small = figures["host_us_per_step"]["256"], figures["host_us_per_step"]["16"]
    print(f"{'us a step':<20}{'256 sequences':>18}{'least':>10}{'16 sequences':>18}{'least':>10}")
    for name in large:
        cells = (large[name]["median"], large[name]["least"], small[name]["median"], small[name]["least"])
        print(f"{name:<20}{cells[0]:>18}{cells[1]:>10}{cells[2]:>18}{cells[3]:>10}")
    hop = figures["queue_hop_us"]
    cached = figures["host_us_per_step_with_prefix_cache"]
    for n in ("256", "16"):
        both = [each[n]["allocate"]["median"] for each in (figures["host_us_per_step"], cached)]
        print(f"allocate at {n} with a prefix cache: {both[1]} us instead of {both[0]}")
    print(f"\nan asyncio.Queue hop: {hop['here']} us ({hop['reference']} where the budget was written)")
    print(f"period with a 5 ms device and 2 ms of host work: {figures['overlap_period_ms']} ms")
    print(f"idle: {figures['idle_share_of_a_core']:.2%} of a core\n")
    for target, is_met in verdicts(figures).items():
        print(f"{'met   ' if is_met else 'MISSED'}  {target}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What the pipeline itself costs, without a model.")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--lanes", action="store_true", help="only: a step of one lane of two, and of all rows")
    options = parser.parse_args()
    if options.lanes:
        print(json.dumps(cost_of_lanes(options.seconds), indent=1))
        return
    figures = measure(options.seconds)
    show(figures)
    if options.output is not None:
        options.output.write_text(json.dumps(figures | {"targets": verdicts(figures)}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""How a front of several engines behaves under more load than they can take: goodput, refusals, and `Retry-After`.

    python -m tests.bench.overload [--factor 4] [--engines 3] [--fronts 2] [--seconds 10] [--slow-one 3]

The engines are scripted and have no model: a step takes a fixed time. First two requests a slot run at a time, which
measures what the engines can do together. Then requests arrive at `factor` times that rate, evenly drawn, and
none is sent again. In the end two requests a slot run again: what other work takes from the machine changes with
time, and the goodput is compared with the mean of both. Printed are

    goodput      tokens a second, of the rate that the engines can do
    refused      the share that got 429, and how long that took
    retry-after  the wait that a refusal told, beside the time until the request that was admitted next had its first
                 token: in its place the refused one would have been

`--slow-one` makes the steps of one engine so many times longer. `measure` is also run by a test, in virtual time.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from millrace.stages.config import EngineConfig
from millrace.stages.errors import Overloaded, TimedOut
from millrace.stages.machines.engine_sources import FixedAddress
from millrace.stages.params import SamplingParams
from tests.stages.machines.scripted_engines import CONFIG, ScriptedMachines


@dataclass
class Overload:
    """What is offered to the engines of these fronts, in seconds of `now`."""

    fronts: Sequence[Any]
    now: Callable[[], float]
    sleep: Callable[[float], Awaitable[object]]
    num_slots: int  # of all engines
    factor: float = 4.0
    seconds: float = 10.0
    warm_up_s: float = 2.0  # of each phase, which is not counted
    capacity: float | None = None  # of the engines together, tokens a second; None: it is measured
    num_tokens: int = 24  # of an answer, on average
    num_prompt: int = 40


@dataclass
class Figures:
    """What was seen. Waits are in seconds."""

    capacity: float = 0.0  # tokens a second
    capacities: tuple[float, ...] = ()  # before and after, where they were measured
    goodput: float = 0.0
    num_offered: int = 0
    num_late: int = 0  # admitted, and then not begun in time
    refusals_s: list[float] = field(default_factory=list)  # how long each took
    waits: list[tuple[float, float]] = field(default_factory=list)  # of refusals: (told, real)
    engines: set[int | None] = field(default_factory=set)  # that refusals told of

    @property
    def share(self) -> float:
        """The goodput as a part of the capacity."""
        return self.goodput / self.capacity

    @property
    def retry_error(self) -> float:
        """The median of how far a told wait is from the real one, as a part of that."""
        return median(abs(told - real) / real for told, real in self.waits)

    @property
    def refusal_p99_s(self) -> float:
        """How long 99 % of the refusals took at most."""
        return float(np.percentile(self.refusals_s, 99))


@dataclass
class _Request:
    sent_s: float
    first_s: float | None = None
    refused: Overloaded | None = None


async def measure(load: Overload) -> Figures:
    """Runs all phases."""
    figures = Figures()
    dice, tokens = Random(7), list[tuple[float, int]]()
    requests: list[_Request] = []

    async def ask(front: Any, number: int) -> None:
        request = _Request(load.now())
        requests.append(request)
        words = f"{number} " + "".join(dice.choices("abcdef ", k=load.num_prompt))
        num_tokens = dice.randint(1, 2 * load.num_tokens - 1)
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        try:
            async for output in front.generate(words, params):
                if request.first_s is None:
                    request.first_s = load.now()
                tokens.append((load.now(), len(output.outputs[0].token_ids)))
        except Overloaded as error:
            request.refused = error
            figures.refusals_s.append(load.now() - request.sent_s)
            return
        except TimedOut:
            figures.num_late += 1

    async def keep_asking(front: Any, until_s: float) -> None:
        while load.now() < until_s:
            await ask(front, len(requests))
            if requests[-1].refused is not None:
                await load.sleep(0.05)

    async def keep_full(seconds: float) -> float:
        began_s = load.now()
        clients = [load.fronts[number % len(load.fronts)] for number in range(2 * load.num_slots)]
        end_s = began_s + load.warm_up_s + seconds
        await asyncio.gather(*(keep_asking(front, end_s) for front in clients))
        return _rate(tokens, began_s + load.warm_up_s, end_s) if seconds else 0.0

    before = await keep_full(load.seconds / 2 if load.capacity is None else 0.0)
    figures.capacity, figures.num_late = load.capacity or before, 0
    figures.refusals_s.clear()

    tokens.clear()
    requests.clear()
    asked, began_s = list[asyncio.Task[None]](), load.now()
    due_s, end_s = began_s, began_s + load.warm_up_s + load.seconds
    while due_s < end_s:
        await load.sleep(max(0.0, due_s - load.now()))
        front = load.fronts[len(asked) % len(load.fronts)]
        asked.append(asyncio.ensure_future(ask(front, len(asked))))
        due_s += dice.expovariate(load.factor * figures.capacity / load.num_tokens)
    await asyncio.gather(*asked)
    figures.num_offered = len(asked)
    figures.goodput = _rate(tokens, began_s + load.warm_up_s, end_s)
    next_s: float | None = None  # first token of the request that was admitted next
    for request in reversed(requests):
        if request.refused is None:
            next_s = request.first_s
        elif next_s is not None and began_s + load.warm_up_s < request.sent_s < end_s:
            figures.waits.append((request.refused.estimated_wait_s, next_s - request.sent_s))
            figures.engines.add(request.refused.num_engines)
    if load.capacity is None:
        num_late, refusals_s = figures.num_late, [*figures.refusals_s]
        figures.capacities = (before, await keep_full(load.seconds / 2))
        figures.capacity = sum(figures.capacities) / 2
        figures.num_late, figures.refusals_s = num_late, refusals_s
    return figures


def _rate(tokens: Sequence[tuple[float, int]], begin_s: float, end_s: float) -> float:
    return sum(count for time_s, count in tokens if begin_s <= time_s < end_s) / (end_s - begin_s)


async def _run(options: argparse.Namespace) -> Figures:
    config = replace(CONFIG, max_num_seqs=options.slots)
    own = EngineConfig(max_queue_s=options.max_queue_s, max_admitted_requests=100_000)
    names = [f"e{number}" for number in range(options.engines)]
    machines = ScriptedMachines(options.step_ms / 1e3, config)
    try:
        await machines.start(*names[1:])
        machines.step_s *= options.slow_one
        await machines.start(names[0])
        async with AsyncExitStack() as stack:
            sources = [FixedAddress(name, (name, 1)) for name in names]
            fronts = [await stack.enter_async_context(machines.front(*sources, own=own)) for _ in range(options.fronts)]
            slots = options.engines * options.slots
            load = Overload(fronts, perf_counter, asyncio.sleep, slots, options.factor, options.seconds)
            return await measure(load)
    finally:
        await machines.aclose()


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--fronts", type=int, default=1)
    parser.add_argument("--slots", type=int, default=8, help="of each engine")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--slow-one", type=float, default=1.0, metavar="TIMES", help="steps of the first engine")
    parser.add_argument("--factor", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--max-queue-s", type=float, default=2.0)
    figures = asyncio.run(_run(parser.parse_args()))
    refused, told = len(figures.refusals_s) / figures.num_offered, [wait for wait, _ in figures.waits]
    each = " and ".join(f"{one:.1f}" for one in figures.capacities)
    print(f"capacity     {figures.capacity:.1f} tokens a second, of {each} before and after")
    print(f"goodput      {figures.goodput:.1f} tokens a second, {100 * figures.share:.0f} % of it")
    print(f"refused      {100 * refused:.0f} % of {figures.num_offered}; p99 {1e3 * figures.refusal_p99_s:.1f} ms")
    print(f"late         {figures.num_late} requests waited longer than predicted, and got 408")
    print(f"retry-after  {median(told):.2f} s at the median, {100 * figures.retry_error:.0f} % off the real wait")


if __name__ == "__main__":
    main()

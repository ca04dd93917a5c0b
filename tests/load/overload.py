"""Four times the requests that a server can serve: it serves as many as before, and refuses the others at once."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import aiohttp

from tests.deploy.running import RunningServer
from tests.load.process import Figures, percentile
from tests.load.requests import expected

NUM_TOKENS = 20
STEP_S = 0.01
MAX_SEQS = 16
MAX_WAITING = 16
MIN_GOODPUT, MAX_REFUSAL_MS, MAX_TTFT_FACTOR = 0.9, 100.0, 3.0


@dataclass
class Outcome:
    """What became of the requests of one rate."""

    sent: int = 0
    served: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    refused_ms: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)


def run(seconds: float = 300.0, factor: float = 4.0, least_s: float = 1.0) -> Figures:
    """First at the rate that the server can serve, then at `factor` times it. `complaints` must be empty.

    The first takes a fifth of `seconds` and at least `least_s`, as what goes before it.
    """
    served_s = max(least_s, seconds / 5)
    capacity = MAX_SEQS / (NUM_TOKENS * STEP_S)  # requests/s, if all rows of all steps are used
    engine = {"max_num_seqs": MAX_SEQS, "max_waiting_requests": MAX_WAITING}
    with RunningServer(engine=engine, step_s=STEP_S) as server:
        asyncio.run(_send(server.url, 0.5 * capacity, least_s))
        at_capacity = asyncio.run(_send(server.url, 0.9 * capacity, served_s))
        overloaded = asyncio.run(_send(server.url, factor * capacity, seconds))
        violations = server.stats()["violations"]
    complaints = violations + at_capacity.complaints + overloaded.complaints
    goodput, peak = overloaded.served / seconds, at_capacity.served / served_s
    if goodput < MIN_GOODPUT * peak:
        complaints.append(f"goodput {goodput:.1f}/s: at least {MIN_GOODPUT} of {peak:.1f}")
    if percentile(overloaded.refused_ms, 99) > MAX_REFUSAL_MS:
        complaints.append(f"refusals p99 {percentile(overloaded.refused_ms, 99):.0f} ms: at most {MAX_REFUSAL_MS}")
    if not overloaded.refused_ms:
        complaints.append("no request was refused: this was no overload")
    slowest = 1e3 * (MAX_WAITING + MAX_SEQS) / capacity + MAX_TTFT_FACTOR * percentile(at_capacity.ttft_ms, 99)
    if percentile(overloaded.ttft_ms, 99) > slowest:
        complaints.append(f"TTFT p99 {percentile(overloaded.ttft_ms, 99):.0f} ms: at most {slowest:.0f}")
    return {
        "seconds": seconds,
        "sent": overloaded.sent,
        "goodput_per_s": round(goodput, 2),
        "goodput_at_capacity_per_s": round(peak, 2),
        "refused": len(overloaded.refused_ms),
        "refusal_p99_ms": round(percentile(overloaded.refused_ms, 99), 1),
        "ttft_p99_ms": [round(percentile(each.ttft_ms, 99), 1) for each in (at_capacity, overloaded)],
        "complaints": complaints[:20],
    }


async def _send(url: str, rate: float, seconds: float) -> Outcome:
    """A Poisson process of `rate` requests/s; waits for all answers."""
    outcome, draw, tasks = Outcome(), random.Random(7), []
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http:
        due = began = time.perf_counter()
        while (due := due + draw.expovariate(rate)) < began + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            outcome.sent += 1
            tasks.append(asyncio.create_task(_one(http, outcome, f"request {outcome.sent}:")))
        await asyncio.gather(*tasks)
    return outcome


async def _one(http: aiohttp.ClientSession, outcome: Outcome, prompt: str) -> None:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": False, "stream": True}
    began, first, text, is_done = time.perf_counter(), 0.0, "", False
    async with http.post("/v1/completions", json=body) as response:
        if response.status == 429:
            await response.read()
            outcome.refused_ms.append(1e3 * (time.perf_counter() - began))
            if "Retry-After" not in response.headers:
                outcome.complaints.append("429 without Retry-After")
            return
        async for line in response.content:
            first = first or time.perf_counter()
            is_done = is_done or line.startswith(b"data: [DONE]")
            if line.startswith(b"data: {"):
                text += "".join(choice["text"] for choice in json.loads(line[6:])["choices"])
    if response.status != 200 or not is_done or text != expected(prompt, NUM_TOKENS):
        outcome.complaints.append(f"{prompt} {response.status}, {text!r}")
        return
    outcome.served += 1
    outcome.ttft_ms.append(1e3 * (first - began))

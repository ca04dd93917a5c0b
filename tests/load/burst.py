"""Thousands of requests within seconds: the caps hold, the rest is refused, and the server is ready at once after."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import aiohttp

from tests.deploy.running import RunningServer
from tests.load.process import Figures, Held, settled

MAX_GROWTH_MIB, MAX_RECOVERY_S = 200.0, 5.0
CAP = 256


def run(num_requests: int = 10_000, seconds: float = 5.0) -> Figures:
    """Each from a connection of its own. `complaints` must be empty."""
    engine = {"max_num_seqs": 64, "max_waiting_requests": CAP, "max_admitted_requests": CAP}
    with RunningServer(engine=engine, server={"max_connections": 1024}, step_s=0.005) as server:
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1})
        before = settled(server)
        statuses, peak_mib = asyncio.run(_burst(server, num_requests, seconds))
        began = time.monotonic()
        ready = server.get("/health/ready").status
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status
        recovery_s = time.monotonic() - began
        server.wait_until_idle(30.0)
        violations, admitted = server.stats()["violations"], server.stats()["admitted"]
    complaints = list(violations)
    odd = set(statuses) - {"200", "429", "503", "refused"}
    if odd:
        complaints.append(f"answers {odd}: only 200, 429, 503 or a refused connection")
    if peak_mib - before.rss_mib > MAX_GROWTH_MIB:
        complaints.append(f"memory grew by {peak_mib - before.rss_mib:.0f} MiB: at most {MAX_GROWTH_MIB:.0f}")
    if (ready, answer) != (200, 200) or recovery_s > MAX_RECOVERY_S or admitted:
        complaints.append(f"after it: ready {ready}, an answer {answer}, {recovery_s:.1f} s, {admitted} admitted")
    return {
        "requests": num_requests,
        "answers": dict(sorted(statuses.items())),
        "grown_mib": round(peak_mib - before.rss_mib, 1),
        "recovery_s": round(recovery_s, 2),
        "complaints": complaints,
    }


async def _burst(server: RunningServer, count: int, seconds: float) -> tuple[Counter[str], float]:
    peak_mib = 0.0

    async def one(http: aiohttp.ClientSession) -> str:
        try:
            async with asyncio.timeout(60):
                async with http.post("/v1/completions", json={"prompt": "a", "max_tokens": 8}) as response:
                    await response.read()
                    return str(response.status)
        except aiohttp.ClientError:
            return "refused"

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(server.url, connector=connector) as http:
        tasks = []
        for i in range(count):
            tasks.append(asyncio.create_task(one(http)))
            if i % 100 == 99:
                peak_mib = max(peak_mib, Held.by(server.process.pid).rss_mib)
                await asyncio.sleep(seconds * 100 / count)
        return Counter(await asyncio.gather(*tasks)), max(peak_mib, Held.by(server.process.pid).rss_mib)

"""Many requests over time: memory stays, and threads, tasks and descriptors come back."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import replace

import aiohttp

from millrace.runtime.env.env import POOL_THREADS
from tests.deploy.running import RunningServer
from tests.load.process import Figures, Held, settled, slope
from tests.load.requests import Tally, send_one

CLIENTS = 32
MAX_GROWTH_MIB = 1.0  # per 10,000 requests, once caches are full
STORE_BYTES = 4 << 20  # the store of /v1/responses fills early, so that its growth is not taken for a leak
SERVE = (sys.executable, "-m", "millrace", "serve", "--port", "0")
FULL_AT = 60_000  # requests after which the caches that /server_info names are full


def run(
    num_requests: int = 100_000, *, is_bundled: bool = False, pieces: int = 20, seed: int = 1, num_before: int = 500
) -> Figures:
    """Sends them from 32 clients at once, after `num_before` that are not counted. `complaints` must be empty.

    Memory is read between pieces of them, when nothing is under way and what the C library keeps was given back. The
    slope is that of the last part: after 60,000 requests, or the last half of fewer.
    """
    command = [*SERVE, "--response-store-bytes", str(STORE_BYTES)] if is_bundled else None
    engine = {"max_num_seqs": 64, "max_waiting_requests": 256}
    with RunningServer(command=command, engine=engine, server={"response_store_bytes": STORE_BYTES}) as server:
        asyncio.run(_send(server, num_before, seed - 1, Tally()))
        before, tasks = settled(server), None if is_bundled else server.stats()["tasks"]
        tally, samples, peak_mib = Tally(), [(0, before.rss_mib)], 0.0
        enough = replace(before, num_threads=before.num_threads + POOL_THREADS) if num_requests < FULL_AT else None
        for piece in range(pieces):
            asyncio.run(_send(server, num_requests // pieces, seed + piece, tally))
            peak_mib = max(peak_mib, Held.by(server.process.pid).rss_mib)
            after = settled(server, enough=enough)  # of few requests no memory is judged
            samples.append((tally.num_sent, after.rss_mib))
        if tasks is not None and server.stats()["tasks"] != tasks:
            tally.complain(f"{server.stats()['tasks']} tasks, {tasks} before")
        lines = [json.loads(line) for line in server.errors().splitlines() if line.startswith("{")]
    errors = [line["event"] for line in lines if line.get("level") in ("error", "critical")]
    begin = FULL_AT if num_requests > FULL_AT else num_requests // 2
    growth, margin = slope(*map(list, zip(*[each for each in samples if each[0] >= begin], strict=True)))
    if num_requests > FULL_AT and growth - margin > MAX_GROWTH_MIB:
        tally.complain(f"memory grows by {growth:.2f} MiB per 10,000 requests: at most {MAX_GROWTH_MIB}")
    if after.num_threads > before.num_threads + POOL_THREADS:
        tally.complain(f"{after.num_threads} threads, {before.num_threads} before, and a pool of {POOL_THREADS}")
    if after.num_descriptors > before.num_descriptors:
        tally.complain(f"{after.num_descriptors} descriptors, {before.num_descriptors} before")
    return {
        "requests": tally.num_sent,
        "left by their clients": tally.num_left,
        "bad": tally.num_bad,
        "memory_mib": [round(rss_mib, 1) for _, rss_mib in samples],
        "peak_mib": round(peak_mib, 1),
        "growth_mib_per_10000": round(growth, 3),
        "growth_margin": round(margin, 3),
        "threads": [before.num_threads, after.num_threads],
        "descriptors": [before.num_descriptors, after.num_descriptors],
        "error_lines": len(errors),
        "complaints": tally.complaints + errors[:5],
    }


async def _send(server: RunningServer, count: int, seed: int, tally: Tally) -> None:
    begun = 0

    async def client(number: int) -> None:
        nonlocal begun
        draw = random.Random(seed * 1_000 + number)
        while begun < count:
            begun += 1
            await send_one(http, draw, tally, knows_answers=server.is_scripted)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector) as http:
        await asyncio.gather(*(client(number) for number in range(CLIENTS)))

"""A thousand streams of server-sent events, at 5 tokens/s each: nothing lost, repeated or reordered."""

from __future__ import annotations

import asyncio
import json
import time

import aiohttp
import numpy as np

from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.byte_tokenizer import ByteTokenizer
from millrace.stages.testing.scripted.script import Script
from tests.deploy.running import RunningServer
from tests.load.process import Figures, Held, percentile

RATE = 5  # tokens/s of a stream
MAX_GAP_MS, MAX_GROWTH_MIB = 500.0, 150.0


def run(num_streams: int = 1_000, seconds: float = 60.0) -> Figures:
    """All streams at once. `complaints` must be empty."""
    num_tokens = int(seconds * RATE)
    engine = {
        "max_model_len": max(512, 2 * num_tokens),
        "max_num_seqs": num_streams,
        "max_num_batched_tokens": max(2048, 2 * num_streams),
        "num_gpu_blocks": num_streams * (num_tokens // 16 + 4),
        "max_waiting_requests": 2 * num_streams,
    }
    server_options = {"max_connections": 2 * num_streams + 64}
    with RunningServer(engine=engine, server=server_options, step_s=1 / RATE) as server:
        before = Held.by(server.process.pid)
        found = asyncio.run(_read_all(server.url, num_streams, num_tokens))
        after = Held.by(server.process.pid)
        violations = server.stats()["violations"]
    script, tokenizer = Script(), ByteTokenizer()
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    complaints = list(violations)
    gaps: list[float] = []
    for i, (text, arrivals) in enumerate(found):
        ids = script.expected(tokenizer.encode_text(_prompt(i)), params)
        if text != tokenizer.decode(ids, skip_special_tokens=True):
            complaints.append(f"stream {i}: {len(text)} characters that are not the answer")
        gaps += list(1e3 * np.diff(arrivals))
    if percentile(gaps, 99) > MAX_GAP_MS:
        complaints.append(f"p99 of gaps {percentile(gaps, 99):.0f} ms: at most {MAX_GAP_MS:.0f}")
    if after.rss_mib - before.rss_mib > MAX_GROWTH_MIB:
        complaints.append(f"memory grew by {after.rss_mib - before.rss_mib:.0f} MiB: at most {MAX_GROWTH_MIB:.0f}")
    return {
        "streams": num_streams,
        "tokens a stream": num_tokens,
        "gap_p50_ms": round(percentile(gaps, 50), 1),
        "gap_p99_ms": round(percentile(gaps, 99), 1),
        "grown_mib": round(after.rss_mib - before.rss_mib, 1),
        "cpu_us_a_token": round(1e6 * (after.cpu_s - before.cpu_s) / (num_streams * num_tokens), 1),
        "complaints": complaints[:20],
    }


def _prompt(i: int) -> str:
    return f"stream {i}:"


async def _read_all(url: str, num_streams: int, num_tokens: int) -> list[tuple[str, list[float]]]:
    async with aiohttp.ClientSession(
        url, connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(None)
    ) as http:
        return await asyncio.gather(*(_read(http, i, num_tokens) for i in range(num_streams)))


async def _read(http: aiohttp.ClientSession, i: int, num_tokens: int) -> tuple[str, list[float]]:
    body = {"prompt": _prompt(i), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    text, arrivals = "", []
    async with http.post("/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return f"error: {event['error']}", arrivals
                arrivals.append(time.perf_counter())
                text += "".join(choice["text"] for choice in event["choices"])
    return text, arrivals

"""What clients that stop reading cost the others, over HTTP.

    python -m tests.bench.stalled_readers [--step-ms 20] [--json results.json]

A server with a scripted device (a step takes as long whatever is in it; longer than the host takes to write 50 streams,
or the cores' own noise would be measured) streams to 50 clients that read. The same again
beside 50 that asked for long answers and stopped reading; alternately, three times each. Then those read on, and must
have every token once. Reported: the 99th percentile of the gaps between two events of a stream, and the server's
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.running import RunningServer, post_bytes

NUM_STALLED, NUM_READING = 50, 50
STALLED_TOKENS, READING_TOKENS = 1200, 300  # the last gap, in which all end at once, is less than one in a hundred
ROUNDS = 3
ENGINE = {"max_model_len": 4096, "max_num_seqs": 128, "num_gpu_blocks": 1600, "num_cpu_blocks": 20_000}
SMALL_BUFFER = 4096  # bytes a stalled client's kernel takes
TARGET = 1.05  # p99 beside stalled ones, of that alone


def _body(i: int, max_tokens: int) -> dict[str, Any]:
    """Distinct prompts; log-probabilities make each event large, so that buffers fill."""
    fields = {"stream": True, "ignore_eos": True, "temperature": 0, "logprobs": 20}
    return {"prompt": f"client {i} ", "max_tokens": max_tokens, **fields}


@dataclass
class Gaps:
    """Seconds between two events of the same stream."""

    seconds: list[float] = field(default_factory=list)

    def percentile(self, share: float) -> float:
        return sorted(self.seconds)[int(share * len(self.seconds))]


async def _read_well(address: tuple[str, int], i: int, gaps: Gaps) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(post_bytes("/v1/completions", _body(i, READING_TOKENS)))
    last = None
    while line := await reader.readline():
        if line.startswith(b"data: "):
            now = time.perf_counter()
            if last is not None:
                gaps.seconds.append(now - last)
            last = now
    writer.close()


async def _all_read(address: tuple[str, int]) -> Gaps:
    gaps = Gaps()
    await asyncio.gather(*(_read_well(address, i, gaps) for i in range(NUM_READING)))
    return gaps


def _stall(server: RunningServer, i: int) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    connection.connect(server.address)
    connection.sendall(post_bytes("/v1/completions", _body(1000 + i, STALLED_TOKENS)))
    return connection


def _text(raw: bytes) -> str:
    """The text of a stream's events, whatever chunks they came in."""
    _, _, body = raw.partition(b"\r\n\r\n")
    data = b""
    while body:
        size, _, rest = body.partition(b"\r\n")
        length = int(size, 16)
        data, body = data + rest[:length], rest[length + 2 :]
    events = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]", "the stream is cut"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def _drain(connection: socket.socket) -> str:
    chunks = []
    connection.settimeout(120)
    while chunk := connection.recv(1 << 20):
        chunks.append(chunk)
    return _text(b"".join(chunks))


def _wait_until_parked(server: RunningServer, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        lines = server.get("/metrics").body.decode().splitlines()
        (parked,) = (float(line.split()[-1]) for line in lines if line.startswith("millrace:num_requests_parked"))
        if parked == NUM_STALLED:
            return
        assert time.monotonic() < deadline, f"{parked:.0f} of {NUM_STALLED} are parked"
        time.sleep(0.1)


def _memory_mib(server: RunningServer) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


def measure(step_s: float) -> dict[str, Any]:
    """All of it: about three minutes."""
    alone, beside = Gaps(), Gaps()
    with RunningServer(engine=ENGINE, server={"stalled_reader_s": 600.0}, step_s=step_s) as server:
        expected = _drain(_stall(server, 0))  # one that does read
        asyncio.run(_all_read(server.address))  # warm
        memory = [_memory_mib(server)]
        for _ in range(ROUNDS):
            alone.seconds += asyncio.run(_all_read(server.address)).seconds
            stalled = [_stall(server, i) for i in range(NUM_STALLED)]
            _wait_until_parked(server)
            memory.append(_memory_mib(server))
            beside.seconds += asyncio.run(_all_read(server.address)).seconds
            memory.append(_memory_mib(server))
            with ThreadPoolExecutor(NUM_STALLED) as threads:
                texts = list(threads.map(_drain, stalled))
            same = len(os.path.commonprefix([texts[0], expected]))
            assert texts[0] == expected, f"{len(texts[0])} characters, {len(expected)} expected; {same} are the same"
            assert {len(text.encode("utf-8", "replace")) > STALLED_TOKENS / 2 for text in texts} == {True}
    return {
        "stalled": NUM_STALLED,
        "reading": NUM_READING,
        "step_ms": 1e3 * step_s,
        "gaps": [len(alone.seconds), len(beside.seconds)],
        "p50_ms": [1e3 * alone.percentile(0.5), 1e3 * beside.percentile(0.5)],
        "p99_ms": [1e3 * alone.percentile(0.99), 1e3 * beside.percentile(0.99)],
        "p99_ratio": beside.percentile(0.99) / alone.percentile(0.99),
        "memory_mib": memory,
        "python": platform.python_version(),
    }


def main() -> None:
    """Prints the figures, and writes them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=20.0, help="of the scripted device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.step_ms / 1e3)
    print(json.dumps(found, indent=2))
    print(f"p99 gap beside stalled readers: {found['p99_ratio']:.3f} of that alone (at most {TARGET})")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Five hundred streams over WebSocket, at 5 tokens/s each, and what a client sees of the order of their chunks.

    python -m tests.bench.websocket_load [--streams 500] [--sockets 10] [--seconds 60] [--cut] [--json results.json]

A server process with a scripted device: a step makes a token of every stream and takes 0.2 s, so each stream has 5
tokens/s. A second process, this one, reads. Every answer is known beforehand; at the end each text is compared with
it, and the numbers of all messages must be without gaps: nothing lost, repeated or reordered. With `--cut` every socket
is cut off each 5 s, and its streams go on in a new one. Reported too: what the server used of its processor, and how
late chunks came after their step, as the client sees it: the spread of the gaps between a stream's chunks.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.byte_tokenizer import ByteTokenizer
from millrace.stages.testing.scripted.script import Script
from tests.deploy.running import RunningServer

RATE = 5  # tokens/s of a stream
CUT_EVERY_S = 5.0


@dataclass
class Found:
    """Of one stream."""

    prompt: str
    token: str = ""
    last: int = 0
    text: str = ""
    is_done: bool = False
    complaints: list[str] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)

    def take(self, message: dict[str, Any]) -> None:
        """One message of the stream."""
        kind = message["type"]
        if kind == "error":
            self.complaints.append(f"{self.prompt}: {message}")
            self.is_done = True
        self.token = message.get("token", self.token)
        if "seq" in message:
            if message["seq"] != self.last + 1:
                self.complaints.append(f"{self.prompt}: message {message['seq']} behind {self.last}")
            self.last = message["seq"]
        if kind == "chunk":
            self.arrivals_s.append(time.perf_counter())
            self.text += "".join(choice["text"] for choice in message["body"]["choices"])
        self.is_done = self.is_done or kind == "done"


async def read_socket(url: str, streams: dict[str, Found], num_tokens: int, cut_every_s: float | None) -> int:
    """Asks for all of one socket's streams and reads them to their ends. How often it was cut off."""
    num_cuts, has_cuts = -1, cut_every_s is not None
    async with aiohttp.ClientSession() as http:
        while not all(found.is_done for found in streams.values()):
            num_cuts += 1
            async with http.ws_connect(f"{url}/v1/stream", autoclose=False) as socket:
                for id, found in streams.items():
                    if not found.is_done:
                        await socket.send_json(_ask(id, found, num_tokens, has_cuts))
                try:
                    async with asyncio.timeout(cut_every_s):
                        await _read(socket, streams, has_cuts)
                except TimeoutError:
                    connection = socket._response.connection
                    if connection is not None and connection.transport is not None:
                        connection.transport.abort()
    return num_cuts


def _ask(id: str, found: Found, num_tokens: int, has_cuts: bool) -> dict[str, Any]:
    if found.token:
        return {"type": "resume", "id": id, "token": found.token, "last": found.last}
    body = {"prompt": found.prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    return {"type": "create", "id": id, "endpoint": "completions", "body": body, "resume": has_cuts}


async def _read(socket: aiohttp.ClientWebSocketResponse, streams: dict[str, Found], has_cuts: bool) -> None:
    num_left = sum(not found.is_done for found in streams.values())
    while num_left:
        message = await socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(f"the server closed the socket: {message}")
        told = json.loads(message.data)
        found = streams[told["id"]]
        found.take(told)
        num_left -= found.is_done
        if has_cuts and (found.is_done or found.last % 64 == 0):
            await socket.send_json({"type": "credit", "id": told["id"], "last": found.last})


async def load(
    url: str, num_streams: int, num_sockets: int, num_tokens: int, cut_every_s: float | None
) -> tuple[list[Found], int]:
    """All streams, and the number of cuts."""
    streams = {f"s{i}": Found(f"stream {i}:") for i in range(num_streams)}
    shares = [dict(list(streams.items())[i::num_sockets]) for i in range(num_sockets)]
    cut = await asyncio.gather(*(read_socket(url, share, num_tokens, cut_every_s) for share in shares))
    return list(streams.values()), sum(cut)


def complaints_of(found: list[Found], num_tokens: int) -> list[str]:
    """What a client of any stream could complain of."""
    script, tokenizer = Script(), ByteTokenizer()
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    complaints = [complaint for one in found for complaint in one.complaints]
    for one in found:
        expected = tokenizer.decode(
            script.expected(tokenizer.encode_text(one.prompt), params), skip_special_tokens=True
        )
        if one.text != expected:
            complaints.append(f"{one.prompt}: {len(one.text)} characters that are not the answer of {len(expected)}")
    return complaints


def cpu_seconds(server: RunningServer) -> float:
    """Of all its threads so far."""
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(num_streams: int, num_sockets: int, seconds: float, cut_every_s: float | None) -> dict[str, Any]:
    """All of it; with the time after which each socket is cut off, None: never. `complaints` must be empty."""
    num_tokens = int(seconds * RATE)
    blocks = num_streams * (num_tokens // 16 + 4)
    engine = {
        "max_model_len": max(512, 2 * num_tokens),
        "max_num_seqs": num_streams,
        "max_num_batched_tokens": max(2048, 2 * num_streams),
        "num_gpu_blocks": blocks,
        "max_waiting_requests": 1024,
    }
    with RunningServer(engine=engine, server={"ws_max_streams": num_streams}, step_s=1 / RATE) as server:
        began_s, used_s = time.perf_counter(), cpu_seconds(server)
        found, num_cuts = asyncio.run(load(server.url, num_streams, num_sockets, num_tokens, cut_every_s))
        took_s, used_s = time.perf_counter() - began_s, cpu_seconds(server) - used_s
        violations = server.stats()["violations"]
    gaps = np.concatenate([np.diff(one.arrivals_s) for one in found])
    num_chunks = sum(len(one.arrivals_s) for one in found)
    return {
        "streams": num_streams,
        "sockets": num_sockets,
        "tokens_per_stream": num_tokens,
        "seconds": took_s,
        "cuts": num_cuts,
        "chunks": num_chunks,
        "complaints": complaints_of(found, num_tokens)[:10] + violations,
        "gap_p50_ms": 1e3 * float(np.percentile(gaps, 50)),
        "gap_p99_ms": 1e3 * float(np.percentile(gaps, 99)),
        "gap_max_ms": 1e3 * float(gaps.max()),
        "server_cpu_share": used_s / took_s,
        "server_cpu_us_per_token": 1e6 * used_s / (num_streams * num_tokens),
        "python": platform.python_version(),
    }


def main() -> None:
    """Prints the figures, and writes them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--sockets", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cut", action="store_true", help="cut each socket off every 5 s")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.streams, options.sockets, options.seconds, CUT_EVERY_S if options.cut else None)
    print(json.dumps(found, indent=2))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if found["complaints"]:
        raise SystemExit("something was lost, repeated or reordered")


if __name__ == "__main__":
    main()

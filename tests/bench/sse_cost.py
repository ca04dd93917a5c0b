"""What server-sent events cost the server, in CPU time a token.

    python -m tests.bench.sse_cost [--output results.json]

64 clients of another process read a stream each. The engine is the real one with a scripted device. Two servers take
turns: one token in each write, and five waiting at each write (a stage behind detokenize lets every fifth step through
with the four before it). Beside each, what the engine itself costs: readers in its own process, with no HTTP. CPU time
is that of all threads of the server's process, from /proc; what HTTP adds is the difference, and the targets are about
that. What a request costs besides its tokens is measured with short answers, and taken off.

How much of it no server can save is measured too: the calls of the system alone, a `send` of an event's length to each
of 64 sockets every 5 ms, read by the same clients.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from millrace.deploy.cli.serve import serve
from millrace.deploy.config import ServerConfig
from millrace.runtime.env.log import configure
from millrace.runtime.stage import Outlet, Stage
from millrace.stages.config import EngineConfig
from millrace.stages.messages import Prompt, Request, StepText
from millrace.stages.params import SamplingParams
from millrace.stages.testing.scripted.engine import ScriptedEngine
from millrace.stages.testing.scripted.script import Script
from tests.deploy.running import ROOT, RunningServer, post_bytes

NUM_STREAMS = 64
SHORT, LONG = 100, 500  # tokens a stream
STEP_S = 0.005
EVENT = b"a" * 200
TARGETS_US = {1: 10.0, 5: 3.0}
ENGINE = EngineConfig(max_num_seqs=NUM_STREAMS, max_model_len=1024, num_gpu_blocks=NUM_STREAMS * 64)


class Gather(Stage[StepText, StepText]):
    """Holds the text of steps back until there are `size`; then lets them go together."""

    inputs: ClassVar = {"in": StepText}
    outputs: ClassVar = {"out": StepText}

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: list[StepText] = []

    async def handle(self, batch: Sequence[StepText], out: Outlet[StepText]) -> None:
        for step in batch:
            self._held.append(step)
            if len(self._held) >= self.size or step.finishes:
                for held in self._held:
                    out.send(held)
                self._held.clear()


# -- the server's process


@contextlib.asynccontextmanager
async def engine(size: int) -> AsyncIterator[ScriptedEngine]:
    made = ScriptedEngine(ENGINE, Script(eos_probability=0.0), step_s=STEP_S)
    if size > 1:
        made.insert(Gather(size), after="detokenize")
    async with made as scripted:
        yield scripted


async def read_inside(size: int, num_tokens: int) -> float:
    """The same load with no HTTP: CPU seconds of this process."""
    async with engine(size) as scripted:

        async def read(number: int) -> None:
            params = SamplingParams(max_tokens=num_tokens, seed=number, ignore_eos=True)
            request = Request(f"inside-{number}", (Prompt(text=f"stream {number}"),), params)
            async for _ in await scripted.submit(request):
                pass

        began_s = time.process_time()
        await asyncio.gather(*(read(number) for number in range(NUM_STREAMS)))
        return time.process_time() - began_s


def send_alone(num_writes: int) -> float:
    """CPU seconds of a `send` to each of the streams, so many times, with nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reading = subprocess.Popen(_command("--run", "read", "--port", listener.getsockname()[1]), cwd=ROOT)
        clients = [listener.accept()[0] for _ in range(NUM_STREAMS)]
        for client in clients:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.recv(65536)
        began_s = time.process_time()
        for _ in range(num_writes):
            for client in clients:
                client.send(EVENT)
            time.sleep(STEP_S)
        spent_s = time.process_time() - began_s
        for client in clients:
            client.close()
        reading.wait()
        return spent_s


def serve_here(size: int) -> int:
    configure("console", "warning")
    return asyncio.run(serve(EngineConfig(), ServerConfig(port=0, log_level="warning"), lambda _: engine(size)))


# -- the clients' process


async def read_streams(port: int, num_tokens: int) -> None:
    async def read(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = {"prompt": f"stream {number}", "max_tokens": num_tokens, "seed": number, "stream": True}
        writer.write(post_bytes("/v1/completions", body | {"ignore_eos": True}))
        while await reader.read(65536):
            pass
        writer.close()

    await asyncio.gather(*(read(number) for number in range(NUM_STREAMS)))


# -- measuring


def _command(*arguments: str | int) -> list[str]:
    return [sys.executable, "-m", "tests.bench.sse_cost", *map(str, arguments)]


def cpu_s_with_http(size: int, num_tokens: int) -> float:
    """Of a server's process, from before the first request to after the last answer."""
    with RunningServer(command=_command("--run", "serve", "--size", size)) as server:
        began_s = _cpu_s(server.process.pid)
        reading = _command("--run", "read", "--port", server.address[1], "--tokens", num_tokens)
        subprocess.run(reading, cwd=ROOT, check=True)
        return _cpu_s(server.process.pid) - began_s


def cpu_s_inside(size: int, num_tokens: int) -> float:
    """Of the engine and readers beside it, with no HTTP."""
    command = _command("--run", "inside", "--size", size, "--tokens", num_tokens)
    return float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def _cpu_s(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def measure(rounds: int) -> dict[str, Any]:
    """Microseconds a token, of each round: long answers less short ones, so that what a request costs is not in it."""
    more = (LONG - SHORT) * NUM_STREAMS
    figures: dict[str, Any] = {}
    for size in TARGETS_US:
        both: dict[str, list[float]] = {"with_http": [], "engine_alone": [], "http": []}
        for _ in range(rounds):
            spent = [1e6 * (cost(size, LONG) - cost(size, SHORT)) / more for cost in (cpu_s_with_http, cpu_s_inside)]
            for name, value in zip(both, (*spent, spent[0] - spent[1]), strict=True):
                both[name].append(round(value, 2))
        figures[f"{size}_waiting"] = both | {"http_median": round(statistics.median(both["http"]), 2)}
    sends = [round(1e6 * send_alone(LONG) / LONG / NUM_STREAMS, 2) for _ in range(rounds)]
    return figures | {"send_alone_us_a_write": sends}


def main() -> int:
    parser = argparse.ArgumentParser(description="What server-sent events cost the server, in CPU time a token.")
    parser.add_argument("--rounds", type=int, default=9, help="a median of few says little: their spread is 3 us")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--run", choices=("serve", "inside", "read"), help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=LONG, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    match options.run:
        case "serve":
            return serve_here(options.size)
        case "inside":
            print(asyncio.run(read_inside(options.size, options.tokens)))
            return 0
        case "read":
            asyncio.run(read_streams(options.port, options.tokens))
            return 0
    figures = {
        "machine": {"python": platform.python_version(), "processor": platform.machine(), "streams": NUM_STREAMS},
        "us_of_cpu_a_token": measure(options.rounds),
    }
    for size, target_us in TARGETS_US.items():
        found = figures["us_of_cpu_a_token"][f"{size}_waiting"]
        found["target"], found["is_met"] = target_us, found["http_median"] < target_us
        print(f"{size} waiting: {found['http_median']} us a token for HTTP (target {target_us}), {found}")
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a dashboard that is open costs: python -m tests.bench.viewer_cost [--pairs 20] [--output results.json]

The real pipeline behind a real server, with a device that sleeps 1 ms or 7 ms a step and 64 sequences that decode
without end. A viewer in a process of its own comes and goes, in the order away, there, there, away; it asks for what
the page does when it is opened, four times a second (`--everything`: for all that any view shows, at once). Told: by
how much a step takes longer while it looks, as the median of the pairs and its 95 % interval, and the processor time
of an update. Asked: nothing measurable, which is taken to be an interval that ends below 2 %, and holds 0 or has its
median below 0.5 %. On a machine that does other things the interval is too wide to show anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from millrace.deploy.config import ServerConfig
from millrace.deploy.dashboard.viewer import INTERVAL_S
from millrace.deploy.server.server import Server
from millrace.stages.testing.scripted.engine import ScriptedEngine
from tests.bench.pipeline_cost import MAX_MODEL_LEN, FreeDevice, decode, end, engine_with

NUM_SEQUENCES = 64
STRETCH_S = 2.0
SETTLE_S = 0.4  # after the viewer came or went
STEP_S = (0.001, 0.007)
MOST, SURE = 0.005, 0.02  # slower, at the median; and the most that the interval may allow for
OPENED = ("overview", "pipeline", "steps", "history")  # what the page asks for when it is opened
EVERYTHING = (*OPENED, "requests", "blocks", "prefixes", "incidents", "latency", "quantiles", "loop")


class Viewer:
    """A process that looks, or does not."""

    def __init__(self, url: str, topics: Sequence[str]) -> None:
        command = [sys.executable, "-m", "tests.bench.viewer_cost", "--look", url, "--topics", *topics]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def turn(self, is_there: bool) -> None:
        """Waits until it has come, or gone."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{int(is_there)}\n")
        self._process.stdin.flush()
        answer = await asyncio.to_thread(self._process.stdout.readline)
        assert answer.strip() == "done", f"the viewer said {answer!r}"

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


async def look(url: str, topics: Sequence[str]) -> None:
    """The other process: comes and goes as its stdin says."""
    os.nice(10)
    loop, task = asyncio.get_running_loop(), None
    async with aiohttp.ClientSession() as http:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                task = None
            if line.strip() == "1":
                seen = asyncio.Event()
                task = asyncio.create_task(_watch(http, url, topics, seen))
                await seen.wait()
            print("done", flush=True)
    if task is not None:
        task.cancel()


async def _watch(http: aiohttp.ClientSession, url: str, topics: Sequence[str], seen: asyncio.Event) -> None:
    async with http.ws_connect(f"{url}/dashboard/feed", max_msg_size=0) as socket:
        await socket.send_str('{"type":"hello"}')
        await socket.receive_str()
        await socket.send_str(json.dumps({"type": "subscribe", "topics": dict.fromkeys(topics, {})}))
        while True:
            json.loads(await socket.receive_str())
            seen.set()


async def stretch(device: FreeDevice) -> tuple[float, float, int]:
    """(seconds a step, processor seconds, steps) from now on."""
    first, cpu_s = device.num_steps, time.process_time()
    await asyncio.sleep(STRETCH_S)
    cpu_s = time.process_time() - cpu_s
    last = device.num_steps - 1
    return (device.began[last] - device.began[first]) / (last - first), cpu_s, last + 1 - first


async def measure(step_s: float, num_pairs: int, topics: Sequence[str]) -> dict[str, Any]:
    """Of steps that take the device `step_s`."""
    pairs: list[dict[bool, tuple[float, float, int]]] = []
    most_steps = int(2 * (STRETCH_S + SETTLE_S) / step_s)
    while len(pairs) < num_pairs:
        device = FreeDevice(NUM_SEQUENCES, step_s)
        engine: ScriptedEngine = engine_with(device, NUM_SEQUENCES, steps_in_flight=2)
        config = ServerConfig(port=0, log_level="warning", stats_interval_s=0.0)
        async with Server(config) as server:
            await engine.start()
            server.attach(engine)
            viewer = Viewer(server.url, topics)
            tasks = await decode(engine, NUM_SEQUENCES)
            while len(pairs) < num_pairs and device.num_steps < MAX_MODEL_LEN - most_steps:
                order = (False, True) if len(pairs) % 2 == 0 else (True, False)
                taken = {}
                for is_there in order:
                    await viewer.turn(is_there)
                    await asyncio.sleep(SETTLE_S)
                    taken[is_there] = await stretch(device)
                pairs.append(taken)
            viewer.close()
            await end(engine, tasks)
    away, there = (np.array([pair[is_there] for pair in pairs]) for is_there in (False, True))
    slower = there[:, 0] / away[:, 0] - 1
    draws = np.random.default_rng(0).choice(slower, (2_000, len(slower)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5]).tolist()
    middle = float(np.median(slower))
    more_s = there[:, 1] - away[:, 1] / away[:, 2] * there[:, 2]  # processor time that steps do not explain
    return {
        "step_ms": step_s * 1e3,
        "pairs": len(pairs),
        "period_ms_away": round(1e3 * float(np.median(away[:, 0])), 4),
        "period_ms_there": round(1e3 * float(np.median(there[:, 0])), 4),
        "slower": round(middle, 5),
        "slower_95": [round(low, 5), round(high, 5)],
        "cpu_ms_an_update": round(1e3 * float(np.median(more_s)) / (STRETCH_S / INTERVAL_S), 2),
        "is_met": high <= SURE and (low <= 0 or middle <= MOST),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="What a dashboard that is open costs.")
    parser.add_argument("--pairs", type=int, default=20, help="of stretches without a viewer and with one")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--everything", action="store_true", help="the viewer asks for all that any view shows")
    parser.add_argument("--look", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--topics", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look:
        asyncio.run(look(options.look, options.topics))
        return 0
    topics = EVERYTHING if options.everything else OPENED
    machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "load_at_start": os.getloadavg()[0]}
    figures = [asyncio.run(measure(step_s, options.pairs, topics)) for step_s in STEP_S]
    for each in figures:
        low, high = each["slower_95"]
        word = "met   " if each["is_met"] else "MISSED"
        print(
            f"{word} {each['step_ms']:g} ms a step: {each['slower']:+.2%} slower with a viewer ({low:+.2%} to"
            f" {high:+.2%}), {each['cpu_ms_an_update']:.1f} ms of processor time an update"
        )
    if options.output is not None:
        told = {"machine": machine, "topics": topics, "python": platform.python_version(), "figures": figures}
        options.output.write_text(json.dumps(told, indent=2) + "\n")
    return 0 if all(each["is_met"] for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())

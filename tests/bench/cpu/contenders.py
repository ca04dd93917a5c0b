"""The engines that are compared: in a process or behind a server, stopped while another one is measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from millrace.deploy.cli.bench.load import BenchRequest
from millrace.deploy.cli.bench.measures import statistics
from millrace.deploy.cli.bench.serve import BenchClient, measure
from tests.bench.workloads import IN_FLIGHT, Asked

Figures = dict[str, float]

WORKER = Path(__file__).with_name("worker.py")
READY_WITHIN_S = 600.0


@dataclass(frozen=True, slots=True)
class InProcess:
    """An engine of `worker.py`, under the Python that has it installed."""

    label: str
    engine: str
    python: str
    model: str
    num_threads: int
    _: KW_ONLY
    version: str = "?"
    leaves_out: frozenset[str] = frozenset()  # workloads
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        return [self.python, str(WORKER), self.engine, self.model, str(self.num_threads)]


@dataclass(frozen=True, slots=True)
class Served:
    """A server with OpenAI's completions, by the command that starts it; `{port}` in it becomes a free port."""

    label: str
    command: list[str]
    _: KW_ONLY
    version: str = "?"
    leaves_out: frozenset[str] = frozenset()
    environment: Mapping[str, str] = field(default_factory=dict)
    keeps_connections: bool = True  # between two requests


Contender = InProcess | Served


class Running:
    """A contender that has been started. It runs only while it is asked something: its processes are stopped
    (SIGSTOP) in between, so that no waiting engine takes a share of the cores."""

    def __init__(self, label: str, process: asyncio.subprocess.Process, ready_s: float) -> None:
        self.label = label
        self.ready_s = ready_s
        self._process = process

    async def answer(self, workload: str, asked: Sequence[Asked]) -> Figures:
        """What the workload came to."""
        raise NotImplementedError

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Lets its processes run. Raises RuntimeError if it has ended by itself."""
        if self._process.returncode is not None or not self._signal(signal.SIGCONT):
            raise RuntimeError(f"{self.label} is gone ({self._end()})")
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> bool:
        """Sends it to all its processes. False if there are none."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True

    def _end(self) -> str:
        """How its first process ended."""
        status = self._process.returncode
        if status is None:
            return "not implemented yet"
        return "killed, as by a system without memory" if status == -signal.SIGKILL else f"exit status {status}"

    def peak_mib(self) -> float:
        """The most memory that its processes have had resident, MiB, each by itself, added up."""
        return sum(_peak_kib(pid) for pid in _processes(self._process.pid)) / 1024

    def cpu_s(self) -> float:
        """CPU time of all threads of its processes so far."""
        spent_ns = 0
        for pid in _processes(self._process.pid):
            for task in Path("/proc").glob(f"{pid}/task/*"):
                with suppress(OSError):  # it has just ended
                    spent_ns += int((task / "schedstat").read_text().split()[0])
        return spent_ns / 1e9

    async def stop(self) -> None:
        """Ends all its processes."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._signal(number)
        try:
            await asyncio.wait_for(self._process.wait(), 20)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()


class RunningWorker(Running):
    """Answers W1 to W3 over its pipe."""

    async def answer(self, workload: str, asked: Sequence[Asked]) -> Figures:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        said = await _read_line(self._process, self.label)
        num_tokens = sum(num_answer for _, num_answer in asked)
        if workload == "w1" and said["first_s"] is not None:
            return {
                "decode_tok_s": (num_tokens - 1) / (said["whole_s"] - said["first_s"]),
                "ttft_ms": 1e3 * said["first_s"],
            }
        return {"output_tok_s": num_tokens / said["whole_s"], "wall_s": said["whole_s"]}


class RunningServer(Running):
    """Answers over HTTP, token ids in and server-sent events out."""

    def __init__(
        self, label: str, process: asyncio.subprocess.Process, ready_s: float, url: str, keeps_connections: bool
    ) -> None:
        super().__init__(label, process, ready_s)
        self.url = url
        self._keeps_connections = keeps_connections

    async def answer(self, workload: str, asked: Sequence[Asked]) -> Figures:
        asks = [BenchRequest(ids, num_answer) for ids, num_answer in asked]
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0, force_close=not self._keeps_connections)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            client = BenchClient(session, self.url, "/v1/completions")
            client.model, client.ignores_eos = await client.served_model(), True
            wall_s, records = await measure(client, asks, [0.0] * len(asks), IN_FLIGHT[workload])
        for record, (_, num_answer) in zip(records, asked, strict=True):
            if record.error or record.num_output != num_answer:
                raise RuntimeError(f"{self.label}: {record.num_output} tokens of {num_answer}: {record.error}")
        if workload == "w1":
            (one,) = records
            return {"decode_tok_s": 1 / (one.tpot_s or float("inf")), "ttft_ms": 1e3 * one.ttft_s}
        figures = {"output_tok_s": sum(record.num_output for record in records) / wall_s, "wall_s": wall_s}
        ttft = statistics("ttft", [record.ttft_s for record in records], (99.0,))
        itl = statistics("itl", [gap_s for record in records for gap_s in record.itls_s], (99.0,))
        names = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
        return figures | {name: (ttft | itl)[name] for name in names}


async def start(contender: Contender, log: Path) -> Running:
    """Starts it and waits until it answers; what it prints goes to `log`. Raises RuntimeError if it never does."""
    began_s = time.perf_counter()
    with log.open("wb") as out:
        if isinstance(contender, InProcess):
            streams = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "stderr": out}
            process = await _spawn(contender, contender.command, **streams)
            with _ended_if_it_fails(process):
                await _read_line(process, contender.label)
            running: Running = RunningWorker(contender.label, process, time.perf_counter() - began_s)
        else:
            port = _free_port()
            url = f"http://127.0.0.1:{port}"
            command = [part.replace("{port}", str(port)) for part in contender.command]
            process = await _spawn(contender, command, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out)
            with _ended_if_it_fails(process):
                await _wait_for(url, process, contender.label)
            ready_s = time.perf_counter() - began_s
            running = RunningServer(contender.label, process, ready_s, url, contender.keeps_connections)
    running.pause()
    return running


@contextmanager
def _ended_if_it_fails(process: asyncio.subprocess.Process) -> Iterator[None]:
    """A start that is given up, or cut short by who stops the benchmark, leaves no engine behind."""
    try:
        yield
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise


async def _spawn(contender: Contender, command: Sequence[str], **streams: Any) -> asyncio.subprocess.Process:
    env = {**os.environ, **contender.environment}
    limit = 1 << 26  # of a line
    return await asyncio.create_subprocess_exec(*command, env=env, start_new_session=True, limit=limit, **streams)


async def _read_line(process: asyncio.subprocess.Process, label: str) -> dict[str, float]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"{label} has ended with exit code {await process.wait()}; see its log")
    try:
        said: dict[str, float] = json.loads(line)
    except ValueError:
        raise RuntimeError(f"{label} said {line[:80]!r}, which is no answer") from None
    return said


async def _wait_for(url: str, process: asyncio.subprocess.Process, label: str) -> None:
    end_s = time.perf_counter() + READY_WITHIN_S
    async with aiohttp.ClientSession() as session:
        while time.perf_counter() < end_s and process.returncode is None:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(url + "/health", timeout=aiohttp.ClientTimeout(2)) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.02)
    raise RuntimeError(f"{label} did not come up at {url}; see its log")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _processes(group: int) -> Iterator[int]:
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getpgid(int(folder.name)) == group:
                yield int(folder.name)


def _peak_kib(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1])
    return 0

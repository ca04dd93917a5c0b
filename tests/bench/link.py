"""What a link between two processes costs: the round trip of a step's tokens, and the CPU time of both ends.

    python -m tests.bench.link [--rounds 9] [--trips 300] [--output results.json]

The other end is a process that sends each `StepTokens` back. One is joined by a socketpair and others by TCP over
loopback, plain, with pings, and with TLS; all are asked in turns, so drifts of the machine fall on all. Told are
medians over the rounds: of a round's median round trip, and of its CPU time a round trip in each process. Run it on a
machine at rest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import trustme

from millrace.runtime.env.loops import loop_factory
from millrace.runtime.processes.auth import Role
from millrace.runtime.processes.link import Link
from millrace.runtime.processes.link_channels import InboundChannel, OutboundChannel
from millrace.runtime.processes.tls import FleetTls, TlsFiles
from millrace.runtime.processes.tls_transport import TlsStream
from millrace.runtime.processes.transport import SocketTransport
from millrace.stages.messages import StepTokens
from millrace.stages.split.protocol import CODEC, StatusQuery, StatusReply

KINDS = ("unix", "tcp", "tcp+pings", "tcp+tls")
ROWS = (1, 256)
CAPACITY = 8


class Asked:
    """One echoing process, and the link to it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        self._ours, theirs = socketpair(kind)
        with theirs:
            command = [sys.executable, "-m", __spec__.name, "--echo", str(theirs.fileno()), "--kind", kind]
            command += ["--certificates", str(folder)]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.there: OutboundChannel[StepTokens] = OutboundChannel("there", CAPACITY)
        self.back: InboundChannel[StepTokens] = InboundChannel("back", CAPACITY)

    async def start(self) -> None:
        transport = await made_transport(self._ours, self._kind, self._folder, "dialer")
        self.link = make_link(transport, self._kind, lambda word: self.reply.set_result(word.value), print)
        self.link.add_outbound(self.there)
        self.link.add_inbound(self.back)
        self.link.start()

    async def cpu_s(self) -> float:
        """CPU time of the other process so far."""
        self.reply = asyncio.get_running_loop().create_future()
        self.link.post(StatusQuery(0, "cpu"))
        return float(await self.reply)

    async def measure(self, step: StepTokens, num_trips: int) -> dict[str, float]:
        """One round: microseconds."""
        there_s, here_s, trips = await self.cpu_s(), time.process_time(), []
        answers = aiter(self.back)
        for _ in range(num_trips):
            began_s = time.perf_counter()
            await self.there.send(step)
            await anext(answers)
            trips.append(time.perf_counter() - began_s)
        here_s = time.process_time() - here_s
        there_s = await self.cpu_s() - there_s
        return {
            "round_trip_us": 1e6 * statistics.median(trips),
            "least_us": 1e6 * min(trips),
            "cpu_here_us": 1e6 * here_s / num_trips,
            "cpu_there_us": 1e6 * there_s / num_trips,
        }

    def stop(self) -> None:
        self.link.close()
        self.process.wait(10)


async def made_transport(sock: socket.socket, kind: str, folder: Path, role: Role) -> SocketTransport:
    if kind != "tcp+tls":
        return SocketTransport(sock)
    sock.setblocking(False)
    stream = TlsStream(sock, FleetTls(files_in(folder), role), "localhost")
    await stream.shake_hands()
    return stream.transport()


def files_in(folder: Path) -> TlsFiles:
    return TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")


def make_certificates(folder: Path) -> None:
    authority, files = trustme.CA(key_type=trustme.KeyType.ECDSA), files_in(folder)
    issued = authority.issue_cert("localhost", key_type=trustme.KeyType.ECDSA)
    issued.cert_chain_pems[0].write_to_path(files.cert)
    files.key.touch(0o600)
    issued.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.ca)


def make_link(transport: SocketTransport, kind: str, on_word: Any, on_lost: Any) -> Link:
    return Link(transport, CODEC, on_word, on_lost, timeout_s=10.0 if kind == "tcp+pings" else None)


def socketpair(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


def step_of(num_rows: int) -> StepTokens:
    rows = np.arange(num_rows)
    return StepTokens(7, rows, rows.astype(np.int64), rows + 100, rows + 5000, np.zeros(num_rows, np.int8))


async def measure(rounds: int, num_trips: int) -> dict[str, dict[str, dict[str, float]]]:
    """kind -> rows -> figure, medians over the rounds."""
    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder))
        asked = {kind: Asked(kind, Path(folder)) for kind in KINDS}
        for one in asked.values():
            await one.start()
    told: dict[str, Any] = {kind: {str(rows): [] for rows in ROWS} for kind in KINDS}
    for number in range(-1, rounds):  # the first one warms up
        for rows in ROWS:
            for kind in KINDS if number % 2 else KINDS[::-1]:
                figures = await asked[kind].measure(step_of(rows), num_trips)
                if number >= 0:
                    told[kind][str(rows)].append(figures)
    for one in asked.values():
        one.stop()
    return {
        kind: {
            rows: {name: round(statistics.median(one[name] for one in each), 1) for name in each[0]}
            for rows, each in by_rows.items()
        }
        for kind, by_rows in told.items()
    }


async def echo(number: int, kind: str, certificates: Path) -> None:
    """The other process: sends everything back until its link ends."""
    over = asyncio.Event()
    sock = socket.socket(fileno=number)
    transport = await made_transport(sock, kind, certificates, "listener")
    link = make_link(transport, kind, lambda _: link.post(StatusReply(0, time.process_time())), lambda _: over.set())
    there: InboundChannel[StepTokens] = InboundChannel("there", CAPACITY)
    back: OutboundChannel[StepTokens] = OutboundChannel("back", CAPACITY)
    link.add_inbound(there)
    link.add_outbound(back)
    link.start()

    async def answer() -> None:
        async for step in there:
            await back.send(step)

    answering = asyncio.ensure_future(answer())
    await over.wait()
    answering.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(description="Round trips and CPU time of a link between two processes.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--trips", type=int, default=300, help="a round")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    parser.add_argument("--echo", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    parser.add_argument("--certificates", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        if options.echo is not None:
            runner.run(echo(options.echo, options.kind, options.certificates))
            return 0
        told = runner.run(measure(options.rounds, options.trips))
    print(f"{'':12}{'rows':>6}" + "".join(f"{name:>16}" for name in told[KINDS[0]][str(ROWS[0])]))
    for kind, by_rows in told.items():
        for rows, figures in by_rows.items():
            print(f"{kind:12}{rows:>6}" + "".join(f"{value:16.1f}" for value in figures.values()))
    machine = {"python": platform.python_version(), "processor": platform.machine(), "cpus": os.cpu_count()}
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": machine, "figures": told}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

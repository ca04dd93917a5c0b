"""Strangers at every port of every kind of process: refused, in bounded memory and time.

`LISTENERS` has each place in the code that listens, and each is in a test here or in one that it names. With
MILLRACE_FULL=1 every process gets 10,000 connections with random frames at each port, recorded handshakes again, and
connections that send a byte a second; in CI the ports of one process do, with fewer.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trustme

from millrace.deploy.cli.machines.engine_pages import MAX_CONNECTIONS, EnginePages
from millrace.deploy.cli.replay_dashboard import ReplayDashboard
from millrace.deploy.config import ServerConfig
from millrace.deploy.dashboard.playback.data import PlaybackData
from millrace.runtime.processes.auth import FleetKey
from millrace.runtime.processes.tcp import TcpListener
from millrace.runtime.processes.tls import FleetTls
from tests.counts import FULL as IS_FULL
from tests.counts import count, first_seed
from tests.deploy.cli.machines.strangers import (
    Address,
    answers_to_junk,
    closed_after,
    family,
    listening_ports,
    listening_sockets,
    num_files,
    received,
    recorder,
    resident_mib,
)
from tests.deploy.cli.machines.test_engine_and_route import MILLRACE, SETTINGS, EngineCommand, asked
from tests.deploy.running import ROOT, RunningServer
from tests.deploy.sockets import serving
from tests.deploy.test_split import until
from tests.runtime.processes.test_tls import issue

LISTENERS = {  # place in the code -> what listens there
    "deploy/server/server.py": "`serve` in all modes, and `route`",
    "deploy/cli/serve.py": "the same, before the model is loaded",
    "deploy/cli/fronts/front_process.py": "the same, with several fronts",
    "deploy/front_processes/sockets.py": "Unix sockets of fronts and engines, in a folder of this user",
    "deploy/front_processes/other_fronts.py": "the same",
    "deploy/cli/fronts/core_process.py": "the same",
    "deploy/http/listening.py": "what opens the ports of all these",
    "deploy/cli/doctor/service.py": "`doctor`, which closes the port at once",
    "deploy/cli/machines/engine.py": "fleet port of `engine`",
    "deploy/cli/machines/engine_pages.py": "pages of `engine`",
    "deploy/cli/replay_dashboard.py": "`replay --dashboard`",
    "deploy/cli/chaos/relay.py": "`chaos`, in front of the fleet ports of its engines",
    "deploy/ray/ray_executor.py": "a port for each engine that starts, as that of `engine`, with a key of its own",
    "runtime/processes/tcp.py": "what opens the fleet ports",
}
LISTENS = re.compile(
    r"\b(ListeningSockets\.open|create_server|start_server|create_unix_server|TcpListener|listen_at|UnixListener)\("
    r"|\bsock\.listen\("
)
SERVERS = {  # kind -> flags of `serve`
    "one process": [],
    "an engine process": ["--mode", "split"],
    "two engine processes": ["--data-parallel-size", "2"],
    "two fronts": ["--front-processes", "2"],
    "two ranks": ["--device", "cpu", "--tensor-parallel-size", "2"],
    "two stages": ["--device", "cpu", "--pipeline-parallel-size", "2"],
}
REFUSALS = (b"400", b"401", b"404", b"408", b"505")  # of HTTP, of what is no request
NONCE_BYTES = 32  # that a stranger gets of an engine at most
ALERT_BYTES = 7  # with TLS
NUM_FRAMES = count(100, 10_000)
MOST_MIB = 32.0  # that strangers may add to a process
KEY = {"Authorization": "Bearer right"}

pytestmark = pytest.mark.security


def test_connections_that_never_finish_a_header_do_not_keep_probes_from_an_engine() -> None:
    async def main() -> None:
        engine = SimpleNamespace(state="ready", num_fronts=1, num_live=0, labels={})
        pages = EnginePages(cast(Any, engine), "127.0.0.1", 0)
        await pages.start()
        address = ("127.0.0.1", int(pages.url.rpartition(":")[2]))
        slow = [await asyncio.open_connection(*address) for _ in range(MAX_CONNECTIONS)]
        for _, writer in slow:
            writer.write(b"GET /health HTTP/1.1\r\nX-A: ")
        try:
            async with asyncio.timeout(60.0):
                for path, status in (("/health", b" 200 "), ("/metrics", b" 503 ")):
                    reader, writer = await asyncio.open_connection(*address)
                    writer.write(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
                    assert status in await reader.readline()
                    writer.close()
        finally:
            for _, writer in slow:
                writer.close()
            await pages.aclose()

    asyncio.run(main())


def test_each_place_that_listens_is_known() -> None:
    found = set()
    for folder in ("deploy", "stages", "runtime", "model", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            code = re.sub(r"^ *(async )?(def|class) .*|#.*", "", path.read_text(), flags=re.MULTILINE)
            if LISTENS.search(code):
                found.add(str(path.relative_to(ROOT)))
    assert found == set(LISTENERS)


@asynccontextmanager
async def _server() -> AsyncIterator[Address]:
    async with serving(api_key=("right",)) as running:
        yield ("127.0.0.1", int(running.server.url.rpartition(":")[2]))


@asynccontextmanager
async def _pages() -> AsyncIterator[Address]:
    engine = SimpleNamespace(state="ready", num_fronts=1, num_live=0, labels={})
    pages = EnginePages(cast(Any, engine), "127.0.0.1", 0)
    await pages.start()
    yield ("127.0.0.1", int(pages.url.rpartition(":")[2]))
    await pages.aclose()


@asynccontextmanager
async def _playback() -> AsyncIterator[Address]:
    async with ReplayDashboard(cast(PlaybackData, None), ServerConfig(port=0)) as playback:
        yield ("127.0.0.1", int(playback.url.rpartition(":")[2]))


@asynccontextmanager
async def _fleet_port(folder: Path, has_tls: bool) -> AsyncIterator[Address]:
    tls = FleetTls(issue(trustme.CA(key_type=trustme.KeyType.ECDSA), folder), "listener") if has_tls else None
    taken: list[Any] = []
    listener = TcpListener("127.0.0.1", 0, FleetKey(bytes(range(32))), taken.append, tls=tls)
    await listener.start()
    yield listener.address
    assert listener.num_refused == NUM_FRAMES and not taken
    await listener.aclose()


PORTS: dict[str, Callable[[Path], AbstractAsyncContextManager[Address]]] = {
    "server": lambda folder: _server(),
    "pages of an engine": lambda folder: _pages(),
    "recording": lambda folder: _playback(),
    "fleet": lambda folder: _fleet_port(folder, has_tls=False),
    "fleet with TLS": lambda folder: _fleet_port(folder, has_tls=True),
}


@pytest.mark.timeout(0)
@pytest.mark.parametrize("kind", PORTS)
def test_random_frames_at_a_port_are_answered_with_a_refusal_or_nothing(kind: str, tmp_path: Path) -> None:
    seed = first_seed()

    async def main() -> None:
        async with PORTS[kind](tmp_path) as address:
            answers = await asyncio.to_thread(lambda: list(answers_to_junk(address, NUM_FRAMES, seed)))
        assert len(answers) == NUM_FRAMES
        for got in answers:
            if kind == "fleet":
                assert len(got) <= NONCE_BYTES
            elif kind == "fleet with TLS":
                assert len(got) <= ALERT_BYTES
            else:
                assert_refused(got)

    asyncio.run(main())
    assert not Path("stranger-canary").exists()


def assert_refused(got: bytes) -> None:
    assert got == b"" or got.split()[1] in REFUSALS, got


def attack(address: Address, first: bytes, check: Callable[[bytes], object], seed: int) -> None:
    """Junk, and then connections that send `first` and a byte a second, which must end."""
    for got in answers_to_junk(address, NUM_FRAMES, seed):
        check(got)
    assert len(closed_after(address, 40, first, 60.0)) == 40


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
@pytest.mark.parametrize("kind", SERVERS)
def test_strangers_at_every_port_of_a_server_are_refused_and_cost_little(kind: str) -> None:
    flags = ["--port", "0", "--api-key", "right", "--admin-key", "admin", "--header-timeout-s", "3", *SETTINGS]
    seed = first_seed()
    with RunningServer(command=[*MILLRACE, "serve", *flags, *SERVERS[kind]]) as server:
        pid = server.process.pid
        due = text(server)
        sockets = listening_sockets(pid)
        ports = {port for _, port in sockets.tcp}
        assert {host for host, _ in sockets.tcp} == {"127.0.0.1"}
        others = sorted(ports - {server.address[1]})
        assert len(others) == (2 if kind in ("two ranks", "two stages") else 0)
        for path in sockets.unix:
            assert path.startswith("/") and Path(path).parent.stat().st_mode & 0o777 == 0o700, path
        assert len(sockets.unix) == (3 if kind == "two fronts" else 0)
        before = resident_mib(pid), {one: num_files(one) for one in family(pid)}
        for port in others:  # of ranks, which have met: no key would be asked for
            with pytest.raises(TimeoutError), socket.create_connection(("127.0.0.1", port), 1.0):
                pass
        attack(server.address, b"GET /health HTTP/1.1\r\nX-A: ", assert_refused, seed)
        for path in ("/v1/completions", "/v1/stream", "/metrics", "/admin/trace"):
            assert server.get(path, {"Authorization": "Bearer wrong"}).status in (401, 405), path
        assert server.get("/dashboard/feed").status == 426, "its key comes in a WebSocket's first message"
        assert text(server) == due
        assert resident_mib(pid) - before[0] < MOST_MIB * len(before[1])
        for one, files in before[1].items():
            until(lambda one=one, files=files: num_files(one) <= files + 2)  # type: ignore[misc]
        assert not Path("stranger-canary").exists()
        server.signal(signal.SIGTERM)
        assert server.process.wait(60.0) == 0


def text(server: RunningServer) -> str:
    answer = server.post("/v1/completions", asked(0, 8), KEY)
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["text"])


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_strangers_at_every_port_of_a_fleet_under_faults_change_nothing() -> None:
    seed = first_seed()
    command = [*MILLRACE, "chaos", "--fleet", "1x2", "--seed", "3", "--minutes", "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as chaos:
        num_sent, end_s = 0, time.monotonic() + 50.0
        while time.monotonic() < end_s and chaos.poll() is None:
            with suppress(OSError, ValueError):  # processes and ports come and go
                for port in listening_ports(chaos.pid):
                    num_sent += len(list(answers_to_junk(("127.0.0.1", port), 50, seed + num_sent)))
        told = chaos.communicate()[0]
        assert chaos.returncode == 0, told
        assert num_sent > 1_000
    assert not Path("stranger-canary").exists()


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
@pytest.mark.parametrize("has_tls", [False, True])
def test_strangers_at_every_port_of_a_fleet_are_refused_and_cost_little(tmp_path: Path, has_tls: bool) -> None:
    key = tmp_path / "fleet.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    files, tls = issue(trustme.CA(key_type=trustme.KeyType.ECDSA), tmp_path), list[str]()
    if has_tls:
        tls = ["--fleet-tls-cert", str(files.cert), "--fleet-tls-key", str(files.key), "--fleet-tls-ca", str(files.ca)]
    most_bytes = ALERT_BYTES if has_tls else NONCE_BYTES
    seed = first_seed()
    with ExitStack() as stack:
        engine = stack.enter_context(EngineCommand(key, more=tls))
        engine.wait_until_ready()
        (host, port), sent = stack.enter_context(recorder(engine.host_and_port))
        flags = ["--port", "0", "--fleet-key-file", str(key), "--engine", f"{host}:{port}", *tls]
        flags += ["--api-key", "right", "--admin-key", "admin", "--header-timeout-s", "3"]
        front = stack.enter_context(RunningServer(command=[*MILLRACE, "route", *flags]))
        pages = ("127.0.0.1", int(engine.pages.rpartition(":")[2]))
        assert listening_ports(engine.process.pid) == {engine.host_and_port[1], pages[1]}
        assert listening_ports(front.process.pid) == {front.address[1]}
        before = {one: (resident_mib(one), num_files(one)) for one in (engine.process.pid, front.process.pid)}

        def check_bytes(got: bytes) -> None:
            assert len(got) <= most_bytes

        attack(engine.host_and_port, b"\x16\x03" if has_tls else b"", check_bytes, seed)
        for address in (pages, front.address):
            attack(address, b"GET /health HTTP/1.1\r\nX-A: ", assert_refused, seed)
        proven = [recorded for recorded in sent if len(recorded) > 64]  # with the proof of the key, and frames
        assert proven
        for recorded in proven:
            with socket.create_connection(engine.host_and_port, 30.0) as stranger:
                stranger.sendall(recorded)
                if has_tls:  # the answer to its first message, certificate included, and then the end
                    assert len(received(stranger)) < 4_096
                else:
                    assert len(received(stranger)) <= NONCE_BYTES, "a recorded handshake is refused"

        paths = json.loads(front.get("/openapi.json", KEY).body)["paths"]
        admin = [(path, method) for path in paths if path.startswith("/admin") for method in paths[path]]
        assert len(admin) > 3
        for path, method in admin:
            for headers in ({}, KEY):  # without any key, and with one that is not the admin key
                assert front.get(path.replace("{", "").replace("}", ""), headers, method.upper()).status == 401, path

        assert front.post("/v1/completions", asked(0, 8), KEY).status == 200
        assert not Path("stranger-canary").exists()
        for one, (mib, files) in before.items():
            assert resident_mib(one) - mib < MOST_MIB
            until(lambda one=one, files=files: num_files(one) <= files + 2)  # type: ignore[misc]
        assert json.loads(engine.page("/health")[1])["fronts"] == 1
        front.signal(signal.SIGTERM)
        assert front.process.wait(30.0) == 0

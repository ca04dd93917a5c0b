"""Strangers at every port of every process of a fleet: refused, in bounded memory and time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.deploy.cli.machines.engine_pages import MAX_CONNECTIONS, EnginePages
from tests.deploy.cli.machines.strangers import (
    answers_to_junk,
    closed_after,
    listening_ports,
    num_files,
    received,
    recorder,
    resident_mib,
)
from tests.deploy.cli.machines.test_engine_and_route import MILLRACE, EngineCommand, asked
from tests.deploy.running import RunningServer
from tests.deploy.test_split import until

IS_FULL = bool(os.environ.get("MILLRACE_FULL"))
NONCE_BYTES = 32  # that a stranger gets of an engine at most
NUM_FRAMES = 10_000
MOST_MIB = 32.0  # that strangers may add to a process
KEY = {"Authorization": "Bearer right"}

pytestmark = pytest.mark.security


def test_connections_that_never_finish_a_header_do_not_keep_probes_from_an_engine() -> None:
    async def main() -> None:
        engine = SimpleNamespace(state="ready", num_fronts=1, num_live=0)
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


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not IS_FULL, reason="MILLRACE_FULL")
def test_strangers_at_every_port_of_a_fleet_are_refused_and_cost_little(tmp_path: Path) -> None:
    key = tmp_path / "fleet.key"
    key.write_bytes(bytes(range(32)))
    key.chmod(0o600)
    with ExitStack() as stack:
        engine = stack.enter_context(EngineCommand(key))
        engine.wait_until_ready()
        (host, port), sent = stack.enter_context(recorder(engine.host_and_port))
        flags = ["--port", "0", "--fleet-key-file", str(key), "--engine", f"{host}:{port}"]
        flags += ["--api-key", "right", "--admin-key", "admin", "--header-timeout-s", "3"]
        front = stack.enter_context(RunningServer(command=[*MILLRACE, "route", *flags]))
        pages = ("127.0.0.1", int(engine.pages.rpartition(":")[2]))
        assert listening_ports(engine.process.pid) == {engine.host_and_port[1], pages[1]}
        assert listening_ports(front.process.pid) == {front.address[1]}
        before = {one: (resident_mib(one), num_files(one)) for one in (engine.process.pid, front.process.pid)}

        for address in (engine.host_and_port, pages, front.address):
            for got in answers_to_junk(address, NUM_FRAMES, seed=port):
                if address == engine.host_and_port:
                    assert len(got) <= NONCE_BYTES
                else:
                    assert got == b"" or got.split()[1] in (b"400", b"401", b"404", b"408", b"505"), got
        proven = [recorded for recorded in sent if len(recorded) > 64]  # with the proof of the key, and frames
        assert proven
        for recorded in proven:
            with socket.create_connection(engine.host_and_port, 30.0) as stranger:
                stranger.sendall(recorded)
                assert len(received(stranger)) <= NONCE_BYTES, "a recorded handshake is refused"
        assert len(closed_after(engine.host_and_port, 40, b"", 60.0)) == 40
        for address in (pages, front.address):
            assert len(closed_after(address, 40, b"GET /health HTTP/1.1\r\nX-A: ", 60.0)) == 40

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

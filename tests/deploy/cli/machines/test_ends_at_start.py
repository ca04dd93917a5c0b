"""Processes that are told to end while they start: in a handshake, or while a model loads that never comes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.runtime.processes.auth import FleetKey, Handshake
from millrace.runtime.processes.frames import FRAME
from tests.counts import count
from tests.deploy.cli.machines.test_engine_and_route import MILLRACE
from tests.deploy.running import ROOT

KEY = bytes(range(32))
LIMIT_S = 120.0  # also on a machine that stands still for a while

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Silent:
    """An address that takes connections and says nothing more, but the proof of the fleet's key if it `proves` that."""

    def __init__(self, *, proves: bool = False) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._proves = proves
        self._kept: list[socket.socket] = []
        self.is_met = threading.Event()  # a connection is there; the key is proven, and the hello came
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._kept.append(connection)
            if self._proves:
                _prove(connection)
            self.is_met.set()

    def close(self) -> None:
        self._server.close()
        for connection in self._kept:
            connection.close()


def _prove(connection: socket.socket) -> None:
    handshake = Handshake(FleetKey(KEY).derive("link"), "listener")
    connection.sendall(handshake.nonce)
    while not handshake.is_done:
        connection.sendall(handshake.feed(connection.recv(handshake.num_wanted)))
    assert connection.recv(FRAME.size, socket.MSG_WAITALL)


@contextmanager
def silent(*, proves: bool = False) -> Iterator[Silent]:
    one = Silent(proves=proves)
    try:
        yield one
    finally:
        one.close()


def end_once_met(peer: Silent, arguments: Sequence[str], folder: Path, number: int, **environment: str) -> None:
    """Starts a command, and sends it a signal once it waits for `peer`: it must end with 0 and without a word."""
    key = folder / "fleet.key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            [*MILLRACE, *arguments], cwd=ROOT, env=os.environ | environment, stdout=subprocess.DEVNULL, stderr=errors
        ) as process:
            try:
                assert peer.is_met.wait(LIMIT_S), os.pread(errors.fileno(), 1 << 16, 0)
                process.send_signal(number)
                code = process.wait(LIMIT_S)
            finally:
                process.kill()
        told = os.pread(errors.fileno(), 1 << 20, 0).decode()
    assert code == 0 and "Traceback" not in told and '"level":"error"' not in told, told


@pytest.mark.parametrize("command", ["serve", "engine", "route"])
def test_a_process_that_still_reads_its_settings_ends_with_0_on_sigterm(command: str, tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    os.mkfifo(settings)
    needed = {"serve": [], "engine": ["--listen", "127.0.0.1:0"], "route": ["--engine", "127.0.0.1:1"]}[command]
    arguments = [*MILLRACE, command, "--config", str(settings), *needed]
    with subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            with settings.open("w"):  # once it reads it
                process.send_signal(signal.SIGTERM)
                told = process.communicate(timeout=LIMIT_S)[1]
        finally:
            process.kill()
    assert (process.returncode, told) == (0, "")


HANDSHAKES = [  # each two values of two parameters together; the full count has all eight
    *((1, False, signal.SIGTERM), (1, True, signal.SIGINT), (2, False, signal.SIGINT), (2, True, signal.SIGTERM)),
    *((1, False, signal.SIGINT), (1, True, signal.SIGTERM), (2, False, signal.SIGTERM), (2, True, signal.SIGINT)),
]


@pytest.mark.parametrize(("num_fronts", "proves", "number"), HANDSHAKES[: count(4, full=8)])
def test_a_front_that_is_closed_in_its_first_handshake_ends_with_0(
    num_fronts: int, proves: bool, number: int, tmp_path: Path
) -> None:
    with silent(proves=proves) as peer:
        flags = ["--port", "0", "--front-processes", str(num_fronts), "--fleet-key-file", str(tmp_path / "fleet.key")]
        end_once_met(peer, ["route", *flags, "--engine", peer.address], tmp_path, number)


LOADING = [
    ["engine", "--listen", "127.0.0.1:0"],
    ["serve", "--port", "0"],
    ["serve", "--port", "0", "--data-parallel-size", "2"],
    ["serve", "--port", "0", "--front-processes", "2"],
    ["serve", "--port", "0", "--mode", "split"],  # one engine process, where --data-parallel-size has two
]


@pytest.mark.parametrize("arguments", LOADING[: count(4, full=5)], ids=lambda arguments: " ".join(arguments))
def test_a_process_that_is_closed_while_a_model_loads_does_not_wait_for_it(
    arguments: Sequence[str], tmp_path: Path
) -> None:
    with silent() as hub:
        hub_s = {"HF_ENDPOINT": f"http://{hub.address}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        limits = {"HF_HUB_DOWNLOAD_TIMEOUT": "1000", "HF_HUB_ETAG_TIMEOUT": "1000"}
        command = [arguments[0], "nobody/nothing", *arguments[1:], "--shutdown-timeout-s", "0.1"]
        end_once_met(hub, command, tmp_path, signal.SIGTERM, **hub_s, **limits)

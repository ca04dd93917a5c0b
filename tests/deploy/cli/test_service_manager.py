"""What `millrace serve` tells the service manager that started it."""

from __future__ import annotations

import json
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.running import RunningServer, post_bytes

INTERVAL_S = 0.2
FREEZE = ("stage=tokenize,freeze",)


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The socket of a service manager that wants a sign of life every INTERVAL_S."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", f"{1e6 * INTERVAL_S:.0f}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind(str(tmp_path / "notify"))
        receiving.settimeout(30.0)
        yield receiving


def waiting(manager: socket.socket) -> list[bytes]:
    """The messages that have arrived and were not read."""
    found = []
    while select.select([manager], [], [], 0)[0]:
        found.append(manager.recv(4096))
    return found


@pytest.mark.slow
def test_signs_of_life_begin_when_ready_and_stop_when_a_stage_is_frozen(manager: socket.socket) -> None:
    options = {"server": {"stall_timeout_s": 0.5, "shutdown_timeout_s": 0}, "engine": {"inject": FREEZE}}
    with RunningServer(**options) as server:
        assert manager.recv(4096).decode() == f"READY=1\nSTATUS={server.ready['models'][0]} on {server.url}"
        for _ in range(4):
            assert manager.recv(4096) == b"WATCHDOG=1"
        with server.connect() as client:
            client.sendall(post_bytes("/v1/completions", {"prompt": "abc"}))
            deadline = time.monotonic() + 30
            while server.get("/health/ready").status == 200:
                assert time.monotonic() < deadline, "the stage that was frozen counts as healthy"
                time.sleep(0.02)
            assert json.loads(server.get("/health/ready").body)["status"] == "stalled"
            waiting(manager)
            time.sleep(3 * INTERVAL_S)
            assert waiting(manager) == []
            server.signal(signal.SIGTERM)
            assert manager.recv(4096) == b"STOPPING=1"

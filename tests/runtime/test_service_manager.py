"""What a service manager is sent, by a socket that takes its place."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from millrace.runtime.env.service_manager import ServiceManager


def listening(address: str) -> socket.socket:
    receiving = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    receiving.bind("\0" + address[1:] if address.startswith("@") else address)
    receiving.settimeout(60.0)
    return receiving


@pytest.mark.parametrize("is_abstract", [False, True])
def test_states_arrive_at_a_path_and_at_an_abstract_address(is_abstract: bool, tmp_path: Path) -> None:
    address = f"@millrace-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with listening(address) as receiving:
        manager = ServiceManager(address)
        manager.ready("demo on http://127.0.0.1:8000")
        manager.alive()
        manager.stopping()
        states = [receiving.recv(4096) for _ in range(3)]
    assert states == [b"READY=1\nSTATUS=demo on http://127.0.0.1:8000", b"WATCHDOG=1", b"STOPPING=1"]


def test_a_manager_that_does_not_read_or_is_gone_delays_nothing(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    manager = ServiceManager(address)
    manager.alive()  # nothing is there yet
    with listening(address) as receiving:
        for _ in range(2000):  # more than a socket queues
            manager.alive()
        receiving.setblocking(False)
        states = []
        with suppress(BlockingIOError):
            while True:
                states.append(receiving.recv(4096))
        assert set(states) == {b"WATCHDOG=1"} and len(states) < 2000, "what the queue has no room for is dropped"
        manager.alive()
        assert receiving.recv(4096) == b"WATCHDOG=1", "once it reads again, it is told again"
    manager.alive()


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "1500000"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, None),  # meant for another process
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_interval_is_that_of_this_process_in_seconds(environ: dict[str, str], watchdog_s: float | None) -> None:
    assert ServiceManager.take({"NOTIFY_SOCKET": "/run/notify"} | environ).watchdog_s == watchdog_s


@pytest.mark.parametrize("address", ["", "vsock:2:1234", "notify"])
def test_without_an_address_that_is_supported_nothing_is_watched(address: str) -> None:
    manager = ServiceManager.take({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"})
    assert manager.watchdog_s is None
    manager.ready("unheard")


def test_children_inherit_no_address() -> None:
    environ = {"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "HOME": "/root"}
    ServiceManager.take(environ)
    assert environ == {"HOME": "/root"}

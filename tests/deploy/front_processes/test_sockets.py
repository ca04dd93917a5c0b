from __future__ import annotations

import socket
from contextlib import closing

import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.front_processes.sockets import reserve_port
from millrace.deploy.http.listening import ListeningSockets
from millrace.stages.errors import ConfigError


def test_a_port_on_which_another_process_listens_is_an_error_that_names_it() -> None:
    for shares in (False, True):
        with socket.socket() as other:
            if shares:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: process .* listens there"):
                reserve_port(ServerConfig(port=port))


def test_fronts_share_the_reserved_port_and_the_reservation_takes_no_connection() -> None:
    (held,) = reserve_port(ServerConfig(port=0))
    with closing(held):
        port = held.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 1.0)
        config = ServerConfig(port=port)
        with (
            closing(ListeningSockets.open(config, shares_port=True)) as first,
            closing(ListeningSockets.open(config, shares_port=True)) as second,
        ):
            for _ in range(64):
                socket.create_connection(("127.0.0.1", port), 1.0).close()
            counts = [_accepted(one.sockets[0]) for one in (first, second)]
            assert sum(counts) == 64 and min(counts) > 0
        with pytest.raises(ConfigError):
            ListeningSockets.open(config)  # not for another server


def _accepted(listening: socket.socket) -> int:
    listening.setblocking(False)
    count = 0
    try:
        while True:
            listening.accept()[0].close()
            count += 1
    except BlockingIOError:
        return count

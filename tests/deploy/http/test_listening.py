"""Opening the sockets of a server: what belongs to a living process stays, what a dead one left is taken over."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millrace.deploy.config import ServerConfig
from millrace.deploy.http import port_holder
from millrace.deploy.http.listening import ListeningSockets
from millrace.deploy.http.port_holder import port_problem
from millrace.runtime.env.log import captured_logs
from millrace.stages.errors import ConfigError

MINE = f"process {os.getpid()} ("


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


def opened(path: Path) -> ListeningSockets:
    return ListeningSockets.open(ServerConfig(uds=str(path)))


def is_alive(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def test_a_port_in_use_is_refused_with_the_process_that_has_it() -> None:
    first = ListeningSockets.open(ServerConfig(port=0))
    with pytest.raises(ConfigError, match=f"127.0.0.1:{first.port}: ") as refused:
        ListeningSockets.open(ServerConfig(port=first.port))
    assert MINE in str(refused.value) and "--port" in str(refused.value)
    socket.create_connection(("127.0.0.1", first.port)).close()
    first.close()
    ListeningSockets.open(ServerConfig(port=first.port)).close()


def test_a_name_with_two_addresses_listens_on_both_at_one_port() -> None:
    listening = ListeningSockets.open(ServerConfig(host="localhost", port=0))
    assert {sock.getsockname()[1] for sock in listening.sockets} == {listening.port}
    assert len(listening.sockets) == len({info[4][0] for info in socket.getaddrinfo("localhost", 0)})
    listening.close()


@pytest.mark.parametrize(
    ("host", "words"), [("192.0.2.1", "no network interface"), ("no-such-host.invalid", "must be a name or an address")]
)
def test_an_address_of_another_machine_is_refused(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ListeningSockets.open(ServerConfig(host=host, port=0, allow_no_key=True))


def test_the_socket_of_a_living_server_is_left_to_it(path: Path) -> None:
    first = opened(path)
    with pytest.raises(ConfigError) as refused:
        opened(path)
    assert str(path) in str(refused.value) and MINE in str(refused.value)
    assert is_alive(path), "the first still has its socket"
    first.close()
    assert not path.exists()


def test_the_socket_of_a_dead_server_is_taken_over(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists() and not is_alive(path)
    with captured_logs() as logs:
        listening = opened(path)
    assert [line["event"] for line in logs] == ["socket.taken_over"]
    assert is_alive(path)
    listening.close()


def test_a_server_that_ends_leaves_the_socket_of_its_successor(path: Path) -> None:
    first = opened(path)
    path.unlink()  # as someone does who thinks that it is a dead server's
    second = opened(path)
    first.close()
    assert is_alive(path)
    second.close()


def test_of_many_that_start_at_once_one_gets_the_socket_of_a_dead_server(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    results: list[ListeningSockets | ConfigError] = []

    def start() -> None:
        try:
            results.append(opened(path))
        except ConfigError as error:
            results.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [result for result in results if isinstance(result, ListeningSockets)]
    assert len(winners) == 1 and len(results) == 8 and is_alive(path)
    winners[0].close()


@pytest.mark.parametrize(("name", "words"), [("file", "another kind"), ("none/socket", "folder"), ("x" * 200, "107")])
def test_a_path_that_cannot_be_a_socket_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=words):
        opened(tmp_path / name)
    assert (tmp_path / "file").read_text() == "kept"


IN_USE = OSError(errno.EADDRINUSE, "Address already in use")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("  sl  local_address rem_address   st\n", "the port is in use"),
        ("  sl\n 0: 0100007F:1F40 00000000:0000 01 0 0 0 0 0 99999999999\n", "the port is in use"),
        ("  sl\n 0: 0100007F:1F40 00000000:0000 0A 0 0 0 0 0 99999999999\n", "another process listens there"),
    ],
)
def test_a_holder_of_a_port_that_is_not_found_is_named_by_a_command(
    table: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tcp").write_text(table)
    monkeypatch.setattr(port_holder, "TABLES", (tmp_path / "tcp", tmp_path / "tcp6"))
    command = "(as root, `ss -tanp 'sport = :8000'` says by what)"
    due = f"cannot listen on [::1]:8000: {said} {command}; stop that, or choose another --listen"
    assert port_problem("::1", 8000, IN_USE, "--listen", "--listen") == due


def test_a_port_that_an_outgoing_connection_has_is_said_to_be_that() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        said = port_problem("127.0.0.1", client.getsockname()[1], IN_USE)
        due = "), which is this one, has a connection from there; choose another --port"
        assert MINE in said and said.endswith(due)


def test_another_process_that_listens_on_a_port_is_named() -> None:
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True)"
    code += "; sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdin is not None
        said = port_problem("127.0.0.1", int(other.stdout.readline()), IN_USE)
        other.stdin.close()
    assert f": process {other.pid} (" in said and said.endswith(") listens there; stop it, or choose another --port")

"""Servers in processes of their own, and raw talk with them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.counts import FULL
from tests.deploy.forked import CAN_FORK, ForkedProcess, Origin

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripted_fronts.py" if os.environ.get("MILLRACE_TEST_FRONTS") else "scripted_serve.py"
FORKED_COMMANDS = [[sys.executable, "-m", "millrace.deploy", name] for name in ("serve", "route")]
HELD = ("live", "blocks_in_use", "blocks_quarantined", "admitted", "sequences")


def is_forked(command: Sequence[str] | None) -> bool:
    """Whether a server that is started now is a fork: in a test of CI, not with full counts, nor for loads and
    benchmarks by a command, which measure processes as they are outside of tests."""
    if not CAN_FORK or FULL or "PYTEST_CURRENT_TEST" not in os.environ:
        return False
    return SCRIPT == "scripted_serve.py" if command is None else list(command[:4]) in FORKED_COMMANDS


_origins: dict[tuple[str, ...], Origin] = {}
_origins_lock = threading.Lock()


def _origin(*program: str) -> Origin:
    """Of the servers of this process that a script runs, with its arguments; a new one if the last has ended."""
    with _origins_lock:
        if program not in _origins or _origins[program].has_ended:
            folders = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
            command = [sys.executable, str(ROOT / "tests/deploy" / program[0]), *program[1:]]
            _origins[program] = Origin(command, ROOT, os.environ | {"PYTHONPATH": folders})
        return _origins[program]


class RunningServer:
    """One process; `url` once it is ready. A context manager that kills it.

    `options` are those of `scripted_serve`, unless there is another `command`.
    """

    def __init__(self, *, wait: bool = True, command: Sequence[str] | None = None, **options: Any) -> None:
        self.is_scripted = command is None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self.process: subprocess.Popen[str] | ForkedProcess
        if is_forked(command):
            origin = _origin(SCRIPT, "--fork") if command is None else _origin("forked_command.py")
            asked = options if command is None else {"arguments": list(command[3:])}
            self.process = origin.start(asked, environment, self._errors.fileno())
        else:
            self.process = subprocess.Popen(
                command or [sys.executable, str(ROOT / "tests/deploy" / SCRIPT), json.dumps(options)],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
            )
        self.address = ("127.0.0.1", options.get("server", {}).get("port", 0))
        if wait:
            self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Reads the ready line."""
        line = self._read_line()
        if not line:
            raise RuntimeError(f"the server did not start:\n{self.errors()}")
        self.ready = json.loads(line)
        self.url: str = self.ready["url"]
        address = urlsplit(self.url)
        self.address = (str(address.hostname), int(address.port or 0))

    def wait_until_listening(self, timeout_s: float = 60.0) -> None:
        """Before it is ready: until connections are taken. Needs a fixed port."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                self.connect().close()
                return
            except ConnectionRefusedError:
                time.sleep(0.05)
        raise TimeoutError(f"no process listens:\n{self.errors()}")

    def errors(self) -> str:
        """What it has written to stderr so far."""
        errors = self._errors.fileno()
        return os.pread(errors, os.fstat(errors).st_size, 0).decode(errors="replace")

    def ask(self, question: str) -> Any:
        """See `scripted_serve`."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{question}\n")
        self.process.stdin.flush()
        return json.loads(self._read_line())

    def stats(self) -> dict[str, Any]:
        """How late its loop was since the last time, and what its engine holds."""
        stats: dict[str, Any] = self.ask("stats")
        return stats

    def wait_until_idle(self, timeout_s: float = 60.0) -> float:
        """Waits until nothing is left of any request in the engine. Returns the seconds by the server's own clock,
        which stands still while others have the processor (`scripted_serve.LoopLag`)."""
        return self.wait_until_held(dict.fromkeys(HELD, 0), timeout_s)

    def wait_until_held(self, most: Mapping[str, int], timeout_s: float = 60.0) -> float:
        """The same, until the engine holds no more of each than that."""
        deadline, began_s = time.monotonic() + timeout_s, None
        while True:
            stats = self.stats()
            began_s = stats["clock_s"] if began_s is None else began_s
            left = {name: stats[name] for name in most}
            if all(left[name] <= most[name] for name in most):
                assert not stats["violations"]
                return float(stats["clock_s"] - began_s)
            assert time.monotonic() < deadline, f"the engine still holds {left}"
            time.sleep(0.01)

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate()
        self._errors.close()

    def _read_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    # -- talking

    def connect(self, timeout_s: float = 60.0) -> socket.socket:
        """A connection of the bare kind."""
        connection = socket.create_connection(self.address, timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def raw(self, data: bytes, timeout_s: float = 60.0) -> Answer:
        """What comes back for these bytes."""
        with self.connect(timeout_s) as connection:
            began = time.perf_counter()
            send(connection, data)
            return read_answer(connection, began, has_body=not data.startswith(b"HEAD "))

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Answer:
        """The answer to a JSON body; bytes go as they are."""
        return self.raw(post_bytes(path, body, headers))

    def get(self, path: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Answer:
        """The answer to a request without a body."""
        return self.raw(head_bytes(method, path, {"Connection": "close"} | dict(headers or {})))


@dataclass(frozen=True)
class Answer:
    """A response as it came over the wire."""

    status: int
    headers: dict[str, str]  # lower-case names
    body: bytes
    seconds: float  # from the first byte sent to the last one read

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    def events(self) -> list[Any]:
        """The data of a stream's events; the last is the text [DONE]."""
        parts = self.body.decode().split("\n\n")
        assert parts[-1] == "", "the stream ends in the middle of an event"
        assert all(part.startswith("data: ") for part in parts[:-1])
        return [part[6:] if part == "data: [DONE]" else json.loads(part[6:]) for part in parts[:-1]]


def heeds_interrupts() -> None:
    """For `preexec_fn`: a process heeds SIGINT also where the tests run in a shell's background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def head_bytes(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogateescape")


def post_bytes(path: str, body: Any, headers: Mapping[str, str] | None = None) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    all_headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), "Connection": "close"}
    return head_bytes("POST", path, all_headers | dict(headers or {})) + data


def send(connection: socket.socket, data: bytes) -> None:
    """Sends what the other side lets us send: it may answer and close before it has read all."""
    try:
        connection.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        return


def read_answer(connection: socket.socket, began: float | None = None, has_body: bool = True) -> Answer:
    """One response, to its end. `ConnectionError` if the connection closes before there is one."""
    began = time.perf_counter() if began is None else began
    chunks = _chunks(connection)
    data = b""
    while b"\r\n\r\n" not in data:
        data += next(chunks)
    head, _, rest = data.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    status = int(lines[0].split(" ")[1])
    pairs = (line.split(":", 1) for line in lines[1:])
    headers = {name.lower(): value.strip() for name, value in pairs}
    body = _read_body(headers, rest, chunks) if has_body else b""
    return Answer(status, headers, body, time.perf_counter() - began)


def _chunks(connection: socket.socket) -> Iterator[bytes]:
    while data := connection.recv(65536):
        yield data
    raise ConnectionError("the connection was closed in the middle of a response")


def _read_body(headers: Mapping[str, str], data: bytes, chunks: Iterator[bytes]) -> bytes:
    if headers.get("transfer-encoding") == "chunked":
        return _read_chunked(data, chunks)
    length = int(headers.get("content-length", "0"))
    while len(data) < length:
        data += next(chunks)
    return data[:length]


def _read_chunked(data: bytes, chunks: Iterator[bytes]) -> bytes:
    parts = []
    while True:
        while b"\r\n" not in data:
            data += next(chunks)
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        while len(data) < length + 2:
            data += next(chunks)
        if not length:
            return b"".join(parts)
        parts.append(data[:length])
        data = data[length + 2 :]

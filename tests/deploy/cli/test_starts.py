"""`millrace serve` as a process in bad surroundings: it serves, or says within seconds what is missing."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.running import free_port

pytestmark = pytest.mark.slow

SERVE = [sys.executable, "-m", "millrace.deploy", "serve"]
LIMIT_S = 30.0  # for a start on a machine that others use too; alone it takes about a second
PROMPT = json.dumps({"prompt": "Once", "max_tokens": 4})


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A server with the bundled model; killed at the end."""
    process = subprocess.Popen([*SERVE, *arguments], **{"stdin": subprocess.DEVNULL} | options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def refusal(*arguments: str, **options: Any) -> str:
    """What a server says that does not start: one line."""
    done = subprocess.run([*SERVE, *arguments], capture_output=True, text=True, timeout=LIMIT_S, **options)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
    return done.stderr.splitlines()[-1]


def ask(connect: Callable[[], http.client.HTTPConnection], path: str, body: str | None = None) -> tuple[int, Any]:
    connection = connect()
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("GET" if body is None else "POST", path, body, headers if body else {})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def until_ready(connect: Callable[[], http.client.HTTPConnection], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        assert process.poll() is None, process.returncode
        assert time.monotonic() < deadline, "it neither serves nor ends"
        try:
            if ask(connect, "/health")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)


def at_port(port: int) -> Callable[[], http.client.HTTPConnection]:
    return lambda: http.client.HTTPConnection("127.0.0.1", port, timeout=LIMIT_S)


def at_socket(path: Path) -> Callable[[], http.client.HTTPConnection]:
    def connect() -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("localhost", timeout=LIMIT_S)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        return connection

    return connect


def limited(kind: int, value: int) -> Callable[[], None]:
    """As `ulimit` in the shell that starts the process."""
    return lambda: resource.setrlimit(kind, (value, value))


def test_a_second_server_harms_no_first_and_takes_over_from_a_dead_one(tmp_path: Path) -> None:
    path, record = tmp_path / "socket", tmp_path / "recording"
    arguments = ("--uds", str(path), "--record", str(record), "--served-model-name", "émile")
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    with started(*arguments, stdout=subprocess.PIPE, env=ascii_only) as first:
        assert first.stdout is not None
        ready = json.loads(first.stdout.readline())
        assert (ready["models"], ready["pid"]) == (["émile"], first.pid)
        assert f"process {first.pid} (" in refusal(*arguments)
        assert ask(at_socket(path), "/v1/completions", PROMPT)[0] == 200
        assert [file.name for file in tmp_path.iterdir() if "recording" in file.name] == ["recording"]
        first.kill()
        first.wait()
        assert path.exists()
        with started(*arguments, stdout=subprocess.DEVNULL) as third:
            until_ready(at_socket(path), third)
            assert (tmp_path / "recording.1").exists(), "the recording of the dead one stays"
            third.send_signal(signal.SIGTERM)
            assert third.wait(LIMIT_S) == 0
    assert not path.exists()


def test_a_port_in_use_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        before_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        line = refusal("no/such/model", "--offline", "--port", str(port))
        used_s = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before_s
    assert line.startswith(f"millrace: cannot listen on 127.0.0.1:{port}: process {os.getpid()} (")
    assert used_s < 1.0


def test_without_standard_streams_with_64_files_and_little_address_space_it_serves() -> None:
    port = free_port()

    def prepare() -> None:
        limited(resource.RLIMIT_NOFILE, 64)()
        limited(resource.RLIMIT_AS, 2_500 * 2**20)()
        for descriptor in (0, 1, 2):
            os.close(descriptor)

    with started("--port", str(port), preexec_fn=prepare) as server, ExitStack() as idle:
        until_ready(at_port(port), server)
        for _ in range(100):  # more than it may open
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert ask(at_port(port), "/health")[0] in (200, 503)
        deadline = time.monotonic() + LIMIT_S
        answers = {}
        for path, asked in (("/v1/completions", (PROMPT,)), ("/server_info", ())):
            while (answer := ask(at_port(port), path, *asked))[0] != 200:  # until they have been idle for a second
                assert time.monotonic() < deadline
                time.sleep(0.2)
            answers[path] = answer[1]
        assert answers["/server_info"]["memory"]["total_bytes"] < 1_500 * 2**20
        server.send_signal(signal.SIGTERM)
        assert server.wait(LIMIT_S) == 0


def test_a_reader_that_leaves_a_full_disk_and_ascii_only_end_no_server(tmp_path: Path) -> None:
    port = free_port()
    reading, writing = os.pipe()
    os.close(reading)
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    arguments = ("--port", str(port), "--served-model-name", "émile", "--log-level", "debug")
    with open("/dev/full", "wb") as full, started(*arguments, stdout=writing, stderr=full, env=environment) as server:
        os.close(writing)
        until_ready(at_port(port), server)
        assert ask(at_port(port), "/v1/models")[1]["data"][0]["id"] == "émile"
        server.send_signal(signal.SIGTERM)
        assert server.wait(LIMIT_S) == 0


@pytest.mark.parametrize(
    ("kind", "value", "words", "flag"),
    [
        (resource.RLIMIT_NOFILE, 24, "may open 24 files", "ulimit -n"),
        (resource.RLIMIT_AS, 600 * 2**20, "MiB more memory", "ulimit -v"),
    ],
)
def test_a_limit_that_leaves_too_little_is_named(kind: int, value: int, words: str, flag: str) -> None:
    line = refusal("--port", "0", preexec_fn=limited(kind, value))
    assert words in line and flag in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--record", "{folder}"], "record = {folder}: is a folder"),
        (["--record", "{folder}/none/file"], "the folder {folder}/none does not exist"),
        (["--flight-recorder-dir", "{file}/below"], "flight_recorder_dir = {file}/below: lies below a file"),
        (["--profiler-dir", "{file}"], "profiler_dir = {file}: is a file"),
    ],
)
def test_a_setting_that_could_do_nothing_is_refused_in_one_line(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    names = {"folder": str(tmp_path), "file": str(tmp_path / "file")}
    (tmp_path / "file").write_text("")
    line = refusal("--port", "0", *(argument.format(**names) for argument in arguments))
    assert line.startswith("millrace: ") and words.format(**names) in line
